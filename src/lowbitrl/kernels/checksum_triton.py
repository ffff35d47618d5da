"""The checksum of sync's manifests in one pass: a wrapping 64-bit sum, which has no order.

sum over 8-byte words w_i of (w_i ^ (w_i >> 29)) * (2 i P + 1),  >> arithmetic, P as in kernels/checksum.py
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def checksum_kernel(word_ptr, sum_ptr, count, PRIME: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr):
    """STEPS blocks of words, added into one 64-bit cell."""
    begin = tl.program_id(0).to(tl.int64) * (BLOCK * STEPS)
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(STEPS):
        at = begin + step * BLOCK + lane
        word = tl.load(word_ptr + at, mask=at < count, other=0)
        total += (word ^ (word >> 29)) * (at * (2 * PRIME) + 1)
    tl.atomic_add(sum_ptr, tl.sum(total, axis=0), sem="relaxed")


def launch_checksum(words: Tensor, prime: int, *, block: int = 2048, steps: int = 8) -> Tensor:
    """int64 () of int64 words (N,), 8-byte aligned and contiguous."""
    total = torch.zeros((), dtype=torch.int64, device=words.device)
    if words.numel():
        programs = triton.cdiv(words.numel(), block * steps)
        checksum_kernel[(programs,)](
            words, total, words.numel(), PRIME=prime, BLOCK=block, STEPS=steps, num_warps=8
        )
    return total
