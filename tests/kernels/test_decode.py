"""Decoded weights are `dequantize`'s, bit for bit."""

import pytest
import torch

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import decode
from tests.kernels.kernel_cases import awkward, differences

pytest.importorskip("triton")
pytestmark = pytest.mark.filterwarnings("ignore::RuntimeWarning")

FORMATS = ["nvfp4", "int4-g128", "int4-g64", "int4-g32", "int4-g16"]


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("shape", [(1, 128), (48, 384), (130, 1280)])
def test_one_weight(name, shape, device, poisoned):
    q = get_format(name).quantize(awkward(*shape, device=device))
    assert not differences(decode(q, torch.bfloat16, backend="triton"), q.dequantize(torch.bfloat16))


def test_every_code_under_every_block_scale(device, poisoned):
    scale = torch.arange(127, dtype=torch.uint8, device=device).view(torch.float8_e4m3fn).view(1, -1)
    codes = torch.arange(8, dtype=torch.uint8, device=device) * 2
    codes = (codes | ((codes + 1) << 4)).repeat(127).view(1, -1)
    q = QuantizedTensor(codes, scale, torch.tensor(3.1e-5, device=device), torch.Size((1, 127 * 16)), "nvfp4")
    assert not differences(decode(q, torch.bfloat16, backend="triton"), q.dequantize(torch.bfloat16))


@pytest.mark.parametrize("name", ["nvfp4", "int4-g32"])
def test_a_stack_of_experts_each_with_its_global_scale(name, device, poisoned):
    stack = (
        torch.randn(5, 32, 128, device=device, dtype=torch.bfloat16)
        * torch.logspace(-3, 3, 5, device=device).view(5, 1, 1).bfloat16()
    )
    fmt = get_format(name)
    amax = stack.abs().amax((1, 2), keepdim=True).float() if fmt.per == "tensor" else None
    q = fmt.quantize(stack, amax=amax)
    assert not differences(decode(q, torch.bfloat16, backend="triton"), q.dequantize(torch.bfloat16))


def test_what_the_kernel_cannot_do_is_named_and_auto_takes_the_reference(device):
    q = get_format("fp8-channel").quantize(torch.randn(8, 64, device=device, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match="fp8-channel is neither NVFP4 nor INT4"):
        decode(q, torch.bfloat16, backend="triton")
    assert torch.equal(decode(q, torch.bfloat16), q.dequantize(torch.bfloat16))
    q = get_format("nvfp4").quantize(torch.randn(8, 64, device=device, dtype=torch.bfloat16))
    with pytest.raises(ValueError, match=r"writes bfloat16, not torch\.float32"):
        decode(q, torch.float32, backend="triton")
