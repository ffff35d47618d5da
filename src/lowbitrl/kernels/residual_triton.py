"""The residual second FP4 pass in Triton: NVFP4 with a scale a token, in one to four launches.

    one      every channel repaired, or channels chosen token by token: a program holds a row
    two      a batch of up to DECODE_TOKENS rows: row scales; then slabs of columns, each of which scores its
             columns, waits for all slabs (they fit the device at once), selects, repairs and writes
    four     longer batches: runs of rows, their scales and partial scores; scores; selection; repair

Column sums of squares are added in the order of ``formats.residual.column_sums``, and the choice is made on their
IEEE square roots, so channels equal the reference's, ties included. Divisions are IEEE, one for each row and
block. A key is a score's bits; every NaN is one key above the rest.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbitrl.formats.residual import RUN

from .backend import is_interpreting
from .nvfp4_triton import warps_for
from .rounding_triton import (
    float_of,
    magnitude,
    narrow,
    nvfp4_block_scale,
    nvfp4_globals,
    reciprocal_or_zero,
    round_e2m1,
    widen,
)

RUN_ROWS = tl.constexpr(RUN)
NAN_KEY = tl.constexpr(0x7F800001)
DECODE_TOKENS = 256


@triton.jit
def quantized(x, encode, decode, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """fp32 (ROWS, COLUMNS) and its rows' S and 1 / S (ROWS,) -> NVFP4 values of x, fp32."""
    blocks = tl.reshape(x, (ROWS, COLUMNS // 16, 16))
    b = float_of(tl.max(magnitude(blocks), axis=2))
    step = nvfp4_block_scale(b, encode[:, None], False) * decode[:, None]
    value = round_e2m1(blocks * reciprocal_or_zero(step)[:, :, None]) * step[:, :, None]
    return tl.reshape(value, (ROWS, COLUMNS))


@triton.jit
def row_globals(x):
    """fp32 (ROWS, COLUMNS) -> S and 1 / S of each row."""
    return nvfp4_globals(float_of(tl.max(magnitude(x), axis=1)))


@triton.jit
def load_globals(globals_ptr, row, rows, second: tl.constexpr):
    """S and 1 / S of rows, of the first pass or the second; globals (4, rows)."""
    at = globals_ptr + 2 * second * rows + row
    there = row < rows
    return tl.load(at, mask=there, other=1.0), tl.load(at + rows, mask=there, other=1.0)


@triton.jit
def store_globals(globals_ptr, row, rows, second: tl.constexpr, encode, decode):
    """Where ``load_globals`` finds them, of one row."""
    at = globals_ptr + 2 * second * rows + row + tl.arange(0, 1)
    tl.store(at, encode, mask=row < rows)
    tl.store(at + rows, decode, mask=row < rows)


@triton.jit
def kth_key(keys, count):
    """The largest v with at least ``count`` of the keys (int32, at least 0; -1 pads) at or above it, or another
    v that exactly ``count`` keys reach: bisection that stops as soon as it separates."""
    low = count * 0
    high = tl.max(keys, axis=0) + 1
    while high - low > 1:
        middle = low + (high - low) // 2
        reached = tl.sum((keys >= middle).to(tl.int32), axis=0)
        if reached >= count:
            low = middle
        else:
            high = middle
        if reached == count:
            high = low + 1
    return low


@triton.jit
def score_keys(squares):
    """Sums of squares -> keys that order as their roots."""
    return tl.minimum(magnitude(tl.sqrt_rn(squares)), NAN_KEY)


@triton.jit
def chosen(keys, count):
    """Mask of the ``count`` largest keys, the lower index first among equals."""
    threshold = kth_key(keys, count)
    ties = keys == threshold
    wanted = count - tl.sum((keys > threshold).to(tl.int32), axis=0)
    mask = keys >= threshold
    if wanted < tl.sum(ties.to(tl.int32), axis=0):
        mask = (keys > threshold) | (ties & (tl.cumsum(ties.to(tl.int32), axis=0) <= wanted))
    return mask


@triton.jit
def token_kernel(x_ptr, out_ptr, width, x_stride, count, COLUMNS: tl.constexpr, SELECT: tl.constexpr):
    """One row: both passes, channels chosen by the row's own error where SELECT."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    inside = column < width
    x = widen(tl.load(x_ptr + row * x_stride + column, mask=inside, other=0.0))
    x = tl.reshape(x, (1, COLUMNS))
    encode, decode = row_globals(x)
    first = quantized(x, encode, decode, 1, COLUMNS)
    error = first - x
    encode, decode = row_globals(error)
    second = quantized(error, encode, decode, 1, COLUMNS)
    if SELECT:
        keys = tl.where(inside, tl.minimum(tl.reshape(magnitude(error), (COLUMNS,)), NAN_KEY), -1)
        second = tl.where(tl.reshape(chosen(keys, count), (1, COLUMNS)), second, 0.0)
    out = narrow(tl.reshape(first - second, (COLUMNS,)), out_ptr.dtype.element_ty)
    tl.store(out_ptr + row * width + column, out, mask=inside)


@triton.jit
def row_kernel(x_ptr, globals_ptr, counter_ptr, rows, width, x_stride, COLUMNS: tl.constexpr):
    """The row's S and 1 / S in both passes. Resets the counter the slabs wait on."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, COLUMNS)
    x = widen(tl.load(x_ptr + row * x_stride + column, mask=column < width, other=0.0))
    x = tl.reshape(x, (1, COLUMNS))
    encode, decode = row_globals(x)
    store_globals(globals_ptr, row, rows, 0, encode, decode)
    encode, decode = row_globals(quantized(x, encode, decode, 1, COLUMNS) - x)
    store_globals(globals_ptr, row, rows, 1, encode, decode)
    if row == 0:
        tl.store(counter_ptr, 0)


@triton.jit
def fold_rows(x, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """(ROWS, COLUMNS) -> (COLUMNS,): halves added until one row is left."""
    if ROWS == 1:
        total = tl.reshape(x, (COLUMNS,))
    else:
        # A sum of two has one order, whatever the layout.
        total = fold_rows(tl.sum(tl.reshape(x, (2, ROWS // 2, COLUMNS)), axis=0), ROWS // 2, COLUMNS)
    return total


@triton.jit
def slab_scores(x_ptr, real_ptr, globals_ptr, rows, x_stride, column, inside, RUNS: tl.constexpr, SLAB: tl.constexpr,
                MASKED: tl.constexpr):  # fmt: skip
    """Sums of squared first errors of SLAB columns over all rows, in the reference's order."""
    run = tl.arange(0, RUNS) * RUN_ROWS
    total = tl.zeros((RUNS, SLAB), tl.float32)
    for i in tl.static_range(RUN_ROWS):
        row = run + i
        there = row < rows
        keep = there[:, None] & inside[None, :]
        at = row[:, None].to(tl.int64) * x_stride + column[None, :]
        x = widen(tl.load(x_ptr + at, mask=keep, other=0.0))
        encode, decode = load_globals(globals_ptr, row, rows, 0)
        error = quantized(x, encode, decode, RUNS, SLAB) - x
        square = error * error
        if MASKED:
            real = tl.load(real_ptr + row, mask=there, other=0)
            square = tl.where((real != 0)[:, None], square, 0.0)
        total += square
    return fold_rows(total, RUNS, SLAB)


@triton.jit
def slab_mask(score_ptr, width, count, column, SLAB: tl.constexpr, COLUMNS: tl.constexpr):
    """Which of the slab's columns are among the ``count`` best of all."""
    every = tl.arange(0, COLUMNS)
    # .cg: other programs wrote these a moment ago, past this multiprocessor's own cache.
    all_scores = tl.load(score_ptr + every, mask=every < width, other=0.0, cache_modifier=".cg")
    keys = tl.where(every < width, score_keys(all_scores), -1)
    threshold = kth_key(keys, count)
    wanted = count - tl.sum((keys > threshold).to(tl.int32), axis=0)
    before = tl.sum(((keys == threshold) & (every < tl.min(column, axis=0))).to(tl.int32), axis=0)
    own = tl.load(score_ptr + column, mask=column < width, other=0.0, cache_modifier=".cg")
    own = tl.where(column < width, score_keys(own), -1)
    ties = own == threshold
    return (own > threshold) | (ties & (before + tl.cumsum(ties.to(tl.int32), axis=0) <= wanted))


@triton.jit
def repair(x_ptr, out_ptr, globals_ptr, mask, row, rows, width, x_stride, column, ROWS: tl.constexpr,
           COLUMNS: tl.constexpr):  # fmt: skip
    """X~ of a tile whose row scales and chosen columns are known."""
    there = row < rows
    inside = there[:, None] & (column < width)[None, :]
    at = row[:, None].to(tl.int64) * x_stride + column[None, :]
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    encode, decode = load_globals(globals_ptr, row, rows, 0)
    first = quantized(x, encode, decode, ROWS, COLUMNS)
    encode, decode = load_globals(globals_ptr, row, rows, 1)
    second = quantized(first - x, encode, decode, ROWS, COLUMNS)
    out = first - tl.where(mask[None, :], second, 0.0)
    out_at = row[:, None].to(tl.int64) * width + column[None, :]
    tl.store(out_ptr + out_at, narrow(out, out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def slab_kernel(x_ptr, out_ptr, real_ptr, globals_ptr, score_ptr, counter_ptr, rows, width, x_stride, count,
                RUNS: tl.constexpr, SLAB: tl.constexpr, COLUMNS: tl.constexpr, MASKED: tl.constexpr,
                SCORE: tl.constexpr, REPAIR: tl.constexpr):  # fmt: skip
    """SLAB columns, all rows. With SCORE and REPAIR in one launch every program waits for the others' scores."""
    column = tl.program_id(0) * SLAB + tl.arange(0, SLAB)
    if SCORE:
        squares = slab_scores(
            x_ptr, real_ptr, globals_ptr, rows, x_stride, column, column < width, RUNS, SLAB, MASKED
        )
        tl.store(score_ptr + column, squares, mask=column < width)
    if SCORE and REPAIR:
        tl.debug_barrier()
        tl.atomic_add(counter_ptr, 1, sem="release")
        while tl.atomic_add(counter_ptr, 0, sem="acquire") < tl.num_programs(0):
            pass
        tl.debug_barrier()
    if REPAIR:
        mask = slab_mask(score_ptr, width, count, column, SLAB, COLUMNS)
        TALL: tl.constexpr = RUNS * RUN_ROWS if RUNS < 4 else 64
        for tile in range(RUNS * RUN_ROWS // TALL):
            row = tile * TALL + tl.arange(0, TALL)
            repair(x_ptr, out_ptr, globals_ptr, mask, row, rows, width, x_stride, column, TALL, SLAB)


@triton.jit
def run_kernel(x_ptr, real_ptr, globals_ptr, partial_ptr, rows, width, x_stride, COLUMNS: tl.constexpr,
               MASKED: tl.constexpr):  # fmt: skip
    """RUN rows, one after the other: row scales, and the run's column sums of squared errors."""
    column = tl.arange(0, COLUMNS)
    inside = column < width
    total = tl.zeros((1, COLUMNS), tl.float32)
    for i in range(RUN_ROWS):
        row = tl.program_id(0).to(tl.int64) * RUN_ROWS + i
        there = row < rows
        x = widen(tl.load(x_ptr + row * x_stride + column, mask=inside & there, other=0.0))
        x = tl.reshape(x, (1, COLUMNS))
        encode, decode = row_globals(x)
        store_globals(globals_ptr, row, rows, 0, encode, decode)
        error = quantized(x, encode, decode, 1, COLUMNS) - x
        encode, decode = row_globals(error)
        store_globals(globals_ptr, row, rows, 1, encode, decode)
        counts = there
        if MASKED:
            counts = there & (tl.load(real_ptr + row, mask=there, other=0) != 0)
        total += tl.where(counts, error * error, 0.0)
    at = partial_ptr + tl.program_id(0).to(tl.int64) * width + column
    tl.store(at, tl.reshape(total, (COLUMNS,)), mask=inside)


@triton.jit
def score_kernel(partial_ptr, score_ptr, runs, width, RUNS: tl.constexpr, SLAB: tl.constexpr):
    """Column sums over runs, folded in halves."""
    column = tl.program_id(0) * SLAB + tl.arange(0, SLAB)
    run = tl.arange(0, RUNS)
    keep = (run < runs)[:, None] & (column < width)[None, :]
    partial = tl.load(partial_ptr + run[:, None].to(tl.int64) * width + column[None, :], mask=keep, other=0.0)
    tl.store(score_ptr + column, fold_rows(partial, RUNS, SLAB), mask=column < width)


@triton.jit
def select_kernel(score_ptr, mask_ptr, width, count, COLUMNS: tl.constexpr):
    """The mask of chosen columns, one byte each; one program."""
    column = tl.arange(0, COLUMNS)
    inside = column < width
    keys = tl.where(inside, score_keys(tl.load(score_ptr + column, mask=inside, other=0.0)), -1)
    tl.store(mask_ptr + column, chosen(keys, count).to(tl.uint8), mask=inside)


@triton.jit
def repair_kernel(x_ptr, out_ptr, globals_ptr, mask_ptr, rows, width, x_stride, ROWS: tl.constexpr,
                  COLUMNS: tl.constexpr):  # fmt: skip
    """X~ of one (ROWS, COLUMNS) tile, from the last to the first: the end of x is still in the cache."""
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    across = tl.cdiv(width, COLUMNS)
    row = (tile // across) * ROWS + tl.arange(0, ROWS)
    column = (tile % across) * COLUMNS + tl.arange(0, COLUMNS)
    mask = tl.load(mask_ptr + column, mask=column < width, other=0) != 0
    repair(x_ptr, out_ptr, globals_ptr, mask, row, rows, width, x_stride, column, ROWS, COLUMNS)


def launch_residual(x: Tensor, count: int, scope: str, real: Tensor | None) -> Tensor:
    """X~ (T, K) of rows (T, K), K a multiple of 16, adjacent columns; count in 1..K; real (T,) uint8 or None."""
    if not x.numel():
        return x.new_empty(x.shape)
    if scope == "token" or count == x.shape[1]:
        return _by_token(x, count)
    if x.shape[0] <= DECODE_TOKENS and _slab(x) is not None:
        return _by_slab(x, count, real)
    return _by_run(x, count, real)


def _by_token(x: Tensor, count: int) -> Tensor:
    rows, width = x.shape
    out, across = x.new_empty(rows, width), _across(width)
    token_kernel[(rows,)](
        x, out, width, x.stride(0), count, COLUMNS=across, SELECT=count < width,
        num_warps=warps_for(across), enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _by_slab(x: Tensor, count: int, real: Tensor | None) -> Tensor:
    rows, width = x.shape
    out, across, slab = x.new_empty(rows, width), _across(width), _slab(x)
    scales = torch.empty(4, rows, dtype=torch.float32, device=x.device)
    counter = torch.empty((), dtype=torch.int32, device=x.device)
    scores = torch.empty(width, dtype=torch.float32, device=x.device)
    row_kernel[(rows,)](
        x, scales, counter, rows, width, x.stride(0), COLUMNS=across, num_warps=warps_for(across),
        enable_fp_fusion=False,
    )  # fmt: skip
    runs = triton.next_power_of_2(triton.cdiv(rows, RUN))
    # The interpreter runs programs one after the other: none could wait for the next.
    for score, repairs in ((True, False), (False, True)) if is_interpreting() else ((True, True),):
        slab_kernel[(triton.cdiv(width, slab),)](
            x, out, x if real is None else real, scales, scores, counter, rows, width, x.stride(0), count,
            RUNS=runs, SLAB=slab, COLUMNS=across, MASKED=real is not None, SCORE=score, REPAIR=repairs,
            num_warps=8, enable_fp_fusion=False,
        )  # fmt: skip
    return out


def _by_run(x: Tensor, count: int, real: Tensor | None) -> Tensor:
    rows, width = x.shape
    out, across = x.new_empty(rows, width), _across(width)
    runs = triton.cdiv(rows, RUN)
    scales = torch.empty(4, rows, dtype=torch.float32, device=x.device)
    partial = torch.empty(runs, width, dtype=torch.float32, device=x.device)
    scores = torch.empty(width, dtype=torch.float32, device=x.device)
    mask = torch.empty(width, dtype=torch.uint8, device=x.device)
    run_kernel[(runs,)](
        x, x if real is None else real, scales, partial, rows, width, x.stride(0), COLUMNS=across,
        MASKED=real is not None, num_warps=warps_for(across), enable_fp_fusion=False,
    )  # fmt: skip
    padded = triton.next_power_of_2(runs)
    slab = max(4, min(64, 8192 // padded))
    score_kernel[(triton.cdiv(width, slab),)](
        partial, scores, runs, width, RUNS=padded, SLAB=slab, num_warps=8, enable_fp_fusion=False
    )
    select_kernel[(1,)](scores, mask, width, count, COLUMNS=across, num_warps=8)
    tall, wide = max(1, 4096 // min(across, 512)), min(across, 512)
    repair_kernel[(triton.cdiv(rows, tall) * triton.cdiv(width, wide),)](
        x, out, scales, mask, rows, width, x.stride(0), ROWS=tall, COLUMNS=wide, num_warps=4,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out


def _across(width: int) -> int:
    return triton.next_power_of_2(max(width, 16))


def _slab(x: Tensor) -> int | None:
    """Columns a program, so that all programs fit the device at once; None where even wide slabs don't."""
    programs = 1 << 30 if is_interpreting() else _multiprocessors(x.device)
    slab = max(16, triton.next_power_of_2(triton.cdiv(x.shape[1], programs)))
    return slab if slab <= 128 else None


def _multiprocessors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
