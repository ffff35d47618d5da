"""Launcher of the CUDA kernels of ``quantize_residual`` (``cuda/residual.cu``): BF16 rows, NVFP4 with a scale a row.

one      every channel, or scope "token"
two      scope "batch" of up to DECODE_TOKENS rows: row scales; then slabs of columns that wait for each other
three    longer batches: scores; choice; repair, which reads x again
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbitrl.formats.residual import RUN

from .cuda_library import address, check, library, stream

BLOCK = 16
WARP = 32
DECODE_TOKENS = 256
WIDEST = 1 << 14
"""Columns up to which a thread a block fits a CTA."""
TALLEST = 1 << 20
"""Rows whose partial sums ``choose_kernel`` can fold in shared memory."""

TALLY_BYTES = 1296
"""Of the counting structure at the start of shared memory, rounded up to 16."""
PEAK_BYTES = 2 * (2 * RUN * WARP * 4)
FOLD_BYTES = 32 << 10
TOKEN, ROW, SLAB, SCORES, CHOOSE, REPAIR = range(6)
CHOOSE_THREADS = 512
SLAB_THREADS, SLAB_THREADS_WIDE = 512, 1024
"""At least, WIDE from WIDE_BLOCKS blocks a row on: they all look for the chosen columns, however few rows there are."""
WIDE_BLOCKS = 256
REPAIR_ROWS = 2
NARROW = 128
"""Threads up to which several CTAs share a multiprocessor."""
SCORES_ROWS, SCORES_ROWS_NARROW, SCORES_ROWS_WIDE = 4, 4, 1
"""Rows in registers at a time, and as many on their way: of CTAs of up to 512 threads, NARROW, and more than 512."""
SCORES_CTAS, SCORES_CTAS_NARROW = 1, 4
"""A multiprocessor, as ``__launch_bounds__`` promises."""
CACHED_SHARE = 0.6
"""Of the L2 cache, as much as the repair still finds of what was read for the scores."""
TOKEN_BLOCKS, TOKEN_BLOCKS_SELECT = 1, 1
"""Blocks a thread where a row has more than a warp takes."""


@dataclass(frozen=True)
class Launch:
    """Kernel and template variant; grid; threads; dynamic shared memory in bytes; the kernel's own integers."""

    kernel: int
    variant: int
    grid: tuple[int, int]
    threads: int
    shared: int
    numbers: tuple[int, int, int] = (0, 0, 0)


def why_not_rows(x: Tensor) -> str | None:
    """Why these kernels can't take x, None if they can."""
    if x.dtype != torch.bfloat16:
        return f"its rows are BF16, not {x.dtype}"
    if x.dim() and x.shape[-1] > WIDEST:
        return f"K={x.shape[-1]} is wider than {WIDEST}, the row a CTA can hold"
    if x.dim() and x.numel() > TALLEST * x.shape[-1]:
        return f"more than {TALLEST} rows"
    return None


def launch_residual(x: Tensor, count: int, scope: str, real: Tensor | None) -> Tensor:
    """X~ (T, K) of BF16 rows (T, K), adjacent columns; count in 1..K; real (T,) uint8 or None."""
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return out
    # Loads are 16 bytes wide: rows and base must start at multiples of that.
    if x.stride(0) % 8 or x.data_ptr() % 16:
        x = x.clone(memory_format=torch.contiguous_format)
    rows, width = x.shape
    programs, cache = processors_and_cache(x.device)
    plan = plan_for(rows, width // BLOCK, every=count == width, scope=scope, programs=programs, cache=cache)
    work = workspace(rows, width, x.device, partial=plan[0].kernel == SCORES)
    for step in plan:
        code = library("residual").lowbitrl_residual(
            step.kernel, step.variant, *step.grid, step.threads, step.shared, *step.numbers,
            address(x), address(out), address(real), *(address(t) for t in work),
            rows, width // BLOCK, count, ctypes.c_int64(x.stride(0)), stream(x.device),
        )  # fmt: skip
        check(code, "residual")
    return out


def workspace(rows: int, width: int, device: torch.device, *, partial: bool) -> tuple[Tensor, ...]:
    """Row scales, keys, mask, partial sums and the counter, uninitialized."""
    runs = -(-rows // RUN) if partial else 0
    return (
        torch.empty(4, rows, dtype=torch.float32, device=device),
        torch.empty(width, dtype=torch.int32, device=device),
        torch.empty(width // BLOCK, dtype=torch.int16, device=device),
        torch.empty(runs, width, dtype=torch.float32, device=device),
        torch.empty((), dtype=torch.int32, device=device),
    )


def plan_for(
    rows: int, blocks: int, *, every: bool, scope: str, programs: int, cache: int = 0
) -> list[Launch]:
    """The launches for (rows, blocks * 16), ``programs`` CTAs of any size fitting the device at once.

    Args:
        cache: bytes of L2.
    """
    if every or scope == "token":
        return [_token(rows, blocks, select=not every)]
    slab = _slab(rows, blocks, programs)
    return (
        [Launch(ROW, 0, (rows, 1), _threads(blocks), TALLY_BYTES), slab]
        if slab
        else _long(rows, blocks, programs, cache)
    )


def _token(rows: int, blocks: int, *, select: bool) -> Launch:
    each = 1 if blocks <= WARP else TOKEN_BLOCKS_SELECT if select else TOKEN_BLOCKS
    threads = _threads(blocks, each)
    shared = TALLY_BYTES + (each * threads * BLOCK * 4 if select else 0)
    return Launch(TOKEN, each, (rows, 1), threads, shared, (int(select), 0, 0))


def _slab(rows: int, blocks: int, programs: int) -> Launch | None:
    """Slabs so narrow that all wait at once, so wide that no multiprocessor idles; None where they don't fit."""
    slab = _power(-(-blocks // programs))
    runs = _power(-(-rows // RUN))
    each = 2 if slab * runs * RUN > 1024 else 1
    threads = max(SLAB_THREADS_WIDE if blocks >= WIDE_BLOCKS else SLAB_THREADS, slab * runs * RUN // each)
    if rows > DECODE_TOKENS or threads > 1024:
        return None
    shared = TALLY_BYTES + max(runs * RUN * slab, blocks) * BLOCK * 4
    return Launch(SLAB, each, (-(-blocks // slab), 1), threads, shared, (slab, runs, 3))


def _long(rows: int, blocks: int, programs: int, cache: int) -> list[Launch]:
    there = -(-rows // RUN)
    runs, width = _power(there), blocks * BLOCK
    quarter = max(1, runs // 4)
    columns = min(BLOCK, max(1, FOLD_BYTES // (4 * quarter)))
    across = -(-_threads(blocks) // 256)
    kept = max(0, rows - int(CACHED_SHARE * cache) // (2 * width))
    return [
        _scores(there, _threads(blocks), programs, kept),
        Launch(
            CHOOSE, 0, (width // columns, 1), CHOOSE_THREADS,
            TALLY_BYTES + max(quarter * columns, width) * 4, (columns, runs, there),
        ),
        Launch(
            REPAIR, REPAIR_ROWS, (across, -(-rows // REPAIR_ROWS)), _threads(-(-blocks // across)), 0,
            (int(kept > 0), 0, 0),
        ),
    ]  # fmt: skip


def _scores(runs: int, threads: int, programs: int, kept: int) -> Launch:
    batch, ctas = SCORES_ROWS, SCORES_CTAS
    if threads <= NARROW:
        batch, ctas = SCORES_ROWS_NARROW, SCORES_CTAS_NARROW
    elif threads > 512:
        batch = SCORES_ROWS_WIDE
    return Launch(SCORES, batch, (min(runs, ctas * programs), 1), threads, PEAK_BYTES, (runs, kept, 0))


def processors_and_cache(device: torch.device) -> tuple[int, int]:
    """Multiprocessors of a device, bytes of its L2."""
    found = torch.cuda.get_device_properties(device)
    return found.multi_processor_count, found.L2_cache_size


def _threads(blocks: int, each: int = 1) -> int:
    return -(-blocks // (each * WARP)) * WARP


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
