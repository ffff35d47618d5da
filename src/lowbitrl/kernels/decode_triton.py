"""Triton body of ``decode``: bytes of NVFP4 and INT4 weights to BF16, one pass over memory."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding_triton import narrow
from .w4a16_triton import decode_nibble, decode_scale

_BYTES = 1024


@triton.jit
def _decode_kernel(
    codes, scale, global_scale, out, total, a_matrix,
    NVFP4: tl.constexpr, GROUP: tl.constexpr, BYTES: tl.constexpr,
):  # fmt: skip
    at = tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, BYTES)
    inside = at < total
    packed = tl.load(codes + at, mask=inside, other=0)
    factor = decode_scale(tl.load(scale + at // (GROUP // 2), mask=inside, other=0), NVFP4)
    if global_scale is not None:
        factor = factor * tl.load(global_scale + at // a_matrix, mask=inside, other=0.0)
    # + 0.0: the table of E2M1 has one zero, so code 8 is +0 there.
    low = narrow((decode_nibble(packed & 15, NVFP4) + 0.0) * factor, tl.bfloat16)
    high = narrow((decode_nibble(packed >> 4, NVFP4) + 0.0) * factor, tl.bfloat16)
    columns = 2 * tl.program_id(0).to(tl.int64) * BYTES + tl.arange(0, 2 * BYTES)
    tl.store(out + columns, tl.interleave(low, high), mask=columns < 2 * total)


def launch_decode(
    codes: Tensor, scale: Tensor, global_scale: Tensor | None, out: Tensor, group: int, nvfp4: bool
) -> None:
    """Write ``out`` (..., N, K) in BF16; ``global_scale`` holds one value, or one a matrix."""
    total = codes.numel()
    if not total:
        return
    a_matrix = total // (global_scale.numel() if global_scale is not None else 1)
    _decode_kernel[(triton.cdiv(total, _BYTES),)](
        codes, scale.view(torch.uint8) if nvfp4 else scale, global_scale, out, total, a_matrix,
        NVFP4=nvfp4, GROUP=group, BYTES=_BYTES, num_warps=4,
    )  # fmt: skip
