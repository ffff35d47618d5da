"""Triton device functions: rounding onto the grids of formats/grids.py, bit for bit, and the codes' bits.

Everything is fp32 with denormals kept, and each function is exact about one thing:

    round to m mantissa bits   x + C p - C p with C = 1.5 * 2^(23 - m) and p the power of two of |x|. C p is
                               exact, so a fused multiply-add rounds where the reference's addition does
    codes                      |v| times a power of two that makes the grid's subnormals fp32's subnormals:
                               exponent and mantissa of the product then *are* the code
    division                   ``div_rn``, IEEE: Triton's ``/`` is approximate (div.full.f32, 2 ulp)
    maxima                     of |x| as integers, which order as the floats do and let NaN win

Launch with ``enable_fp_fusion=False``: the caller's multiply must not fuse into the additions here.
"""

from __future__ import annotations

import triton
import triton.language as tl

from .backend import is_interpreting

INTERPRETING = tl.constexpr(is_interpreting())
MAGNITUDE = tl.constexpr(0x7FFFFFFF)
EXPONENT = tl.constexpr(0x7F800000)
E2M1_ROUNDER = tl.constexpr(1.5 * 2.0**22)
E4M3_ROUNDER = tl.constexpr(1.5 * 2.0**20)
INTEGER_ROUNDER = tl.constexpr(1.5 * 2.0**23)
E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
NAN_BITS = tl.constexpr(0x7FC00000)


@triton.jit
def bits_of(x):
    """fp32 -> its bits, int32."""
    return x.to(tl.int32, bitcast=True)


@triton.jit
def float_of(bits):
    """int32 bits -> fp32."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def widen(x):
    """Any float -> fp32, exactly."""
    if x.dtype == tl.bfloat16:
        # By bits: Triton's interpreter loses BF16 subnormals; compilers see a shift either way.
        wide = float_of((x.to(tl.int16, bitcast=True).to(tl.int32)) << 16)
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def narrow(x, dtype: tl.constexpr):
    """fp32 -> dtype, ties to even; NaN stays NaN."""
    if INTERPRETING and (dtype == tl.bfloat16):
        # Triton's interpreter truncates here, where cvt.rn.bf16.f32 rounds.
        bits = bits_of(x)
        rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
        narrowed = tl.where(x != x, 0x7FC0, rounded).to(tl.int16).to(tl.bfloat16, bitcast=True)
    else:
        narrowed = x.to(dtype)
    return narrowed


@triton.jit
def magnitude(x):
    """|x| of fp32 as int32: orders like |x|, NaN above everything."""
    return bits_of(x) & MAGNITUDE


@triton.jit
def round_e2m1(x):
    """fp32 -> nearest E2M1 value, ties to even, saturating, never -0."""
    x = tl.minimum(tl.maximum(x, -6.0), 6.0)
    power = tl.maximum(float_of(bits_of(x) & EXPONENT), 1.0)
    return tl.fma(power, -E2M1_ROUNDER, tl.fma(power, E2M1_ROUNDER, x))


@triton.jit
def round_e4m3(x):
    """fp32 -> nearest E4M3 value, ties to even, saturating at +-448; loses the sign of a zero."""
    x = tl.minimum(tl.maximum(x, -448.0), 448.0)
    power = tl.maximum(float_of(bits_of(x) & EXPONENT), E4M3_MIN_NORMAL)
    return tl.fma(power, -E4M3_ROUNDER, tl.fma(power, E4M3_ROUNDER, x))


@triton.jit
def round_integer(x, low: tl.constexpr, high: tl.constexpr):
    """fp32 -> nearest integer in [low, high], ties to even, never -0."""
    # Bounds are integers, so clamping first gives what clamping the rounded value would.
    x = tl.minimum(tl.maximum(x, low), high)
    return (x + INTEGER_ROUNDER) - INTEGER_ROUNDER


@triton.jit
def with_sign_of(value, x):
    """A magnitude on a grid, under x's sign bit (a rounded value already has it, unless it is a zero)."""
    return float_of(magnitude(value) | (bits_of(x) & -0x80000000))


@triton.jit
def e4m3_byte(value):
    """fp32 on the E4M3 grid -> its byte; NaN -> 0x7F."""
    magnitude_bits = magnitude(value * 2.0**-120) >> 20
    sign = (bits_of(value) >> 24) & 0x80
    return tl.where(value != value, 0x7F, sign | magnitude_bits).to(tl.uint8)


@triton.jit
def e2m1_nibble(value):
    """fp32 on the E2M1 grid -> its 4-bit code in an int32."""
    return (magnitude(value * 2.0**-126) >> 22) | ((bits_of(value) >> 28) & 0x8)


@triton.jit
def int_nibble(value):
    """fp32 integer in [-8, 7] -> two's complement nibble in an int32."""
    return value.to(tl.int32) & 0xF


@triton.jit
def pack_pairs(nibbles, rows: tl.constexpr, columns: tl.constexpr):
    """(rows, columns) int32 nibbles -> (rows, columns / 2) bytes, low nibble the even column."""
    low, high = tl.split(tl.reshape(nibbles, (rows, columns // 2, 2)))
    return (low | (high << 4)).to(tl.uint8)


@triton.jit
def nvfp4_globals(amax):
    """fp32 amax -> (S, 1 / S): S = 2688 / amax, 1 where that overflows; both divisions IEEE."""
    encode = tl.div_rn(tl.full(amax.shape, 2688.0, tl.float32), amax)
    encode = tl.where(encode == float("inf"), 1.0, encode)
    return encode, tl.div_rn(tl.full(amax.shape, 1.0, tl.float32), encode)


@triton.jit
def nvfp4_block_scale(b, encode, FLOOR: tl.constexpr):
    """Block max |x| (fp32) and S -> E4M3 block scale as fp32: e4m3(S * (b * (1/6))), NaN kept."""
    wanted = encode * (b * (1.0 / 6.0))
    if FLOOR:
        # Saturation is round_e4m3's. Zero blocks keep scale 0.
        wanted = tl.where(b > 0.0, tl.maximum(wanted, E4M3_MIN_NORMAL), 0.0)
    return tl.where(b != b, b, round_e4m3(wanted))


@triton.jit
def reciprocal_or_zero(step):
    """1 / step, IEEE; 0 where that is infinite."""
    inverse = tl.div_rn(tl.full(step.shape, 1.0, tl.float32), step)
    return tl.where(inverse == float("inf"), 0.0, inverse)
