"""The CUDA source of NVFP4 weights with a measured maximum, run on the CPU: bytes equal the reference's."""

import ctypes

import pytest
import torch
from emulated_cuda import build
from kernel_cases import awkward, differences

from lowbitrl.formats import get_format
from lowbitrl.kernels import weight_cuda

pytestmark = pytest.mark.usefixtures("emulated", "poisoned")


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory):
    """The loaded library; skips where there is no C++20 compiler."""
    return build("emulated_weight.cpp", tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(emulated_library, monkeypatch):
    """The launcher's functions reach the emulated kernel."""
    monkeypatch.setattr(weight_cuda, "library", lambda name: emulated_library)
    monkeypatch.setattr(weight_cuda, "stream", lambda device: ctypes.c_void_p(None))
    monkeypatch.setattr(weight_cuda, "_properties", lambda device: (1, 1 << 12))


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-tensor"])
@pytest.mark.parametrize("plan", [None, (1, 3, 2), (2, 2, 0), (2, 4, 3)])
@pytest.mark.parametrize("shape", [(1, 40, 576), (3, 30, 640), (1, 1, 16)])
def test_equals_the_reference(shape, plan, name, monkeypatch):
    x, fmt = awkward(shape[0] * shape[1], shape[2]).view(shape), get_format(name)
    if plan:
        monkeypatch.setattr(weight_cuda, "plan_for", lambda *args: plan)
    amax, floor = x.float().abs().amax((1, 2), keepdim=True), name == "nvfp4"
    wanted = fmt.quantize(x, amax=amax, check=False)
    codes, scales, peaks = weight_cuda.launch_weight(x, shape[0], floor=floor, encode=True)
    assert torch.equal(peaks, amax.view(-1))
    assert not differences(codes.view(wanted.qdata.shape), wanted.qdata)
    assert not differences(scales.view(wanted.scale.shape), wanted.scale.view(torch.uint8))
    values = weight_cuda.launch_weight(x, shape[0], floor=floor, encode=False)[0]
    assert not differences(values, fmt.fake_quantize(x, amax=amax, check=False))


def test_nan_shows_in_its_part_and_no_other():
    x = awkward(20, 64).view(2, 10, 64)
    x[1, 3, 5] = float("nan")
    values, _, peaks = weight_cuda.launch_weight(x, 2, floor=True, encode=False)
    assert peaks.isnan().tolist() == [False, True]
    assert values[0].isfinite().all()
    assert values[1].isnan().any()


@pytest.mark.parametrize("parts", [1, 3, 128])
@pytest.mark.parametrize("blocks", [1, 20_736, 196_608, 1 << 22])
def test_plans_let_every_cta_run_at_once(blocks, parts):
    group, grid, kept = weight_cuda.plan_for(blocks, parts, 132)
    assert 0 < group <= grid <= 264
    assert grid % group == 0
    assert kept <= weight_cuda.KEPT_ROUNDS
    if parts > 1 and group < 264:
        assert kept * group * weight_cuda.THREADS >= blocks


@pytest.mark.parametrize("name", ["nvfp4", "nvfp4-tensor"])
def test_every_bf16_value_up_to_a_block_peak(name):
    """All finite BF16 values of at most 6, sixteen to a block, under one maximum of 6."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    small = every[every.isfinite() & (every.abs() <= 6.0)]
    x = torch.cat([small, small.new_zeros(-len(small) % 16)]).view(-1, 16)
    fmt, floor = get_format(name), name == "nvfp4"
    wanted = fmt.quantize(x)
    codes, scales, _ = weight_cuda.launch_weight(x, 1, floor=floor, encode=True)
    assert not differences(codes.view(wanted.qdata.shape), wanted.qdata)
    assert not differences(scales.view(wanted.scale.shape), wanted.scale.view(torch.uint8))
    values = weight_cuda.launch_weight(x, 1, floor=floor, encode=False)[0]
    assert not differences(values, fmt.fake_quantize(x))
