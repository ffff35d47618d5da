"""Rules that no library could be run for on CPU, against a second transcription in numpy, whose fp32 is IEEE.

vLLM's CUDA kernels (fp8-token, fp8-tensor:vllm, fp8-1x128, int8-token), our own INT4, and the two ways of
computing NVFP4's global scale.
"""

from __future__ import annotations

import numpy as np
import pytest
import torch
from oracle_bytes import assert_same

from lowbitrl.formats import get_format
from lowbitrl.formats.grids import to_e4m3

F = np.float32


@pytest.fixture(params=[torch.float32, torch.bfloat16])
def x(request) -> torch.Tensor:
    generator = torch.Generator().manual_seed(11)
    x = torch.randn(96, 256, generator=generator) * torch.exp(3 * torch.randn(96, 1, generator=generator))
    x[5] = 0
    x[6] *= 1e-11 / x[6].abs().max()  # under every floor
    x[7] *= 1e-6 / x[7].abs().max()  # between vLLM's two
    return x.to(request.param)


def rows(x: torch.Tensor) -> tuple[np.ndarray, np.ndarray]:
    values = x.float().numpy()
    return values, np.abs(values).max(-1, keepdims=True)


def e4m3(values: np.ndarray) -> torch.Tensor:
    return to_e4m3(torch.from_numpy(values)).view(torch.uint8)


def test_fp8_token(x):
    values, amax = rows(x)
    scale = np.maximum(amax / F(448), F(1 / (448 * 512)))
    for name in ("fp8-token", "fp8-channel"):
        q = get_format(name).quantize(x)
        assert_same(q.scale, torch.from_numpy(scale), "scales")
        assert_same(q.qdata, e4m3(values / scale), "codes")


def test_fp8_tensor_of_vllm(x):
    values, amax = rows(x)
    scale = amax.max() / F(448)
    q = get_format("fp8-tensor:vllm").quantize(x)
    assert_same(q.scale, torch.tensor(scale), "scale")
    assert_same(q.qdata, e4m3(values * (F(1) / scale)), "codes")


@pytest.mark.parametrize(("name", "floor"), [("fp8-1x128", 1e-10), ("fp8-1x128:deepgemm", 1e-4)])
def test_fp8_groups(x, name, floor):
    values = x.float().numpy().reshape(96, 2, 128)
    scale = np.maximum(np.abs(values).max(-1), F(floor)) / F(448)
    q = get_format(name).quantize(x)
    assert_same(q.scale, torch.from_numpy(scale), "scales")
    assert_same(q.qdata, e4m3(values * (F(1) / scale)[..., None]).view(96, 256), "codes")


def test_fp8_tiles_with_a_short_one(x):
    values = x.float().numpy()
    amax = np.abs(values).reshape(96, 2, 128).max((0, 2))
    scale = (np.maximum(amax, F(1e-4)) / F(448))[None]
    q = get_format("fp8-block").quantize(x)
    assert_same(q.scale, torch.from_numpy(scale), "scales")
    assert_same(q.qdata, e4m3(values * np.repeat(F(1) / scale, 128, -1)), "codes")
    tall = get_format("fp8-block").quantize(torch.cat([x, x]))  # 128 + 64 rows
    assert tall.scale.shape == (2, 2)
    assert_same(tall.scale[0], torch.from_numpy(scale[0]), "full tile")


def test_int8_token(x):
    values, amax = rows(x)
    with np.errstate(divide="ignore"):
        inverse = np.where(amax > 0, F(127) / amax, F(0))
    q = get_format("int8-token").quantize(x)
    assert_same(q.scale, torch.from_numpy(amax / F(127)), "scales")
    codes = np.clip(np.rint(values * inverse), -128, 127)
    assert_same(q.qdata.view(torch.int8), torch.from_numpy(codes).to(torch.int8), "codes")


def test_our_int4(x):
    values = x.float().numpy().reshape(96, 2, 128)
    scale = torch.from_numpy(np.abs(values).max(-1) / F(7.5)).bfloat16()
    stored = scale.float().numpy()[..., None]
    codes = np.clip(np.rint(values / np.where(stored == 0, F(1), stored)), -8, 7)
    fmt = get_format("int4-g128")
    q = fmt.quantize(x)
    assert_same(q.scale, scale, "scales")
    assert_same(fmt.grid.decode(q.qdata), torch.from_numpy(codes).view(96, 256), "codes")


def test_nvfp4_global_scales():
    x = torch.randn(64, 16, generator=torch.Generator().manual_seed(3))
    amax = x.abs().amax(-1, keepdim=True).numpy()
    one, two = F(1) / (F(2688) / amax), F(1) / ((F(1) / amax) * F(2688))
    assert (one != two).any()
    for name in ("nvfp4-token", "nvfp4-token:vllm"):
        q = get_format(name).quantize(x)
        assert q.global_scale is not None
        assert_same(q.global_scale, torch.from_numpy(one), name)
    # As a stack of one-row tensors, whose global scales vLLM's Python computes.
    q = get_format("nvfp4:vllm").quantize(x, amax=torch.from_numpy(amax))
    assert q.global_scale is not None
    assert_same(q.global_scale, torch.from_numpy(two), "nvfp4:vllm")
