"""Triton body of ``w8a8_matmul``: any shape; INT8 sums in int32, FP8 sums in fp32."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from .rounding_triton import INTERPRETING, float_of, narrow, widen


@triton.jit
def _values(codes, FP8: tl.constexpr):
    """Codes as the product takes them: FP8 as BF16, which holds E4M3 exactly, or int8."""
    if FP8:
        bits = codes.to(tl.int32)
        value = narrow(float_of(((bits & 0x80) << 24) | ((bits & 0x7F) << 20)) * 2.0**120, tl.bfloat16)
    else:
        value = codes.to(tl.int8, bitcast=True)
    return value


@triton.jit
def _w8a8_kernel(
    a, b, scale_a, scale_b, bias, out, slots, experts, M, N, K, slots_per_row,
    FP8: tl.constexpr, GROUPED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    slot = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = 0
    if GROUPED:
        expert = tl.load(experts + tl.program_id(1)).to(tl.int64)
        slot = tl.load(slots + slot)
        if expert < 0:
            return
    live = slot < M
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_row = tl.where(live, slot // slots_per_row, 0).to(tl.int64)
    b_row = expert * N + tl.where(n < N, n, 0)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if FP8 else tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_tile = tl.load(a + a_row[:, None] * K + k[None, :], mask=live[:, None] & (k < K)[None, :], other=0)
        b_tile = tl.load(
            b + b_row.to(tl.int64)[:, None] * K + k[None, :],
            mask=(n < N)[:, None] & (k < K)[None, :],
            other=0,
        )
        left, right = _values(a_tile, FP8), tl.trans(_values(b_tile, FP8))
        if INTERPRETING and FP8:
            left, right = widen(left), widen(right)
        acc = tl.dot(left, right, acc, out_dtype=tl.float32 if FP8 else tl.int32)
    scale = tl.load(scale_a + a_row)[:, None] * tl.load(scale_b + b_row)[None, :]
    y = acc.to(tl.float32) * scale
    if bias is not None:
        y = y + widen(tl.load(bias + b_row))[None, :]
    inside = live[:, None] & (n < N)[None, :]
    tl.store(out + slot.to(tl.int64)[:, None] * N + n[None, :], narrow(y, tl.bfloat16), mask=inside)


def launch_w8a8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, out: Tensor, kind: str,
    slots: Tensor | None = None, experts: Tensor | None = None, block: int = 0, slots_per_row: int = 1,
) -> None:  # fmt: skip
    """Write ``out`` (slots, N) of uint8 codes (rows, K) and ([E,] N, K); ``slots`` and ``experts`` make it grouped."""
    m, n = out.shape
    if not m or not n:
        return
    block_m = block or min(64, max(16, triton.next_power_of_2(m)))
    blocks = experts.numel() if experts is not None else triton.cdiv(m, block_m)
    _w8a8_kernel[(triton.cdiv(n, 64), blocks)](
        a.contiguous(), b.contiguous(), scale_a.contiguous(), scale_b.contiguous(), bias, out, slots, experts,
        m, n, a.shape[1], slots_per_row, FP8=kind == "fp8", GROUPED=experts is not None,
        BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3, enable_fp_fusion=False,
    )  # fmt: skip
