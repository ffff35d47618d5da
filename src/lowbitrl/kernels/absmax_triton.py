"""max |x| of a tensor, or of each of G equal parts of it, in one pass over memory.

Partial maxima go through an integer atomic: the bits of |x| order as |x| does and a maximum has no order of
its own, so the result is exact and the same every time. NaN wins.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding_triton import magnitude, widen


@triton.jit
def absmax_kernel(x_ptr, peak_ptr, part, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """Steps of BLOCK elements of one part; grid (programs a part, parts)."""
    begin = tl.program_id(0).to(tl.int64) * BLOCK * STEPS
    base = x_ptr + tl.program_id(1).to(tl.int64) * part
    lane = tl.arange(0, BLOCK)
    best = tl.zeros((BLOCK,), tl.int32)
    for step in range(STEPS):
        at = begin + step * BLOCK + lane
        x = widen(tl.load(base + at, mask=at < part, other=0.0))
        best = tl.maximum(best, magnitude(x))
    tl.atomic_max(peak_ptr + tl.program_id(1), tl.max(best, axis=0), sem="relaxed")


def launch_absmax(x: Tensor, parts: int = 1, *, block: int = 4096, steps: int = 8) -> Tensor:
    """fp32 (parts,) max |x| of ``parts`` equal runs of a contiguous tensor; 0 where x is empty."""
    peaks = torch.zeros(parts, dtype=torch.int32, device=x.device)
    if x.numel():
        part = x.numel() // parts
        grid = (triton.cdiv(part, block * steps), parts)
        absmax_kernel[grid](x, peaks, part, BLOCK=block, STEPS=steps, num_warps=8)
    return peaks.view(torch.float32)
