"""Triton body of ``w8a8_matmul``: any shape; INT8 sums in int32, FP8 sums in fp32."""

from __future__ import annotations

import torch
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
    a, b, scale_a, scale_b, bias, out, M, N, K,
    FP8: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    m = tl.program_id(1) * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    a_row, b_row = tl.where(m < M, m, 0).to(tl.int64), tl.where(n < N, n, 0).to(tl.int64)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32 if FP8 else tl.int32)
    for start in range(0, K, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        a_tile = tl.load(
            a + a_row[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :], other=0
        )
        b_tile = tl.load(
            b + b_row[:, None] * K + k[None, :], mask=(n < N)[:, None] & (k < K)[None, :], other=0
        )
        left, right = _values(a_tile, FP8), tl.trans(_values(b_tile, FP8))
        if INTERPRETING and FP8:
            left, right = widen(left), widen(right)
        acc = tl.dot(left, right, acc, out_dtype=tl.float32 if FP8 else tl.int32)
    scale = tl.load(scale_a + a_row)[:, None] * tl.load(scale_b + b_row)[None, :]
    y = acc.to(tl.float32) * scale
    if bias is not None:
        y = y + widen(tl.load(bias + b_row))[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out + m.to(tl.int64)[:, None] * N + n[None, :], narrow(y, tl.bfloat16), mask=inside)


def launch_w8a8(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: str
) -> Tensor:
    """(M, N) in BF16 of uint8 codes (M, K) and (N, K)."""
    m, n = a.shape[0], b.shape[0]
    out = a.new_empty(m, n, dtype=torch.bfloat16)
    if not m or not n:
        return out
    block_m = min(64, max(16, triton.next_power_of_2(m)))
    grid = (triton.cdiv(n, 64), triton.cdiv(m, block_m))
    _w8a8_kernel[grid](
        a.contiguous(), b.contiguous(), scale_a.contiguous(), scale_b.contiguous(), bias, out, m, n, a.shape[1],
        FP8=kind == "fp8", BLOCK_M=block_m, BLOCK_N=64, BLOCK_K=128, num_warps=4, num_stages=3,
        enable_fp_fusion=False,
    )  # fmt: skip
    return out
