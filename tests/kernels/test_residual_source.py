"""The CUDA source of the residual, run on the CPU: bits equal the reference's.

Everything but the launch, the PTX and one-instruction intrinsics is the shipped code.
"""

import ctypes

import pytest
import torch
from emulated_cuda import build
from kernel_cases import awkward, differences

from lowbitrl.formats import get_format
from lowbitrl.formats.residual import channel_count, compensate
from lowbitrl.kernels import quantize_residual, residual_cuda
from lowbitrl.kernels.residual_cuda import Launch, plan_for

pytestmark = pytest.mark.usefixtures("emulated", "poisoned")

FP4 = get_format("nvfp4-token")
MULTIPROCESSORS = 132


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory):
    """The loaded library; skips where there is no C++20 compiler."""
    return build("emulated_residual.cpp", tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(emulated_library, monkeypatch):
    """The launcher's functions reach the emulated kernels."""
    monkeypatch.setattr(residual_cuda, "library", lambda name: emulated_library)
    monkeypatch.setattr(residual_cuda, "stream", lambda device: ctypes.c_void_p(None))
    monkeypatch.setattr(residual_cuda, "multiprocessors", lambda device: MULTIPROCESSORS)
    for name in ("SLAB_THREADS", "SLAB_THREADS_WIDE"):
        monkeypatch.setattr(residual_cuda, name, 32)  # each is a thread of this machine


def same(x, fraction, scope="batch", real=None):
    """The launcher's result is the reference's, bit for bit."""
    count = channel_count(x.shape[-1], fraction)
    got = residual_cuda.launch_residual(x, count, scope, None if real is None else real.view(torch.uint8))
    wrong = differences(got, compensate(x, FP4, fraction, scope, real))
    assert not wrong, (tuple(x.shape), fraction, scope, wrong)


@pytest.mark.parametrize("scope", ["batch", "token"])
@pytest.mark.parametrize("fraction", [0.125, 0.5, 1.0])
@pytest.mark.parametrize("shape", [(1, 16), (9, 64), (17, 272), (40, 576), (0, 32)])
def test_equals_the_reference(shape, fraction, scope):
    same(awkward(*shape), fraction, scope)


@pytest.mark.parametrize("programs", [2, 132])
@pytest.mark.parametrize("shape", [(17, 272), (270, 528), (300, 64)])
def test_slabs_of_any_width_and_long_batches(shape, programs, monkeypatch):
    monkeypatch.setattr(residual_cuda, "multiprocessors", lambda device: programs)
    same(awkward(*shape), 0.125)
    same(awkward(*shape), 0.5)


@pytest.mark.parametrize("rows", [33, 300])
def test_padding_never_counts(rows):
    x, real = awkward(rows, 64), torch.arange(rows) % 3 != 0
    x[0] = float("nan")
    got = residual_cuda.launch_residual(x, 16, "batch", real.view(torch.uint8))
    assert not differences(got[1:], compensate(x, FP4, 0.25, "batch", real)[1:])
    assert got[0].isnan().all()
    same(awkward(rows, 64), 0.5, real=torch.zeros(rows, dtype=torch.bool))


@pytest.mark.parametrize("scope", ["batch", "token"])
def test_ties_go_to_the_lower_index(scope):
    same(awkward(9, 1).expand(9, 128).contiguous(), 0.3, scope)
    same(torch.zeros(5, 64, dtype=torch.bfloat16), 0.5, scope)


def test_strided_rows():
    x = awkward(18, 128)
    same(x[::2, 64:], 0.5)
    same(x[::2, 64:], 0.5, "token")
    same(x[1:, 4:20], 0.5)  # not at a multiple of 16 bytes: copied first


@pytest.mark.parametrize("rows", [1, 64, 256, 4096])
@pytest.mark.parametrize("blocks", [1, 128, 448, 1024])
def test_plans_keep_to_what_a_device_has(rows, blocks):
    """CTAs of at most 1024 threads and 227 KiB; slabs that wait for each other fit the device at once."""
    for every, scope in ((True, "batch"), (False, "token"), (False, "batch")):
        plan = plan_for(rows, blocks, every=every, scope=scope, programs=MULTIPROCESSORS)
        assert all(
            isinstance(step, Launch) and step.threads <= 1024 and step.shared <= 227 << 10 for step in plan
        )
        assert all(step.grid[0] <= MULTIPROCESSORS for step in plan if step.kernel == residual_cuda.SLAB)
        assert len(plan) <= (2 if rows <= 256 else 3)


def test_what_the_kernels_cannot_take_is_said():
    with pytest.raises(ValueError, match="backend 'cuda' can't run here: it compiles for CUDA"):
        quantize_residual(awkward(2, 64), 0.5, backend="cuda")
    assert "BF16" in residual_cuda.why_not_rows(awkward(2, 64, torch.float32))
    assert "wider" in residual_cuda.why_not_rows(torch.empty(2, 1 << 15, dtype=torch.bfloat16))


@pytest.mark.parametrize(("rows", "scope"), [(9, "batch"), (9, "token"), (270, "batch")])
def test_nan_and_inf_stay_where_the_reference_has_them(rows, scope):
    x = awkward(rows, 64)
    x[3, 5], x[5, 7], x[6, 9] = float("nan"), float("inf"), float("-inf")
    got = residual_cuda.launch_residual(x, 32, scope, None)
    wanted = compensate(x, FP4, 0.5, scope)
    assert torch.equal(got.isnan(), wanted.isnan())
    assert not differences(got.nan_to_num(nan=1.0), wanted.nan_to_num(nan=1.0))


def test_every_bf16_value_up_to_a_block_peak():
    """All finite BF16 values of at most 6, sixteen to a block whose peak is 6, in both passes."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = every[every.isfinite() & (every.abs() <= 6.0)]
    blocks = torch.cat([small, small.new_zeros(-len(small) % 15)]).view(-1, 15)
    rows = torch.cat([blocks, torch.full((len(blocks), 1), 6.0, dtype=torch.bfloat16)], 1)
    wide = torch.cat([rows, rows.new_zeros(-len(rows) % 64, 16)]).view(-1, 64 * 16)
    same(wide, 1.0)
