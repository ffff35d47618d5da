"""Quantizers in Triton give the reference's bytes: codes, scales and values, in every format they have."""

import pytest
import torch
from kernel_cases import awkward, differences

from lowbitrl.formats import get_format
from lowbitrl.kernels import absmax, fake_quantize, quantize, why_unavailable
from lowbitrl.kernels.quantize import BLOCKS, NVFP4_FLOORS, encode

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, under the interpreter, on overflow
]

FORMATS = [*NVFP4_FLOORS, *BLOCKS]
SHAPES = [(1, 128), (9, 256), (0, 128), (3, 5, 384), (131, 128), (10, 640)]


def same_bytes(x, name, amax=None):
    fmt = get_format(name)
    wanted, got = fmt.quantize(x, amax=amax, check=False), quantize(x, name, amax=amax, backend="triton")
    assert (got.shape, got.format) == (wanted.shape, wanted.format)
    assert set(got.tensors()) == set(wanted.tensors())
    for part, tensor in wanted.tensors().items():
        assert not differences(got.tensors()[part], tensor), part
    value = fake_quantize(x, name, amax=amax, backend="triton")
    assert not differences(value, fmt.fake_quantize(x, amax=amax, check=False))


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_and_values_equal_the_reference(name, device):
    for shape in SHAPES:
        rows = torch.Size(shape[:-1]).numel()
        same_bytes(awkward(rows, shape[-1], device=device).view(shape), name)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("name", FORMATS)
def test_other_dtypes(name, dtype, device):
    same_bytes(awkward(9, 256, dtype, device), name)


@pytest.mark.parametrize("name", FORMATS)
def test_a_given_amax_saturates_what_is_beyond_it(name, device):
    x = awkward(9, 256, device=device)
    same_bytes(x, name, torch.tensor(1.5, device=device))
    same_bytes(x, name, torch.tensor(0.0, device=device))
    if get_format(name).per != "tensor":
        same_bytes(x, name, x.float().abs().amax(-1, keepdim=True) if name != "fp8-block" else None)


def test_an_expert_stack_has_an_amax_an_expert(device):
    stack = awkward(12, 128, device=device).view(3, 4, 128)
    joint = torch.tensor([1.0, 2.0, 4.0], device=device).view(3, 1, 1)
    same_bytes(stack, "nvfp4", joint)
    same_bytes(stack, "fp8-channel", joint)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-token"])
def test_smallest_width_and_strided_rows(name, device):
    same_bytes(awkward(1, 16, device=device), name)
    wide = awkward(7, 256, device=device)
    same_bytes(wide[:, :128], name)
    same_bytes(wide[::2, 128:], name)
    same_bytes(wide.T, name) if wide.shape[0] % 16 == 0 else same_bytes(wide[:, :112].reshape(112, 7).T, name)


@pytest.mark.parametrize("name", ["nvfp4-token", "fp8-token", "nvfp4"])
def test_nan_stays_visible_in_what_is_decoded(name, device):
    x = awkward(4, 128, device=device)
    x[2, 5] = float("nan")
    value = fake_quantize(x, name, backend="triton")
    assert value[2].isnan().any()
    if get_format(name).per != "tensor":
        assert value[[0, 1, 3]].isfinite().all()
    assert quantize(x, name, backend="triton").dequantize()[2].isnan().any()


def test_every_bf16_value_in_a_block(device):
    """All 65,280 finite BF16 values, as columns of rows whose scale they share with a fixed peak."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = every[every.isfinite() & (every.abs() <= 6.0)]
    blocks = torch.cat([small, small.new_zeros(-len(small) % 15)]).view(-1, 15)
    rows = torch.cat([blocks, torch.full((len(blocks), 1), 6.0, dtype=torch.bfloat16)], 1).to(device)
    same_bytes(rows, "nvfp4-token")
    same_bytes(rows, "nvfp4", torch.tensor(2688.0, device=device))


def test_absmax_is_exact_and_keeps_nan(device):
    x = awkward(12, 4096, device=device)
    assert not differences(absmax(x, backend="triton"), x.float().abs().amax().view(1))
    parts = absmax(x, parts=3, backend="triton")
    assert not differences(parts, x.float().view(3, -1).abs().amax(1))
    x[5, 7] = float("nan")
    assert absmax(x, backend="triton").isnan().all()
    assert absmax(x[:0], backend="triton").tolist() == [0.0]


def test_shapes_are_refused_with_the_remedy(device):
    with pytest.raises(ValueError, match="not a multiple of 16"):
        quantize(torch.ones(2, 24, device=device), "nvfp4", backend="triton")
    with pytest.raises(ValueError, match=r"rule of nvfp4:te has no kernel.*backend='auto'"):
        quantize(torch.ones(2, 32, device=device), "nvfp4:te", backend="triton")


def test_auto_falls_to_the_reference_for_rules_without_a_kernel():
    x = awkward(3, 64)
    assert not differences(quantize(x, "nvfp4:te").qdata, get_format("nvfp4:te").quantize(x).qdata)


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-token", "fp8-block", "fp8-tensor", "int4-g128"])
def test_fakes_have_the_shapes_of_the_results(name, device):
    x = awkward(130, 256, device=device)
    real = torch.ops.lowbitrl.quantize(x, name, None)
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        fakes = torch.ops.lowbitrl.quantize(mode.from_tensor(x), name, None)
        value = torch.ops.lowbitrl.fake_quantize(mode.from_tensor(x), name, None)
    for fake, tensor in zip(fakes, real, strict=True):
        assert (fake.shape, fake.dtype) == (tensor.shape, tensor.dtype)
    assert (value.shape, value.dtype) == (x.shape, x.dtype)


def test_weights_are_encoded_with_a_look_for_nan(device):
    w = awkward(9, 128, device=device)
    for name in ("nvfp4", "fp8-channel", "fp8-tensor"):
        fmt = get_format(name)
        wanted, got = fmt.quantize(w), encode(w, fmt)
        for part, tensor in wanted.tensors().items():
            assert not differences(got.tensors()[part], tensor), (name, part)
        bad = w.clone()
        bad[3, 3] = float("inf")
        with pytest.raises(ValueError, match=r"mlp.weight of shape .* holds 1 NaN or Inf"):
            encode(bad, fmt, name="mlp.weight")


@pytest.mark.parametrize("backend", ["triton", "cuda"])
@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-tensor"])
@pytest.mark.parametrize("shape", [(1, 1, 16), (1, 100, 1600), (5, 30, 640), (3, 1536, 2048)])
def test_weights_whose_maxima_are_measured(shape, name, backend, device):
    """One weight, or an expert stack with a maximum a matrix: codes, scales, global scales, values."""
    reason = why_unavailable(backend, device)
    if reason or (device == "cpu" and shape[1] > 100):
        pytest.skip(reason or "too long for the interpreter")
    x, fmt = awkward(shape[0] * shape[1], shape[2], device=device).view(shape), get_format(name)
    if shape[0] == 1:
        x = x[0]
    amax = x.float().abs().amax((-2, -1), keepdim=x.dim() == 3)
    wanted, got = fmt.quantize(x, amax=amax), quantize(x, name, parts=shape[0], backend=backend)
    for part, tensor in wanted.tensors().items():
        assert not differences(got.tensors()[part].view(tensor.shape), tensor), part
    if shape[0] == 1:
        assert not differences(fake_quantize(x, name, backend=backend), fmt.fake_quantize(x))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@pytest.mark.parametrize("name", FORMATS)
def test_a_captured_call_never_waits_and_follows_its_input(name):
    x, fmt = awkward(300, 256, device="cuda"), get_format(name)
    quantize(x, name), fake_quantize(x, name)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        codes, values = quantize(x, name), fake_quantize(x, name)
    x.copy_(awkward(300, 256, device="cuda", seed=1))
    graph.replay()
    for part, tensor in fmt.quantize(x, check=False).tensors().items():
        assert not differences(codes.tensors()[part], tensor), part
    assert not differences(values, fmt.fake_quantize(x, check=False))
    torch.cuda.set_sync_debug_mode("error")
    try:
        quantize(x, name), fake_quantize(x, name)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="too large for the interpreter")
@pytest.mark.parametrize(
    "name", ["nvfp4", "nvfp4-token", "fp8-token", "fp8-block", "int8-token", "int4-g128", "mxfp8"]
)
def test_largest_shape(name):
    """(8192, 16384), awkward rows in front."""
    x = torch.randn(8192, 16384, device="cuda", dtype=torch.bfloat16)
    x[:300] = awkward(300, 16384, device="cuda")
    same_bytes(x, name)
