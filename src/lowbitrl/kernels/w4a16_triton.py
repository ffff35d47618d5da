"""Triton body of ``w4a16_matmul`` and ``grouped_w4a16_matmul``: the fallback of the CUDA kernel.

Even columns are the low nibbles, odd ones the high nibbles: two products, each on every second column of x,
so no code is ever moved next to its neighbour.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from .rounding_triton import INTERPRETING, float_of, narrow, widen


@triton.jit
def decode_nibble(nibble, NVFP4: tl.constexpr):
    """fp32 value of a 4-bit code."""
    bits = nibble.to(tl.int32)
    # E2M1: sign to bit 31, the rest to the lowest exponent bits and the mantissa: value * 2^-126, exactly.
    return (
        float_of(((bits & 8) << 28) | ((bits & 7) << 22)) * 2.0**126
        if NVFP4
        else ((bits ^ 8) - 8).to(tl.float32)
    )


@triton.jit
def decode_scale(raw, NVFP4: tl.constexpr):
    """fp32 value of E4M3 bits or of a BF16 scale."""
    # E4M3 bits in an fp32's place are the value * 2^-120, subnormals too.
    return float_of(raw.to(tl.int32) << 20) * 2.0**120 if NVFP4 else widen(raw)


@triton.jit
def product(a, b, acc):
    """acc + a b^T of BF16 tiles, in fp32."""
    if INTERPRETING:
        # Triton's interpreter multiplies the bit patterns of BF16.
        acc = tl.dot(widen(a), tl.trans(widen(b)), acc)
    else:
        acc = tl.dot(a, tl.trans(b), acc)
    return acc


@triton.jit
def _w4a16_kernel(
    x, codes, scale, global_scale, token_scale, bias, out, slots, experts,
    M, N, K, x_stride, slots_per_row,
    NVFP4: tl.constexpr, GROUP: tl.constexpr, GROUPED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    pid_n, pid_m = tl.program_id(0), tl.program_id(1)
    slot = pid_m * BLOCK_M + tl.arange(0, BLOCK_M)
    expert = 0
    if GROUPED:
        expert = tl.load(experts + pid_m).to(tl.int64)
        slot = tl.load(slots + slot)
        if expert < 0:
            return
    live = slot < M
    row = tl.where(live, slot // slots_per_row, 0).to(tl.int64)
    n = pid_n * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_row = expert * N + tl.where(n < N, n, 0)
    halves = tl.arange(0, BLOCK_K // 2)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for start in range(0, K, BLOCK_K):
        c = start // 2 + halves
        inside = c < K // 2
        x_at = x + row[:, None] * x_stride + 2 * c[None, :]
        x_mask = live[:, None] & inside[None, :]
        even = tl.load(x_at, mask=x_mask, other=0.0)
        odd = tl.load(x_at + 1, mask=x_mask, other=0.0)
        w_mask = (n < N)[:, None] & inside[None, :]
        packed = tl.load(codes + weight_row[:, None] * (K // 2) + c[None, :], mask=w_mask, other=0)
        raw = tl.load(
            scale + weight_row[:, None] * (K // GROUP) + (2 * c // GROUP)[None, :], mask=w_mask, other=0
        )
        factor = decode_scale(raw, NVFP4)
        acc = product(even, narrow(decode_nibble(packed & 15, NVFP4) * factor, tl.bfloat16), acc)
        acc = product(odd, narrow(decode_nibble(packed >> 4, NVFP4) * factor, tl.bfloat16), acc)
    alpha = tl.full((BLOCK_M,), 1.0, tl.float32)
    if global_scale is not None:
        alpha = alpha * tl.load(global_scale + expert)
    if token_scale is not None:
        alpha = alpha * tl.load(token_scale + row, mask=live, other=0.0)
    y = acc * alpha[:, None]
    if bias is not None:
        y = y + widen(tl.load(bias + weight_row, mask=n < N, other=0.0))[None, :]
    out_at = out + slot.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(out_at, narrow(y, tl.bfloat16), mask=live[:, None] & (n < N)[None, :])


def launch_w4a16(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, out: Tensor, group: int, nvfp4: bool,
    slots: Tensor | None = None, experts: Tensor | None = None, block: int = 0, slots_per_row: int = 1,
) -> None:  # fmt: skip
    """Write ``out`` (slots, N); ``slots`` and ``experts`` make it grouped, ``block`` slots a group."""
    m, n = out.shape
    block_m = block or min(64, max(16, triton.next_power_of_2(max(m, 1))))
    block_n, block_k = 64, 128
    blocks = experts.numel() if experts is not None else triton.cdiv(m, block_m)
    if not m or not n:
        return
    grid = (triton.cdiv(n, block_n), blocks)
    _w4a16_kernel[grid](
        x, codes, scale.view(torch.uint8) if nvfp4 else scale, global_scale, token_scale, bias, out,
        slots, experts, m, n, x.shape[-1], x.stride(0), slots_per_row,
        NVFP4=nvfp4, GROUP=group, GROUPED=experts is not None,
        BLOCK_M=block_m, BLOCK_N=block_n, BLOCK_K=block_k, num_warps=4, num_stages=3,
    )  # fmt: skip
