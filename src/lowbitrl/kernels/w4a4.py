"""``w4a4_matmul``: NVFP4 activations by NVFP4 weights, with and without the second pass of the residual.

    emulated   codes * block scales of both sides in BF16 (exact), BF16 products, fp32 sums, then one fp32 scale
               global_w * global_x[m]: w4a16_matmul with ``token_scale``. While a sum fits 24 bits of its operands'
               finest unit it is exact, and so is its order: every such backend gives the same bits.
    native     tensor cores of sm100 on, which read the codes: block scales in the swizzled layout, fp32 out, then
               the same fp32 scale. Not run on such hardware yet; its layout and scales are tested by an emulation.

The residual subtracts a second product of the same weights, each under its own activation scale:

    y = bf16( (x1 w^T) * (g_w g_x1[m]) - (x2 w^T) * (g_w g_x2[m]) + bias )

x2 holds the second pass's codes, zero in channels that were not chosen. On Hopper and CPU the reconstruction X~
in BF16 by ``w4a16_matmul`` is the faster execution and differs by that one rounding.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.nvfp4 import BLOCK, Nvfp4
from lowbitrl.formats.packing import swizzle_128x4

from .backend import AUTO, choose, register_backend
from .w4a16 import w4a16_matmul
from .weights4 import factors

EMULATED, NATIVE = "emulated", "native"
NATIVE_CAPABILITY = (10, 0)
# cuBLASLt's NVFP4 product takes N and K in these multiples.
NATIVE_MULTIPLE = 32


def _why_not_native(device: torch.device) -> str | None:
    if device.type != "cuda":
        return "NVFP4 tensor cores are CUDA's"
    capability = torch.cuda.get_device_capability(device)
    if capability < NATIVE_CAPABILITY:
        return f"compute capability {capability} has no NVFP4 tensor cores; {NATIVE_CAPABILITY} has"
    return None


register_backend(EMULATED, lambda device: None)
register_backend(NATIVE, _why_not_native)


def w4a4_matmul(
    x: QuantizedTensor,
    weight: QuantizedTensor,
    *,
    residual: QuantizedTensor | None = None,
    bias: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """(..., K) by (N, K), both NVFP4 -> (..., N) in BF16. No gradient.

    Args:
        x: NVFP4, a global scale a token or one for all. residual: the second pass, subtracted.

    Raises:
        ValueError: an operand is not NVFP4, or the backend can't run this.
    """
    for q in (x, weight, *([residual] if residual is not None else [])):
        if not isinstance(get_format(q.format), Nvfp4):
            raise ValueError(f"w4a4_matmul takes NVFP4, not {q.format}")
    odd = [size for size in weight.shape if size % NATIVE_MULTIPLE]
    native = f"{odd[0]} is not a multiple of {NATIVE_MULTIPLE}" if odd else None
    chosen = choose("w4a4_matmul", backend, x.qdata.device, {NATIVE: native, EMULATED: None})
    if chosen == EMULATED and residual is None:
        return w4a16_matmul(block_values(x), weight, bias=bias, token_scale=token_scales(x))
    sums = native_sums if chosen == NATIVE else emulated_sums
    y = _scaled(sums(x, weight), x, weight)
    if residual is not None:
        y = y - _scaled(sums(residual, weight), residual, weight)
    y = y if bias is None else y + bias.float()
    return y.bfloat16().view(*x.shape[:-1], weight.shape[0])


def block_values(q: QuantizedTensor) -> Tensor:
    """code * block scale of an NVFP4 tensor: BF16, exact, the global scale left out."""
    return factors(q)[0].bfloat16()


def token_scales(x: QuantizedTensor) -> Tensor:
    """fp32 (tokens,): each token's global scale."""
    assert x.global_scale is not None
    tokens = x.shape[:-1].numel()
    return (
        x.global_scale.reshape(-1).expand(tokens)
        if x.global_scale.numel() == 1
        else x.global_scale.reshape(-1)
    )


def _scaled(sums: Tensor, x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    assert weight.global_scale is not None
    return sums * (weight.global_scale.reshape(()) * token_scales(x))[:, None]


def emulated_sums(x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """fp32 (tokens, N) sums of code * block scale products."""
    a, b = block_values(x).reshape(-1, x.shape[-1]), block_values(weight)
    return torch.mm(a, b.T, out_dtype=torch.float32) if a.is_cuda else a.float() @ b.float().T


def native_sums(x: QuantizedTensor, weight: QuantizedTensor) -> Tensor:
    """The same sums by the NVFP4 tensor cores: what ``native_operands`` lays out, through torch's scaled_mm."""
    (a, scale_a), (b, scale_b) = native_operands(x), native_operands(weight)
    blockwise, swizzle = F.ScalingType.BlockWise1x16, F.SwizzleType.SWIZZLE_32_4_4  # type: ignore[attr-defined]
    return F.scaled_mm(  # type: ignore[attr-defined]
        a, b.T, scale_a=scale_a, scale_recipe_a=blockwise, swizzle_a=swizzle,
        scale_b=scale_b, scale_recipe_b=blockwise, swizzle_b=swizzle, output_dtype=torch.float32,
    )  # fmt: skip


def native_operands(q: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """(codes as float4_e2m1fn_x2 (rows, K/2), E4M3 block scales flat in the 128 x 4 swizzle)."""
    codes = q.qdata.reshape(-1, q.shape[-1] // 2).view(torch.float4_e2m1fn_x2)
    return codes, swizzle_128x4(q.scale.reshape(-1, q.shape[-1] // BLOCK).view(torch.float8_e4m3fn))
