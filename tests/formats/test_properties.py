"""Properties that hold for all data, tried with hypothesis, and the formats for which they do not, with why."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracle_bytes import assert_same
from test_formats_basic import rows, width

from lowbitrl.formats import format as format_module
from lowbitrl.formats import get_format, known_formats
from lowbitrl.formats.grids import round_e2m1, round_int, to_e4m3

FORMATS = known_formats()
few = settings(max_examples=5, deadline=None, derandomize=True)
some = settings(max_examples=30, deadline=None, derandomize=True)


@st.composite
def tensors(draw, n: int, k: int, dtype=None):
    """(n, k) data of the kinds that break formats: ties, outliers, zero rows and blocks, tiny and huge."""
    generator = torch.Generator().manual_seed(draw(st.integers(0, 2**31)))
    x = torch.randn(n, k, generator=generator)
    kind = draw(st.sampled_from(["gauss", "rows", "outlier", "holes", "ties", "heavy"]))
    if kind == "rows":
        x *= torch.exp(3 * torch.randn(n, 1, generator=generator))
    elif kind == "outlier":
        x[0, 0] = 10.0 ** draw(st.integers(1, 7))
    elif kind == "holes":
        x[:, : k // 2] = 0
        x[n // 2] = 0
    elif kind == "ties":
        x = torch.round(x * 4) / 4
    elif kind == "heavy":
        x = x / torch.rand(n, k, generator=generator).clamp(min=1e-3)
    x *= 2.0 ** draw(st.integers(-12, 6))
    return x.to(dtype or draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16])))


def small(name: str) -> tuple[int, int]:
    return max(rows(name), 5 if ":w4a8" not in name else 0), width(get_format(name))


@pytest.mark.parametrize("name", FORMATS)
def test_fake_quantize_is_decode_of_encode(name):
    fmt = get_format(name)

    @few
    @given(tensors(*small(name)))
    def check(x):
        assert_same(fmt.fake_quantize(x), fmt.quantize(x).dequantize(x.dtype), "values")

    check()


@pytest.mark.parametrize("name", [n for n in FORMATS if get_format(n).is_batch_invariant])
def test_batch_invariance(name):
    fmt = get_format(name)

    @few
    @given(tensors(*small(name)))
    def check(x):
        if name.endswith(":w4a8"):
            return
        q = fmt.quantize(x)
        for i in range(len(x)):
            alone = fmt.quantize(x[i])
            assert_same(alone.qdata, q.qdata[i], "codes")
            assert_same(alone.scale.float(), q.scale[i].float(), "scales")

    check()


@pytest.mark.parametrize("name", [n for n in FORMATS if not get_format(n).is_batch_invariant])
def test_formats_that_say_they_depend_on_the_batch_do(name):
    fmt = get_format(name)
    x = torch.randn(128, width(fmt))
    before = fmt.quantize(x)
    x[1] *= 1000
    after = fmt.quantize(x)
    assert not torch.equal(before.dequantize()[0], after.dequantize()[0])


@pytest.mark.parametrize("name", [n for n in FORMATS if not n.startswith("fp8-block")])
def test_row_permutation(name):
    fmt = get_format(name)

    @few
    @given(tensors(*small(name)), st.randoms(use_true_random=False))
    def check(x, random):
        order = list(range(len(x)))
        random.shuffle(order)
        q, permuted = fmt.quantize(x), fmt.quantize(x[order])
        assert_same(permuted.qdata, q.qdata[order], "codes")
        assert_same(permuted.dequantize(), q.dequantize()[order], "values")

    check()


# Not here: /7.5 and /127.5 rules (a largest element at +7.5 codes as 7, so the next amax is smaller);
# :ceil (an amax that rounds down to half the range takes the next smaller scale: same values, other bytes);
# NVFP4 without a floor (a subnormal block scale may leave no element at 6); FP8 under UE8M0, as :ceil;
# rules that compute in BF16 or round the scale to it.
IDEMPOTENT = [
    "nvfp4", "nvfp4:torchao", "fp8-token", "fp8-channel", "fp8-tensor", "fp8-tensor:vllm",
    "fp8-1x128:deepgemm", "fp8-block", "int8-token", "int8-channel", "int4-g32:modelopt", "int4-g128:modelopt",
    "mxfp4", "mxfp4:floor", "mxfp8:floor", "mxfp8:even",
]  # fmt: skip


@pytest.mark.parametrize("name", IDEMPOTENT)
def test_quantizing_again_changes_no_code(name):
    fmt = get_format(name)

    @few
    @given(tensors(*small(name), dtype=torch.float32))
    def check(x):
        once = fmt.quantize(x)
        twice = fmt.quantize(once.dequantize())
        assert_same(twice.qdata, once.qdata, "codes")
        if once.scale.dtype != torch.float32:
            assert_same(twice.scale.view(torch.uint8), once.scale.view(torch.uint8), "scales")
        torch.testing.assert_close(twice.dequantize(), once.dequantize(), rtol=2**-21, atol=0)

    check()


# Rules without a floor, and all data far from one.
EQUIVARIANT = [n for n in FORMATS if not n.endswith((":w4a8", "-noclip", ":torchao", "compressed-tensors"))]


@pytest.mark.parametrize("name", EQUIVARIANT)
def test_powers_of_two_go_through(name):
    fmt = get_format(name)

    @few
    @given(st.integers(0, 2**31), st.integers(-4, 4))
    def check(seed, k):
        x = torch.randn(*small(name), generator=torch.Generator().manual_seed(seed)) + 1.0
        q, scaled = fmt.quantize(x), fmt.quantize(x * 2.0**k)
        assert_same(scaled.qdata, q.qdata, "codes")
        assert_same(scaled.dequantize(), q.dequantize() * 2.0**k, "values")

    check()


# Largest error in units of the decoded step, and relative to the element, of each grid.
@pytest.mark.parametrize(
    ("name", "step", "relative"),
    [("nvfp4", 0.25, 0.2), ("nvfp4-token", 0.25, 0.2), ("mxfp4:ceil", 0.25, 0.2), ("mxfp8", 2**-10, 2**-4),
     ("fp8-token", 2**-10, 2**-4), ("int8-token", 0.5, 0.0), ("int4-g32:modelopt", 0.5, 0.0)],
)  # fmt: skip
def test_error_bound_per_block(name, step, relative):
    fmt = get_format(name)

    @some
    @given(tensors(*small(name), dtype=torch.float32))
    def check(x):
        q = fmt.quantize(x)
        scale = fmt.rule.scale_value(q.scale) if hasattr(fmt.rule, "scale_value") else q.scale.float()
        if q.global_scale is not None:
            scale = scale * q.global_scale
        per_element = scale.repeat_interleave(x.shape[1] // scale.shape[-1], -1)
        # A block scale below E4M3's subnormals is zero and flushes the block: up to half the least one.
        flushed = 6 * 2**-10 * q.global_scale if q.global_scale is not None else torch.zeros(())
        bound = torch.maximum(step * per_element, relative * x.abs()) * (1 + 1e-5)
        error = (q.dequantize() - x).abs()
        saturated = (
            x.abs() > 6 * per_element if name == "nvfp4-token" else torch.zeros(x.shape, dtype=torch.bool)
        )
        assert ((error <= bound) | saturated | (error <= flushed)).all()

    check()


@some
@given(st.lists(st.floats(-10, 10, width=32), min_size=2, max_size=64))
def test_rounding_is_monotone(values):
    x = torch.tensor(values).sort().values
    for rounded in (round_e2m1(x), to_e4m3(x).float(), round_int(x, -8, 7)):
        assert (rounded.diff() >= 0).all()


@some
@given(st.floats(1e-30, 1e30))
def test_an_engine_that_stores_the_encode_scale_gets_the_same_decode_scale(amax):
    # wire formats store S; from S' = 1 / p an engine's own 1 / S' must be our p again, or alphas drift.
    p = 1 / (2688 / torch.tensor(amax))
    assert 1 / (1 / p) == p


EXTREMES = {
    "zeros": 0.0,
    "negative zeros": -0.0,
    "fp32 subnormal": 1e-41,
    "tiny": 1e-36,
    "small": 1e-30,
    "large": 1e37,
    "fp16 max": 65504.0,
}


@pytest.mark.parametrize("name", FORMATS)
def test_no_nan_from_finite_data(name):
    fmt = get_format(name)
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        for what, value in EXTREMES.items():
            if value > torch.finfo(dtype).max:
                continue
            uniform = torch.full((rows(name), width(fmt)), value).to(dtype)
            mixed = torch.randn(rows(name), width(fmt)).to(dtype)
            mixed[0], mixed[1, :3] = value, value
            for x in (uniform, mixed):
                out = fmt.fake_quantize(x)
                # Rounding a dtype's largest number up is an infinity, as it is in any cast.
                top = value == torch.finfo(dtype).max
                assert not out.isnan().any() if top else out.isfinite().all(), (what, dtype)


@pytest.mark.parametrize("name", FORMATS)
def test_chunks_do_not_show(name, monkeypatch):
    fmt = get_format(name)
    x = torch.randn(256, width(fmt)).bfloat16()
    whole, fake = fmt.quantize(x), fmt.fake_quantize(x)
    monkeypatch.setattr(format_module, "_CHUNK_CPU", 100 * width(fmt))
    again = fmt.quantize(x)
    assert_same(again.qdata, whole.qdata, "codes")
    assert_same(again.scale.float(), whole.scale.float(), "scales")
    assert_same(again.dequantize(), whole.dequantize(), "values")
    assert_same(fmt.fake_quantize(x), fake, "fake")
