"""Launcher of the CUDA kernels of ``quantize_residual`` (``cuda/residual.cu``): BF16 rows, NVFP4 with a scale a row.

one      every channel, or scope "token"
two      scope "batch" of up to DECODE_TOKENS rows: row scales; then slabs of columns that wait for each other
three    longer batches: scores; choice; repair, which reads x again
"""

from __future__ import annotations

import ctypes
import functools
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
"""Threads up to which SCORES_CTAS share a multiprocessor."""
SCORES_ROWS, SCORES_ROWS_WIDE, SCORES_CTAS = 4, 1, 4
"""Rows in registers at a time, and as many on their way; WIDE of CTAs of more than 512 threads."""
EARLY_START = False
"""Whether kernels that follow others start while those run. On an H200 a few CTAs then repaired by a mask of an earlier
call; they clear their cache for it since, which no GPU has run: ``benchmarks/residual_launches.py`` looks for that."""


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
    programs = multiprocessors(x.device)
    plan = plan_for(rows, width // BLOCK, every=count == width, scope=scope, programs=programs)
    work = workspace(rows, width, plan[0].kernel == SCORES, x.device)
    pointers = (address(x), address(out), address(real), *work.addresses())
    sizes = (rows, width // BLOCK, count, ctypes.c_int64(x.stride(0)), int(EARLY_START))
    on = stream(x.device)
    for step in plan:
        run(step, pointers, sizes, on)
    return out


def run(step: Launch, pointers: tuple, sizes: tuple, on: ctypes.c_void_p) -> None:
    """One launch; arguments as ``lowbitrl_residual`` takes them."""
    code = library("residual").lowbitrl_residual(
        step.kernel, step.variant, *step.grid, step.threads, step.shared, *step.numbers, *pointers, *sizes, on
    )
    check(code, "residual")


@dataclass(frozen=True)
class Workspace:
    """Row scales, keys, mask, partial sums and the counter in one uninitialized buffer: offsets in int32."""

    buffer: Tensor
    offsets: tuple[int, ...]

    def addresses(self) -> tuple[ctypes.c_void_p, ...]:
        """Where each begins, at a multiple of 16 bytes."""
        begin = self.buffer.data_ptr()
        return tuple(ctypes.c_void_p(begin + 4 * offset) for offset in self.offsets)


def workspace(rows: int, width: int, partial: bool, device: torch.device) -> Workspace:
    """What the launches of (rows, width) hand on to each other."""
    runs = -(-rows // RUN) if partial else 0
    offsets = [0]
    for words in (4 * rows, width, -(-width // (2 * BLOCK)), runs * width):
        offsets.append(offsets[-1] + -(-words // 4) * 4)
    return Workspace(torch.empty(offsets[-1] + 1, dtype=torch.int32, device=device), tuple(offsets))


@functools.cache
def plan_for(rows: int, blocks: int, *, every: bool, scope: str, programs: int) -> tuple[Launch, ...]:
    """The launches for (rows, blocks * 16), ``programs`` CTAs of any size fitting the device at once."""
    threads = _threads(blocks)
    if every or scope == "token":
        kept = 0 if every else threads * BLOCK * 4
        return (Launch(TOKEN, 0, (rows, 1), threads, TALLY_BYTES + kept, (int(not every), 0, 0)),)
    slab = _slab(rows, blocks, programs)
    return (Launch(ROW, 0, (rows, 1), threads, TALLY_BYTES), slab) if slab else _long(rows, blocks, programs)


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


def _long(rows: int, blocks: int, programs: int) -> tuple[Launch, ...]:
    there, threads = -(-rows // RUN), _threads(blocks)
    runs, width = _power(there), blocks * BLOCK
    quarter = max(1, runs // 4)
    columns = min(BLOCK, max(1, FOLD_BYTES // (4 * quarter)))
    across = -(-threads // 256)
    batch = SCORES_ROWS if threads <= 512 else SCORES_ROWS_WIDE
    at_once = programs * (SCORES_CTAS if threads <= NARROW else 1)
    return (
        Launch(SCORES, batch, (min(there, at_once), 1), threads, PEAK_BYTES, (there, 0, 0)),
        Launch(
            CHOOSE, 0, (width // columns, 1), CHOOSE_THREADS,
            TALLY_BYTES + max(quarter * columns, width) * 4, (columns, runs, there),
        ),
        Launch(REPAIR, 0, (across, -(-rows // REPAIR_ROWS)), _threads(-(-blocks // across)), 0),
    )  # fmt: skip


@functools.cache
def multiprocessors(device: torch.device) -> int:
    """Of a device."""
    return torch.cuda.get_device_properties(device).multi_processor_count


def _threads(blocks: int) -> int:
    return -(-blocks // WARP) * WARP


def _power(n: int) -> int:
    return 1 << (n - 1).bit_length()
