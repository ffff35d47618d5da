"""What the device at hand can do at most, measured, not quoted: the denominators of every ratio."""

from __future__ import annotations

import functools

import torch

from .timing import time_calls

_COPY_BYTES = {"cuda": 1 << 32, "cpu": 1 << 26}
_MATMUL_SIZE = {"cuda": 8192, "cpu": 512}


@functools.cache
def copy_bandwidth(device: str) -> float:
    """Bytes a second of a large copy, bytes read plus bytes written."""
    source = torch.empty(_COPY_BYTES[device] // 2, dtype=torch.uint8, device=device).random_()
    target = torch.empty_like(source)
    # A captured copy is a memcpy node, which a copy engine may run at two thirds of what kernels reach (H200:
    # 2.8 of 4.3 TB/s), so a kernel that reads and writes as much is timed too. The faster is the ceiling.
    words, copied = source.view(torch.int32), target.view(torch.int32)
    calls = (lambda: target.copy_(source), lambda: torch.add(words, 1, out=copied))
    fastest = min(time_calls([call], l2="cold", samples=15).p50 for call in calls)
    return 2 * source.numel() / fastest * 1e6


@functools.cache
def matmul_rate(device: str) -> float:
    """BF16 operations a second of a large square product on random data."""
    n = _MATMUL_SIZE[device]
    a, b = (torch.randn(n, n, device=device).bfloat16() for _ in range(2))
    took = time_calls([lambda: a @ b], l2="warm", samples=15)
    return 2 * n**3 / took.p50 * 1e6


def limit_microseconds(device: str, nbytes: float, flops: float = 0.0) -> float:
    """Least time of a call that moves ``nbytes`` and does ``flops`` BF16 tensor-core operations: the larger term."""
    moving = nbytes / copy_bandwidth(device)
    return max(moving, flops / matmul_rate(device) if flops else 0.0) * 1e6
