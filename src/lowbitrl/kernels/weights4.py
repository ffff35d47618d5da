"""What the 4-bit products need to know of a weight's format, and the reference's exact factors of it."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.grids import from_e4m3
from lowbitrl.formats.int4 import GROUPS
from lowbitrl.formats.nvfp4 import Nvfp4

NVFP4_GROUP = 16
# The CUDA kernel's 16-byte loads of codes.
CUDA_COLUMNS = 32


@dataclass(frozen=True)
class Weight4:
    """A 4-bit weight ([E,] N, K) as the kernels take it: bytes as published.

    codes: uint8 ([E,] N, K/2). scale: E4M3 or BF16 ([E,] N, K/group). global_scale: fp32 (1,) or (E,), or None.
    """

    codes: Tensor
    scale: Tensor
    global_scale: Tensor | None
    group: int
    nvfp4: bool


def describe(weight: QuantizedTensor) -> Weight4:
    """How the kernels see a weight.

    Raises:
        ValueError: not NVFP4 or INT4 with BF16 scales, with the reason of ``why_not_weight4``.
    """
    reason = why_not_weight4(weight)
    if reason:
        raise ValueError(reason)
    nvfp4 = isinstance(get_format(weight.format), Nvfp4)
    decode = weight.global_scale
    group = weight.shape[-1] // weight.scale.shape[-1] if weight.scale.shape[-1] else NVFP4_GROUP
    flat = None if decode is None else decode.reshape(-1).contiguous()
    return Weight4(weight.qdata.contiguous(), weight.scale.contiguous(), flat, group, nvfp4)


def why_not_format4(name: str) -> str | None:
    """Why the 4-bit kernels can't read any weight of a format, or None."""
    fmt = get_format(name)
    in_groups = fmt.name.startswith("int4-g") and fmt.group in GROUPS
    return None if isinstance(fmt, Nvfp4) or in_groups else f"{name} is neither NVFP4 nor INT4 in groups"


def why_not_weight4(weight: QuantizedTensor) -> str | None:
    """Why the 4-bit kernels can't read a weight, or None."""
    fmt = get_format(weight.format)
    experts = weight.shape[0] if len(weight.shape) == 3 else 1
    if isinstance(fmt, Nvfp4):
        assert weight.global_scale is not None
        if weight.global_scale.numel() not in {1, experts}:
            return f"{weight.format} with a global scale a row; one a matrix is read"
        return None
    if reason := why_not_format4(weight.format):
        return reason
    if weight.scale.dtype != torch.bfloat16:
        return f"{weight.format} with {weight.scale.dtype} scales; BF16 ones are read"
    return None


def why_not_cuda(weight: QuantizedTensor) -> str | None:
    """Why the CUDA kernel can't read a weight, or None."""
    k = weight.shape[-1]
    if k % CUDA_COLUMNS:
        return f"K={k} is not a multiple of {CUDA_COLUMNS}, what its loads take"
    if get_format(weight.format).group == 16 and weight.global_scale is None:
        return "INT4 in groups of 16: it reads one scale for 32 columns"
    return why_not_weight4(weight)


def factors(weight: QuantizedTensor) -> tuple[Tensor, Tensor]:
    """fp32 ([E,] N, K) BF16 values the product sums, and the fp32 scale ([E], 1, 1) or () that multiplies sums.

    NVFP4: code * block scale, exact in BF16, and the global scale. INT4: bf16(code * scale), and 1.
    """
    one = torch.ones((), dtype=torch.float32, device=weight.qdata.device)
    if weight.global_scale is None:
        return weight.dequantize(torch.bfloat16).float(), one
    bare = QuantizedTensor(weight.qdata, weight.scale, one, weight.shape, weight.format)
    return bare.dequantize(torch.float32), weight.global_scale


def has_nan_scale(weight: QuantizedTensor) -> bool:
    """Whether a block scale is NaN, which no quantizer writes and the kernels would read as 480."""
    return weight.scale.dtype != torch.bfloat16 and bool(from_e4m3(weight.scale).isnan().any())
