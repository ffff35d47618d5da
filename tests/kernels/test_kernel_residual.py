"""quantize_residual equals compensate: same channels, ties included, same bits."""

import pytest
import torch
from kernel_cases import awkward, differences

from lowbitrl.formats import get_format
from lowbitrl.formats.residual import column_sums, compensate
from lowbitrl.kernels import quantize_residual

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),
]

FP4 = get_format("nvfp4-token")
SHAPES = [(1, 16), (9, 64), (17, 272), (40, 576), (0, 32), (2, 3, 64)]


def same(x, fraction, scope="batch", real=None):
    got = quantize_residual(x, fraction, scope=scope, real=real, backend="triton")
    wrong = differences(got, compensate(x, FP4, fraction, scope, real))
    assert not wrong, (tuple(x.shape), fraction, scope, wrong)


@pytest.mark.parametrize("scope", ["batch", "token"])
@pytest.mark.parametrize("fraction", [0.0, 0.125, 0.5, 1.0])
@pytest.mark.parametrize("shape", SHAPES)
def test_equals_the_reference(shape, fraction, scope, device):
    rows = torch.Size(shape[:-1]).numel()
    same(awkward(rows, shape[-1], device=device).view(shape), fraction, scope)


@pytest.mark.parametrize("rows", [33, 300])
def test_padding_never_counts(rows, device):
    x = awkward(rows, 64, device=device)
    real = torch.arange(rows, device=device) % 3 != 0
    x[0] = float("nan")
    got = quantize_residual(x, 0.25, real=real, backend="triton")
    assert not differences(got[1:], compensate(x, FP4, 0.25, "batch", real)[1:])
    assert got[0].isnan().all()


def test_more_tokens_than_a_decode_step(device):
    same(awkward(530, 48, device=device), 0.5)
    same(awkward(257, 144, device=device), 0.125)


def test_all_channels_tie(device):
    """Equal columns: the lower indices win, and exactly the asked-for number of them."""
    x = awkward(9, 1, device=device).expand(9, 128).contiguous()
    same(x, 0.3)
    same(x, 0.3, "token")
    same(torch.zeros(5, 64, dtype=torch.bfloat16, device=device), 0.5)


def test_no_real_token_at_all(device):
    same(awkward(9, 64, device=device), 0.5, real=torch.zeros(9, dtype=torch.bool, device=device))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_other_dtypes_and_strides(dtype, device):
    x = awkward(18, 128, dtype, device)
    same(x, 0.5)
    same(x[::2, 64:], 0.5, "token")
    same(x[::2, 64:], 0.5)


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


@pytest.mark.skipif(not torch.cuda.is_available(), reason="CUDA graphs")
@pytest.mark.parametrize(("rows", "scope"), [(64, "batch"), (300, "batch"), (64, "token")])
def test_a_captured_call_follows_its_input(rows, scope):
    x = awkward(rows, 256, device="cuda")
    quantize_residual(x, 0.5, scope=scope, backend="triton")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = quantize_residual(x, 0.5, scope=scope, backend="triton")
    for seed in (1, 2):
        x.copy_(awkward(rows, 256, device="cuda", seed=seed))
        graph.replay()
        assert not differences(captured, compensate(x, FP4, 0.5, scope))
