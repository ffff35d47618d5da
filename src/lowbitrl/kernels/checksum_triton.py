"""The checksums of sync's manifests, all tensors of a publication in one launch.

31 * sum over words (w_i ^ (w_i >> 29)) * (2 i P + 1) + sum over the bytes left b_j (j + 1); see kernels/checksum.py
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def checksum_kernel(
    address_ptr, bytes_ptr, owner_ptr, part_ptr, sum_ptr,
    PRIME: tl.constexpr, TAIL: tl.constexpr, BLOCK: tl.constexpr, STEPS: tl.constexpr,
):  # fmt: skip
    """A program a part: STEPS blocks of words of one tensor, added into its 64-bit cell."""
    owner = tl.load(owner_ptr + tl.program_id(0))
    part = tl.load(part_ptr + tl.program_id(0))
    address = tl.load(address_ptr + owner)
    size = tl.load(bytes_ptr + owner)
    count = size // 8
    word_ptr = address.to(tl.pointer_type(tl.int64))
    lane = tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.int64)
    for step in range(STEPS):
        at = (part * STEPS + step) * BLOCK + lane
        word = tl.load(word_ptr + at, mask=at < count, other=0)
        total += (word ^ (word >> 29)) * (at * (2 * PRIME) + 1)
    checksum = tl.sum(total, axis=0) * TAIL
    if part == 0:
        left = tl.arange(0, 8)
        byte_ptr = address.to(tl.pointer_type(tl.uint8)) + count * 8
        byte = tl.load(byte_ptr + left, mask=left < size - count * 8, other=0)
        checksum += tl.sum(byte.to(tl.int64) * (left + 1), axis=0)
    tl.atomic_add(sum_ptr + owner, checksum, sem="relaxed")


def launch_checksums(
    raw: Sequence[Tensor], prime: int, tail: int, *, block: int = 2048, steps: int = 8
) -> Tensor:
    """int64 (n,) of n uint8 vectors of one device, 8-byte aligned."""
    device = raw[0].device
    sizes = torch.tensor([one.numel() for one in raw])
    parts = -(-sizes // (8 * block * steps))
    owner = torch.repeat_interleave(parts)
    part = torch.arange(len(owner)) - (parts.cumsum(0) - parts)[owner]
    sums = torch.zeros(len(raw), dtype=torch.int64, device=device)
    if len(owner):
        addresses = torch.tensor([one.data_ptr() for one in raw])
        # One small copy for the four tables.
        table = torch.cat([addresses, sizes, owner, part]).to(device)
        tables = table.split([len(raw), len(raw), len(owner), len(owner)])
        checksum_kernel[(len(owner),)](
            *tables, sums, PRIME=prime, TAIL=tail, BLOCK=block, STEPS=steps, num_warps=8
        )
    return sums
