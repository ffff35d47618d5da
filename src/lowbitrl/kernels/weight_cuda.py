"""Launcher of the CUDA kernel for NVFP4 weights whose maximum is measured too (``cuda/weight.cu``): one launch.

Of ``parts`` equal parts of a tensor, each with a maximum of its own: an expert stack's matrices, or all of a weight.
"""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from .cuda_library import address, check, library, stream

BLOCK = 16
THREADS = 512
CTAS_AT_ONCE = 2
"""A multiprocessor; what ``__launch_bounds__`` and the shared memory below promise."""
KEPT_ROUNDS = 6
"""Rounds of 512 blocks of 32 bytes in shared memory: two CTAs' fit in 227 KiB."""
FIXED_BYTES = 64
CACHED_SHARE = 0.6
"""Of the L2 cache, as much as the second reading still finds of the first."""


def why_not_weight(x: Tensor) -> str | None:
    """Why the kernel can't take x, None if it can."""
    if x.dtype != torch.bfloat16:
        return f"its weights are BF16, not {x.dtype}"
    if not x.is_contiguous() or x.data_ptr() % (2 * BLOCK):
        return "its weights are contiguous and start at a multiple of 32 bytes"
    return None


def launch_weight(x: Tensor, parts: int, *, floor: bool, encode: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Quantize a contiguous BF16 tensor, each of its ``parts`` equal parts by its own maximum.

    Args:
        x: of ``parts`` times a multiple of 16 elements.
        floor: as ``nvfp4``'s: scales of blocks that are not all zero are normal.
        encode: (codes (N/2,), scale bytes (N/16,), maxima (parts,)), else (values like x, empty, maxima).
    """
    count = x.numel()
    out = torch.empty(0 if encode else x.shape, dtype=x.dtype, device=x.device)
    codes = torch.empty(count // 2 if encode else 0, dtype=torch.uint8, device=x.device)
    scales = torch.empty(count // BLOCK if encode else 0, dtype=torch.uint8, device=x.device)
    state = torch.zeros(2, parts, dtype=torch.int32, device=x.device)
    if count:
        blocks = count // parts // BLOCK
        properties = _properties(x.device)
        group, grid, kept = plan_for(blocks, parts, properties[0])
        code = library("weight").lowbitrl_weight(
            int(floor), grid, FIXED_BYTES + kept * THREADS * 2 * BLOCK, address(x),
            address(None if encode else out), address(codes), address(scales), address(state[0]), address(state[1]),
            ctypes.c_int64(blocks), parts, group, kept, ctypes.c_int64(cached_from(blocks, parts, properties[1])),
            stream(x.device),
        )  # fmt: skip
        check(code, "weight")
    return (codes if encode else out), scales, state[0].view(torch.float32)


def plan_for(blocks: int, parts: int, multiprocessors: int) -> tuple[int, int, int]:
    """CTAs a part, CTAs in all (which fit the device at once: they wait for each other), rounds kept.

    As few CTAs a part as let its blocks stay in shared memory, so that several parts are on their way at once.
    """
    most = multiprocessors * CTAS_AT_ONCE
    group = most // max(1, most // min(most, -(-blocks // (THREADS * KEPT_ROUNDS))))
    if parts == 1:
        group = min(most, -(-blocks // THREADS))
    groups = min(parts, most // group)
    return group, group * groups, min(KEPT_ROUNDS, -(-blocks // (group * THREADS)))


def cached_from(blocks: int, parts: int, cache_bytes: int) -> int:
    """From which block of a part on the first reading should leave x in the cache."""
    return max(0, blocks - int(CACHED_SHARE * cache_bytes) // (2 * BLOCK)) if parts == 1 else blocks


def _properties(device: torch.device) -> tuple[int, int]:
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.L2_cache_size
