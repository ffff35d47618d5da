"""The same bytes on CUDA as on CPU: the formats assume nothing of the device."""

from __future__ import annotations

import pytest
import torch
from oracle_bytes import assert_same
from test_formats_basic import rows, width

from lowbitrl.formats import get_format, known_formats
from lowbitrl.formats.packing import swizzle_128x4

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", known_formats())
def test_cuda_gives_the_cpu_bytes(name, dtype):
    fmt = get_format(name)
    x = (torch.randn(2, 256, 4 * width(fmt)) * torch.exp(torch.randn(2, 256, 1))).to(dtype)
    x[0, 3], x[1, :, : width(fmt)], x[0, 0, 0] = 0, 0, 3000
    here, there = fmt.quantize(x), fmt.quantize(x.cuda())
    for key, t in here.tensors().items():
        assert_same(there.tensors()[key].cpu().float(), t.float(), key)
    assert_same(there.dequantize(dtype).cpu(), here.dequantize(dtype), "values")
    assert_same(fmt.fake_quantize(x.cuda()).cpu(), fmt.fake_quantize(x), "fake")
    assert_same(here.to("cuda").dequantize(dtype).cpu(), here.dequantize(dtype), "moved")


@pytest.mark.parametrize("name", known_formats())
def test_cuda_survives_extremes_and_emptiness(name):
    fmt = get_format(name)
    for value in (0.0, 1e-41, 1e-36, 1e37):
        x = torch.full((rows(name), width(fmt)), value)
        assert_same(fmt.fake_quantize(x.cuda()).cpu(), fmt.fake_quantize(x), str(value))
    assert fmt.fake_quantize(torch.empty(0, width(fmt), device="cuda")).shape == (0, width(fmt))


def test_swizzle_on_cuda():
    scale = torch.randint(0, 255, (3, 130, 9), dtype=torch.uint8)
    assert_same(swizzle_128x4(scale.cuda()).cpu(), swizzle_128x4(scale), "swizzled")
