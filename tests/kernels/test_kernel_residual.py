"""quantize_residual equals compensate: same channels, ties included, same bits, by each backend that runs here."""

import pytest
import torch
from kernel_cases import awkward, differences
from torch.autograd import DeviceType

from lowbitrl.formats import get_format
from lowbitrl.formats.residual import column_sums, compensate
from lowbitrl.kernels import quantize_residual, why_unavailable

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FP4 = get_format("nvfp4-token")
SHAPES = [(1, 16), (9, 64), (17, 272), (40, 576), (0, 32), (2, 3, 64)]
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")


@pytest.fixture(params=["triton", "cuda"])
def backend(request, device):
    """Each implementation that runs on the device at hand."""
    reason = why_unavailable(request.param, device)
    if reason:
        pytest.skip(reason)
    return request.param


def same(backend, x, fraction, scope="batch", real=None):
    got = quantize_residual(x, fraction, scope=scope, real=real, backend=backend)
    wrong = differences(got, compensate(x, FP4, fraction, scope, real))
    assert not wrong, (tuple(x.shape), fraction, scope, wrong)


@pytest.mark.parametrize("scope", ["batch", "token"])
@pytest.mark.parametrize("fraction", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, fraction, scope, backend, device):
    rows = torch.Size(shape[:-1]).numel()
    same(backend, awkward(rows, shape[-1], device=device).view(shape), fraction, scope)


@on_cuda
@pytest.mark.parametrize("shape", [(64, 2048), (255, 7168), (4097, 2048), (1000, 7168), (33, 16384)])
def test_sizes_of_models(shape, backend):
    x = awkward(*shape, device="cuda")
    same(backend, x, 0.5)
    same(backend, x[:300], 0.125, "token")
    same(backend, x[:300], 1.0)


@on_cuda
def test_largest_shape(backend):
    """(8192, 16384), awkward rows in front."""
    x = torch.randn(8192, 16384, device="cuda", dtype=torch.bfloat16)
    x[:300] = awkward(300, 16384, device="cuda")
    same(backend, x, 0.5)


def test_no_channel_at_all_is_plain_quantization(device):
    x = awkward(9, 64, device=device)
    same("triton", x, 0.0)


@pytest.mark.parametrize("rows", [33, 300])
def test_padding_never_counts(rows, backend, device):
    x = awkward(rows, 64, device=device)
    real = torch.arange(rows, device=device) % 3 != 0
    x[0] = float("nan")
    got = quantize_residual(x, 0.25, real=real, backend=backend)
    assert not differences(got[1:], compensate(x, FP4, 0.25, "batch", real)[1:])
    assert got[0].isnan().all()


@pytest.mark.parametrize("scope", ["batch", "token"])
def test_a_poisoned_token_does_to_others_what_the_reference_says(scope, backend, device):
    x = awkward(20, 64, device=device)
    x[9, 5], x[12, 7] = float("nan"), float("-inf")
    got, wanted = quantize_residual(x, 0.5, scope=scope, backend=backend), compensate(x, FP4, 0.5, scope)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert not differences(got.nan_to_num(), wanted.nan_to_num())


def test_more_tokens_than_a_decode_step(backend, device):
    same(backend, awkward(530, 48, device=device), 0.5)
    same(backend, awkward(257, 144, device=device), 0.125)


def test_all_channels_tie(backend, device):
    """Equal columns: the lower indices win, and exactly the asked-for number of them."""
    x = awkward(9, 1, device=device).expand(9, 128).contiguous()
    same(backend, x, 0.3)
    same(backend, x, 0.3, "token")
    same(backend, torch.zeros(5, 64, dtype=torch.bfloat16, device=device), 0.5)


def test_no_real_token_at_all(backend, device):
    none = torch.zeros(9, dtype=torch.bool, device=device)
    same(backend, awkward(9, 64, device=device), 0.5, real=none)


def test_strided_rows(backend, device):
    x = awkward(18, 128, device=device)
    for view in (x[::2, 64:], x[1:, 4:20]):
        same(backend, view, 0.5)
        same(backend, view, 0.5, "token")


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_strides(dtype, device):
    x = awkward(18, 128, dtype, device)
    same("triton", x, 0.5)
    same("triton", x[::2, 64:], 0.5, "token")
    same("triton", x[::2, 64:], 0.5)


def test_column_sums_have_a_stated_order():
    rows = torch.randn(100, 7) ** 2
    runs = [sum(run[1:], start=run[0]) for run in rows.split(16)] + [torch.zeros(7)]
    assert torch.equal(
        column_sums(rows),
        ((runs[0] + runs[4]) + (runs[2] + runs[6])) + ((runs[1] + runs[5]) + (runs[3] + runs[7])),
    )


def test_other_formats_go_to_the_reference(device):
    x = awkward(9, 64, device=device)
    mx = get_format("mxfp4")
    assert not differences(quantize_residual(x, 0.5, format=mx), compensate(x, mx, 0.5))
    with pytest.raises(ValueError, match="not mxfp4"):
        quantize_residual(x, 0.5, format=mx, backend="triton")


@on_cuda
@pytest.mark.parametrize(("rows", "scope"), [(64, "batch"), (300, "batch"), (64, "token")])
def test_a_captured_call_follows_its_input(rows, scope, backend):
    x = awkward(rows, 256, device="cuda")
    quantize_residual(x, 0.5, scope=scope, backend=backend)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_residual(x, 0.5, scope=scope, backend=backend)
    for seed in (1, 2):
        x.copy_(awkward(rows, 256, device="cuda", seed=seed))
        graph.replay()
        assert not differences(captured, compensate(x, FP4, 0.5, scope))


@on_cuda
@pytest.mark.parametrize(
    ("rows", "scope", "most"), [(1, "batch", 2), (64, "batch", 2), (256, "batch", 2), (64, "token", 1)]
)
def test_decode_sizes_take_two_launches_and_never_wait(rows, scope, most, backend):
    """What a call puts on the device's timeline: no third kernel, no copy, no synchronization."""
    x = awkward(rows, 2048, device="cuda")
    quantize_residual(x, 0.5, scope=scope, backend=backend)
    torch.cuda.set_sync_debug_mode("error")
    try:
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
            quantize_residual(x, 0.5, scope=scope, backend=backend)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    on_device = [e.name for e in profile.events() if e.device_type == DeviceType.CUDA]
    poisoning = [name for name in on_device if "FillFunctor" in name]
    assert 0 < len(on_device) - len(poisoning) <= most, on_device
