"""Ugly shapes, expert stacks, fused groups, static scales, and what unchecked NaN does."""

from __future__ import annotations

import pytest
import torch
from oracle_bytes import assert_same
from test_formats_basic import rows, width

from lowbitrl.formats import Calibrator, get_format, known_formats

FORMATS = known_formats()
PLAIN = [n for n in FORMATS if ":" not in n]


@pytest.mark.parametrize("name", FORMATS)
def test_strides_do_not_matter(name):
    fmt = get_format(name)
    k = width(fmt)
    base = torch.randn(k, 2 * rows(name))
    transposed, strided = base.T, torch.randn(rows(name), 2 * k)[:, ::2]
    for x in (transposed, strided, strided.flip(0)):
        q = fmt.quantize(x)
        assert_same(q.qdata, fmt.quantize(x.contiguous()).qdata, "codes")
        assert_same(fmt.fake_quantize(x), q.dequantize(x.dtype), "fake")
        assert all(t.is_contiguous() for t in q.tensors().values())


@pytest.mark.parametrize("name", FORMATS)
def test_meta_tensors_give_shapes(name):
    fmt = get_format(name)
    lead = (2, rows(name))
    real = fmt.quantize(torch.randn(*lead, width(fmt)))
    meta = fmt.quantize(torch.empty(*lead, width(fmt), device="meta"))
    for key, t in real.tensors().items():
        assert meta.tensors()[key].shape == t.shape, key
        assert meta.tensors()[key].dtype == t.dtype, key
    assert fmt.fake_quantize(torch.empty(*lead, width(fmt), device="meta")).shape == (*lead, width(fmt))


@pytest.mark.parametrize("name", FORMATS)
def test_an_expert_stack_is_its_experts(name):
    fmt = get_format(name)
    n, k = (256 if name.startswith("fp8-block") else rows(name)), width(fmt)
    stack = torch.randn(3, n, k) * torch.tensor([0.1, 1.0, 30.0]).view(3, 1, 1)
    stack[1, : n // 2] = 0
    amax = stack.abs().amax((1, 2), keepdim=True)
    q = fmt.quantize(stack, amax=amax)
    for i in range(3):
        alone = fmt.quantize(stack[i], amax=amax[i])
        assert_same(q.qdata[i], alone.qdata, "codes")
        assert_same(q.dequantize()[i], alone.dequantize(), "values")


@pytest.mark.parametrize("name", [n for n in FORMATS if n.startswith("nvfp4")])
def test_a_fused_group_shares_its_global_scale(name):
    fmt = get_format(name)
    q_proj, k_proj = torch.randn(8, 64), 7 * torch.randn(4, 64)
    joint = torch.maximum(q_proj.abs().max(), k_proj.abs().max())
    parts = [fmt.quantize(w, amax=joint) for w in (q_proj, k_proj)]
    whole = fmt.quantize(torch.cat([q_proj, k_proj]), amax=joint)
    assert_same(torch.cat([p.qdata for p in parts]), whole.qdata, "codes")
    assert parts[0].global_scale is not None
    assert parts[1].global_scale is not None
    assert_same(parts[0].global_scale, parts[1].global_scale, "global scale")


@pytest.mark.parametrize("name", PLAIN)
def test_bits_per_element_is_what_is_stored(name):
    fmt = get_format(name)
    x = torch.randn(1024, 4096)
    assert fmt.quantize(x).nbytes * 8 / x.numel() == pytest.approx(fmt.bits_per_element, rel=2e-3)


@pytest.mark.parametrize("name", [n for n in PLAIN if n.startswith(("nvfp4", "fp8"))])
def test_unchecked_nan_stays_visible(name):
    fmt = get_format(name)
    x = torch.randn(4, width(fmt))
    x[2, 5] = float("nan")
    q = fmt.quantize(x, check=False)
    assert q.dequantize()[2, 5].isnan()
    assert fmt.fake_quantize(x, check=False)[2, 5].isnan()


def test_a_bad_amax_is_refused():
    with pytest.raises(ValueError, match=r"amax of w1"):
        get_format("nvfp4").quantize(torch.randn(2, 16), amax=torch.tensor(float("inf")), name="w1")


def test_calibrator_freezes_until_refreshed():
    cal = Calibrator("layers.3.down_proj")
    with pytest.raises(RuntimeError, match=r"layers\.3\.down_proj.*no activation"):
        _ = cal.amax
    cal.observe(torch.tensor([[1.0, -3.0], [9.0, 9.0]]), mask=torch.tensor([True, False]))
    cal.observe(torch.tensor([2.0]))
    assert cal.refresh() == 3.0
    cal.observe(torch.tensor([8.0]))
    assert cal.amax == 3.0
    assert cal.refresh() == 8.0
    assert cal.refresh() == 8.0  # a dead site keeps its last scale


def test_a_dead_expert_cannot_be_calibrated():
    cal = Calibrator("experts.7")
    cal.observe(torch.zeros(0, 16))
    with pytest.raises(RuntimeError, match="every expert"):
        cal.refresh()


@pytest.mark.parametrize("name", ["nvfp4-tensor", "fp8-tensor", "nvfp4-token", "fp8-token", "int8-token"])
def test_a_static_scale_is_batch_invariant(name):
    fmt = get_format(name)
    x = torch.randn(6, 64)
    amax = x.abs().max()
    assert_same(fmt.quantize(x[2:3], amax=amax).qdata, fmt.quantize(x, amax=amax).qdata[2:3], "codes")


@pytest.mark.parametrize("name", FORMATS)
def test_default_device_and_dtype_do_not_matter(name):
    fmt = get_format(name)
    x = torch.randn(rows(name), width(fmt))
    expected = fmt.quantize(x)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device("meta"):  # as models are built by transformers
            q, fake = fmt.quantize(x), fmt.fake_quantize(x)
    finally:
        torch.set_default_dtype(torch.float32)
    assert_same(q.qdata, expected.qdata, "codes")
    assert_same(q.scale.float(), expected.scale.float(), "scales")
    assert_same(fake, expected.dequantize(), "values")


def test_works_across_inference_mode():
    fmt = get_format("nvfp4")
    with torch.inference_mode():
        q = fmt.quantize(torch.randn(4, 32))
    weight = torch.randn(32, 3, requires_grad=True)
    (q.dequantize().clone() @ weight).sum().backward()
    assert weight.grad is not None
