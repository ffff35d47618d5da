"""NVFP4 in Triton: quantize, or quantize-dequantize, reading each element once.

One program holds ``ROWS`` rows by ``COLUMNS`` columns in registers. Where each row has its own global scale a
program must hold the whole row; where amax is given any tile will do. Divisions are IEEE (div.rn.f32), one
for each row and block, none for each element.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding_triton import (
    e2m1_nibble,
    e4m3_byte,
    float_of,
    magnitude,
    narrow,
    nvfp4_block_scale,
    nvfp4_globals,
    pack_pairs,
    reciprocal_or_zero,
    round_e2m1,
    widen,
)

LONGEST_ROW = 1 << 16


@triton.jit
def nvfp4_kernel(
    x_ptr, amax_ptr, out_ptr, qdata_ptr, scale_ptr, global_ptr, rows, width, x_stride, rows_per_amax,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, PER_ROW: tl.constexpr, FLOOR: tl.constexpr, ENCODE: tl.constexpr,
    REVERSE: tl.constexpr,
):  # fmt: skip
    """One (ROWS, COLUMNS) tile. PER_ROW: amax is the row's own. ENCODE: write bytes, else values."""
    BLOCKS: tl.constexpr = COLUMNS // 16
    tile = tl.program_id(0)
    if REVERSE:
        tile = tl.num_programs(0) - 1 - tile
    tiles_across = tl.cdiv(width, COLUMNS)
    row = (tile // tiles_across) * ROWS + tl.arange(0, ROWS)
    column = (tile % tiles_across) * COLUMNS + tl.arange(0, COLUMNS)
    inside = (row[:, None] < rows) & (column[None, :] < width)
    at = row[:, None].to(tl.int64) * x_stride + column[None, :]
    x = widen(tl.load(x_ptr + at, mask=inside, other=0.0))
    blocks = tl.reshape(x, (ROWS, BLOCKS, 16))
    b = tl.max(magnitude(blocks), axis=2)
    if PER_ROW:
        amax = tl.max(b, axis=1)
    else:
        amax = magnitude(tl.load(amax_ptr + row // rows_per_amax, mask=row < rows, other=0.0))
    encode, decode = nvfp4_globals(float_of(amax))
    scale = nvfp4_block_scale(float_of(b), encode[:, None], FLOOR)
    step = scale * decode[:, None]
    codes = round_e2m1(blocks * reciprocal_or_zero(step)[:, :, None])
    out_at = row[:, None].to(tl.int64) * width + column[None, :]
    if ENCODE:
        half = (tile % tiles_across) * (COLUMNS // 2) + tl.arange(0, COLUMNS // 2)
        block = (tile % tiles_across) * BLOCKS + tl.arange(0, BLOCKS)
        packed = pack_pairs(e2m1_nibble(tl.reshape(codes, (ROWS, COLUMNS))), ROWS, COLUMNS)
        keep = (row[:, None] < rows) & (half[None, :] < width // 2)
        tl.store(qdata_ptr + row[:, None].to(tl.int64) * (width // 2) + half[None, :], packed, mask=keep)
        keep = (row[:, None] < rows) & (block[None, :] < width // 16)
        tl.store(
            scale_ptr + row[:, None].to(tl.int64) * (width // 16) + block[None, :],
            e4m3_byte(scale),
            mask=keep,
        )
        if PER_ROW:
            tl.store(global_ptr + row, decode, mask=row < rows)
    else:
        value = tl.reshape(codes * step[:, :, None], (ROWS, COLUMNS))
        tl.store(out_ptr + out_at, narrow(value, out_ptr.dtype.element_ty), mask=inside)


def tile_shape(width: int, whole_row: bool, elements: int = 4096) -> tuple[int, int]:
    """(ROWS, COLUMNS) of about ``elements`` elements; all of a row where it must be whole."""
    across = triton.next_power_of_2(max(width, 16))
    columns = across if whole_row else min(across, 512)
    return max(1, elements // columns), columns


def launch_nvfp4(
    x: Tensor, amax: Tensor | None, *, floor: bool, encode: bool, reverse: bool = False,
    tile: tuple[int, int] | None = None, num_warps: int | None = None,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Run the kernel on rows.

    Args:
        x: (R, K), K a multiple of 16, the last dimension contiguous.
        amax: fp32 (G,) with G a divisor of R, each over R / G consecutive rows; None: each row's own.
        encode: (qdata (R, K/2), scale bytes (R, K/16), global (R, 1) or ()), else (values (R, K), -, -).
        reverse: tiles from the last to the first, for an x whose end is still in the cache.
    """
    rows, width = x.shape
    empty = x.new_empty(0)
    out = x.new_empty(0 if encode else rows, width)
    qdata = torch.empty(rows if encode else 0, width // 2, dtype=torch.uint8, device=x.device)
    scale = torch.empty(rows if encode else 0, width // 16, dtype=torch.uint8, device=x.device)
    decode = torch.empty(rows if amax is None and encode else 0, 1, dtype=torch.float32, device=x.device)
    if x.numel():
        tall, across = tile or tile_shape(width, amax is None)
        grid = (triton.cdiv(rows, tall) * triton.cdiv(width, across),)
        nvfp4_kernel[grid](
            x, empty if amax is None else amax, out, qdata, scale, decode, rows, width, x.stride(0),
            1 if amax is None else rows // amax.numel(),
            ROWS=tall, COLUMNS=across, PER_ROW=amax is None, FLOOR=floor, ENCODE=encode, REVERSE=reverse,
            num_warps=num_warps or warps_for(tall * across), enable_fp_fusion=False,
        )  # fmt: skip
    return (qdata, scale, decode) if encode else (out, scale, decode)


def warps_for(elements: int) -> int:
    """Warps a program: 16 to 32 elements a thread keep loads wide and registers few."""
    return min(16, max(1, triton.next_power_of_2(elements) // 1024))
