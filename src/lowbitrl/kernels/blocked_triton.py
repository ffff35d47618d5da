"""Formats with one scale level (FP8, INT8, INT4, MX) in Triton: each element is read once.

A rule is named by a constexpr; its steps are those of the format's module, every division IEEE (div.rn.f32).
One program holds whole scale blocks: a row, columns of a group, or a 128 x 128 tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from lowbitrl.formats.fp8 import DEEPGEMM_FLOOR, TOKEN_FLOOR, VLLM_GROUP_FLOOR

from .nvfp4_triton import warps_for
from .rounding_triton import (
    bits_of,
    e2m1_nibble,
    e4m3_byte,
    float_of,
    int_nibble,
    magnitude,
    narrow,
    pack_pairs,
    reciprocal_or_zero,
    round_e2m1,
    round_e4m3,
    round_integer,
    widen,
    with_sign_of,
)

TOKEN = tl.constexpr(TOKEN_FLOOR)
GROUP_FLOOR = tl.constexpr(VLLM_GROUP_FLOOR)
TILE_FLOOR = tl.constexpr(DEEPGEMM_FLOOR)


@triton.jit
def _over(b, divisor: tl.constexpr):
    return tl.div_rn(b, tl.full(b.shape, divisor, tl.float32))


@triton.jit
def _at_least(b, floor: tl.constexpr):
    """max(b, floor); NaN stays NaN."""
    return tl.where(b != b, b, tl.maximum(b, floor))


@triton.jit
def _mx_byte(exponent):
    return tl.minimum(tl.maximum(exponent, 0), 254)


@triton.jit
def _power_of_two(byte):
    """2^(byte - 127); byte 0 is the subnormal 2^-127."""
    return float_of(tl.where(byte == 0, 1 << 22, byte << 23))


@triton.jit
def stored_scale(b, RULE: tl.constexpr):
    """Block max |x| (fp32) -> the decode scale as fp32, or for MX its exponent byte as int32."""
    if RULE == "fp8-token":
        scale = _at_least(_over(b, 448.0), TOKEN)
    elif RULE == "fp8-group":
        scale = _over(_at_least(b, GROUP_FLOOR), 448.0)
    elif RULE == "fp8-tile":
        scale = _over(_at_least(b, TILE_FLOOR), 448.0)
    elif RULE == "int8":
        scale = _over(b, 127.0)
    elif RULE == "int4":
        scale = widen(narrow(_over(b, 7.5), tl.bfloat16))
    elif RULE == "mxfp4":
        scale = _mx_byte(((bits_of(b) + (1 << 21)) >> 23) - 2)
    else:
        tl.static_assert(RULE == "mxfp8")
        scale = _mx_byte((bits_of(_over(b, 448.0)) + 0x7FFFFF) >> 23)
    return scale


@triton.jit
def in_units(x, b, scale, RULE: tl.constexpr):
    """x in units of its scale, before rounding."""
    if RULE == "fp8-token":
        y = tl.div_rn(x, tl.broadcast_to(scale, x.shape))
    elif RULE == "int4":
        y = tl.div_rn(x, tl.broadcast_to(tl.where(scale == 0.0, 1.0, scale), x.shape))
    elif RULE == "int8":
        inverse = tl.div_rn(tl.full(b.shape, 127.0, tl.float32), b)
        y = x * tl.where(inverse == float("inf"), 0.0, inverse)
    elif (RULE == "mxfp4") or (RULE == "mxfp8"):
        y = x * _power_of_two(tl.minimum(254 - scale, 254))
    else:
        y = x * reciprocal_or_zero(scale)
    return y


@triton.jit
def on_grid(y, GRID: tl.constexpr):
    """fp32 -> the nearest value of the grid."""
    if GRID == "e4m3":
        value = with_sign_of(round_e4m3(y), y)
    elif GRID == "e4m3-native":
        value = y.to(tl.float8e4nv).to(tl.float32)
    elif GRID == "e2m1":
        value = round_e2m1(y)
    elif GRID == "int8":
        value = round_integer(y, -128.0, 127.0)
    else:
        tl.static_assert(GRID == "int4")
        value = round_integer(y, -8.0, 7.0)
    return value


@triton.jit
def blocked_kernel(
    x_ptr, amax_ptr, out_ptr, qdata_ptr, scale_ptr, width, x_stride, rows_per_part, rows_per_amax, scales_across,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, GROUP: tl.constexpr, TILED: tl.constexpr, GIVEN: tl.constexpr,
    RULE: tl.constexpr, GRID: tl.constexpr, ENCODE: tl.constexpr, SCALES: tl.constexpr,
):  # fmt: skip
    """One (ROWS, COLUMNS) tile of one part; grid (tiles of a part, parts). GROUP columns share a scale.

    TILED: all ROWS share it too. GIVEN: amax is loaded, one for ``rows_per_amax`` rows. ENCODE: write codes, and
    with SCALES scales; else values.
    """
    GROUPS: tl.constexpr = COLUMNS // GROUP
    tiles_across = tl.cdiv(width, COLUMNS)
    down, across = tl.program_id(0) // tiles_across, tl.program_id(0) % tiles_across
    local = down * ROWS + tl.arange(0, ROWS)
    row = (tl.program_id(1).to(tl.int64) * rows_per_part) + local
    there = local < rows_per_part
    column = across * COLUMNS + tl.arange(0, COLUMNS)
    inside = there[:, None] & (column[None, :] < width)
    x = widen(tl.load(x_ptr + row[:, None] * x_stride + column[None, :], mask=inside, other=0.0))
    groups = tl.reshape(x, (ROWS, GROUPS, GROUP))
    if GIVEN:
        peak = magnitude(tl.load(amax_ptr + row // rows_per_amax, mask=there, other=0.0))
        b = tl.broadcast_to(peak[:, None], (ROWS, GROUPS))
    else:
        b = tl.max(magnitude(groups), axis=2)
        if TILED:
            b = tl.broadcast_to(tl.max(b, axis=0)[None, :], (ROWS, GROUPS))
    b = float_of(b)
    stored = stored_scale(b, RULE)
    value = on_grid(in_units(groups, b[:, :, None], stored[:, :, None], RULE), GRID)
    if ENCODE:
        flat = tl.reshape(value, (ROWS, COLUMNS))
        if (GRID == "e4m3") or (GRID == "e4m3-native"):
            codes = e4m3_byte(flat)
        elif GRID == "int8":
            codes = (flat.to(tl.int32) & 0xFF).to(tl.uint8)
        elif GRID == "e2m1":
            codes = pack_pairs(e2m1_nibble(flat), ROWS, COLUMNS)
        else:
            codes = pack_pairs(int_nibble(flat), ROWS, COLUMNS)
        PER_BYTE: tl.constexpr = 2 if (GRID == "e2m1") or (GRID == "int4") else 1
        byte = across * (COLUMNS // PER_BYTE) + tl.arange(0, COLUMNS // PER_BYTE)
        keep = there[:, None] & (byte[None, :] < width // PER_BYTE)
        tl.store(qdata_ptr + row[:, None] * (width // PER_BYTE) + byte[None, :], codes, mask=keep)
        if SCALES:
            group = across * GROUPS + tl.arange(0, GROUPS)
            keep = there[:, None] & (group[None, :] < scales_across)
            line = row
            if TILED:
                # Every row of the tile holds the tile's scale; the first one writes it.
                keep = keep & (local % ROWS == 0)[:, None]
                line = tl.program_id(1).to(tl.int64) * tl.cdiv(rows_per_part, ROWS) + local // ROWS
            scale_at = scale_ptr + line[:, None] * scales_across + group[None, :]
            if RULE == "int4":
                stored = narrow(stored, tl.bfloat16)
            tl.store(scale_at, stored.to(scale_ptr.dtype.element_ty), mask=keep)
    else:
        if (RULE == "mxfp4") or (RULE == "mxfp8"):
            decode = _power_of_two(stored)
        else:
            decode = stored
        out = narrow(tl.reshape(value * decode[:, :, None], (ROWS, COLUMNS)), out_ptr.dtype.element_ty)
        tl.store(out_ptr + row[:, None] * width + column[None, :], out, mask=inside)


def launch_blocked(
    x: Tensor, amax: Tensor | None, *, rule: str, grid: str, group: int | None, tiled: bool, encode: bool,
    scales: bool, scale_dtype: torch.dtype, parts: int = 1, tile: tuple[int, int] | None = None,
    num_warps: int | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """Run the kernel on rows.

    Args:
        x: (R, K), the last dimension contiguous; K a multiple of ``group``.
        amax: fp32 (G,) with G a divisor of R, each over R / G consecutive rows; None: measured.
        group: columns a scale; None is the whole row.
        tiled: ``group`` rows share it too, within each of ``parts`` equal runs of rows.
        encode: (codes, scales (R, K/group) or (parts * tiles down, K/group)), else (values, empty).
        scales: False where the caller has the scale (one a tensor).
    """
    rows, width = x.shape
    tall, across = tile or _tile_shape(width, group, tiled)
    per_byte = 2 if grid in ("int4", "e2m1") else 1
    rows_per_part = rows // parts
    lines = (parts * -(-rows_per_part // tall) if tiled else rows) if encode and scales else 0
    scales_across = width // group if group else 1
    out = x.new_empty(0 if encode else rows, width)
    qdata = torch.empty(rows if encode else 0, width // per_byte, dtype=torch.uint8, device=x.device)
    scale = torch.empty(lines, scales_across, dtype=scale_dtype, device=x.device)
    if grid == "e4m3" and tiled and amax is None and converts_e4m3(x.device):
        grid = "e4m3-native"
    if x.numel():
        programs = (triton.cdiv(rows_per_part, tall) * triton.cdiv(width, across), parts)
        blocked_kernel[programs](
            x, scale if amax is None else amax, out, qdata, scale, width, x.stride(0), rows_per_part,
            1 if amax is None else rows // amax.numel(), scales_across,
            ROWS=tall, COLUMNS=across, GROUP=group or across, TILED=tiled, GIVEN=amax is not None,
            RULE=rule, GRID=grid, ENCODE=encode, SCALES=scales,
            num_warps=num_warps or warps_for(tall * across), enable_fp_fusion=False,
        )  # fmt: skip
    return (qdata if encode else out), scale


def converts_e4m3(device: torch.device) -> bool:
    """Whether fp32 to E4M3, ties to even and saturating, is one instruction there (sm89 on)."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 9)


def _tile_shape(width: int, group: int | None, tiled: bool) -> tuple[int, int]:
    assert group is not None or not tiled
    if tiled:
        return group, group  # type: ignore[return-value]
    across = triton.next_power_of_2(max(width, 16))
    columns = across if group is None else min(across, 512)
    return max(1, 4096 // columns), columns
