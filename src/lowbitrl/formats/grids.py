"""The grids codes live on, and rounding onto them: always to nearest, ties to the even code.

E2M1 (FP4)  0 0.5 1 1.5 2 3 4 6 and negatives. A code is sign<<3 | index into that list.
            Ties:  0.25 -> 0   0.75 -> 1   1.25 -> 1   1.75 -> 2   2.5 -> 2   3.5 -> 4   5 -> 4
E4M3 (FP8)  1-4-3 bits, bias 7, largest 448, no infinity: subnormals are multiples of 2^-9.
E8M0        a power of two 2^(code-127), code 0..254; 255 is NaN and never written.
INT4, INT8  integers, two's complement.

Every rounding here saturates. In E2M1, -0 and negatives that round to zero become +0 (code 0): libraries
differ on that sign, and no sum can tell. E4M3 keeps it, as they all do.

What would break it: rounding E2M1 with ``torch.round`` on a rescaled value (the step changes at 2 and 4), or
a compiler that fuses the caller's multiply into the addition below (FMA rounds once where two roundings are
the contract).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .packing import pack_e2m1, pack_nibbles, unpack_nibbles

E2M1_MAX = 6.0
E4M3_MAX = 448.0
E4M3_MIN_NORMAL = 2.0**-6
E4M3_TINY = 2.0**-9

E2M1_VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)

_EXPONENT_BITS = 0x7F800000


def quotient(a: Tensor | float, b: Tensor | float) -> Tensor:
    """a / b, one IEEE division on every device; one of them may be a number.

    torch's own operators are not that: ``tensor / number`` multiplies by the reciprocal on CUDA, and
    ``number / tensor`` is ``reciprocal() * number`` everywhere. A quarter of all values differ in the last bit.
    """
    if isinstance(a, Tensor):
        return a / (b if isinstance(b, Tensor) else a.new_full((), b))
    assert isinstance(b, Tensor)
    return b.new_full((), a) / b


def _round_mantissa(x: Tensor, bits: int, min_normal: float) -> Tensor:
    """fp32 -> nearest number of ``bits`` mantissa bits, ties to even, in place; no steps finer than min_normal's."""
    # In a subnormal range the step stays that of the least normal number, hence the floor on the power of two.
    power = (x.view(torch.int32) & _EXPONENT_BITS).view(torch.float32).clamp_(min=min_normal)
    # The last bit of 1.5 * 2^(23 - bits) * power is power / 2^bits, the step: adding it rounds x to one.
    rounder = 1.5 * 2.0 ** (23 - bits)
    return x.add_(power, alpha=rounder).sub_(power, alpha=rounder)


def round_e2m1(x: Tensor) -> Tensor:
    """fp32 -> the nearest E2M1 value, as fp32; ties to even, saturating at +-6, never -0."""
    return _round_mantissa(x.clamp(-E2M1_MAX, E2M1_MAX), 1, 1.0)


def round_e4m3(x: Tensor) -> Tensor:
    """fp32 -> the nearest E4M3 value, as fp32; what casting there and back gives, sign of zero included, faster."""
    return _round_mantissa(x.clamp(-E4M3_MAX, E4M3_MAX), 3, E4M3_MIN_NORMAL).copysign_(x)


def round_e2m1_ties_to_zero(x: Tensor) -> Tensor:
    """As ``round_e2m1`` but a value midway between two codes goes to the smaller one."""
    values = torch.tensor(E2M1_VALUES, dtype=torch.float32, device=x.device)
    # bucketize's intervals are closed on the right, which is this tie rule.
    index = torch.bucketize(x.abs(), (values[1:] + values[:-1]) / 2)
    return values[index] * x.sign()


def to_e4m3(x: Tensor) -> Tensor:
    """fp32 -> ``float8_e4m3fn``, ties to even, saturating at +-448."""
    # Casting 465 gave NaN before torch 2.12 and gives 448 since: never let it decide.
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(torch.float8_e4m3fn)


# Device and dtype spelled out: models are built under torch.device("meta") and other default dtypes.
_E4M3_TABLE = torch.arange(256, dtype=torch.uint8, device="cpu").view(torch.float8_e4m3fn).float()


def _e2m1_pairs() -> Tensor:
    """Both E2M1 values of each byte, low nibble first, as the bits of one int64."""
    signed = E2M1_VALUES + tuple(0.0 - v for v in E2M1_VALUES)
    pairs = [(signed[byte & 15], signed[byte >> 4]) for byte in range(256)]
    return torch.tensor(pairs, dtype=torch.float32, device="cpu").view(torch.int64).view(-1)


_E2M1_PAIRS = _e2m1_pairs()
_ELSEWHERE: dict[tuple[int, torch.device], Tensor] = {}


def _lookup(table: Tensor, codes: Tensor) -> Tensor:
    """``table[codes]``; index_select is the fastest gather on CPU. Tables are kept on the devices they met."""
    if codes.device != table.device:
        key = (id(table), codes.device)
        table = _ELSEWHERE.get(key, table).to(codes.device)
        # Not a fake tensor of some tracing mode: it would outlive the trace.
        if type(table) is Tensor:
            _ELSEWHERE[key] = table
    return table.index_select(0, codes.reshape(-1).int()).view(codes.shape)


def from_e4m3(codes: Tensor) -> Tensor:
    """``float8_e4m3fn``, or its uint8 bits, -> fp32, exactly."""
    return _lookup(_E4M3_TABLE, codes.view(torch.uint8))


def from_e2m1_bytes(packed: Tensor) -> Tensor:
    """uint8 (..., K/2) of two E2M1 codes, low nibble the even column -> fp32 (..., K), exactly."""
    return _lookup(_E2M1_PAIRS, packed).view(torch.float32)


@dataclass(frozen=True)
class Grid:
    """One element grid. encode: fp32 (R, K) -> codes as stored; decode: back, exactly; round: both at once.

    bits: of one code. codes_per_byte: 2 when packed two a byte along K.
    """

    bits: int
    encode: Callable[[Tensor], Tensor]
    decode: Callable[[Tensor], Tensor]
    round: Callable[[Tensor], Tensor]

    @property
    def codes_per_byte(self) -> int:
        return 8 // self.bits


def round_int(x: Tensor, low: int, high: int) -> Tensor:
    """fp32 -> the nearest integer in [low, high], as fp32; ties to even; -0 becomes +0."""
    # Integer bounds commute with rounding, so one clamp serves; adding 0 drops the sign of a zero.
    return x.round().clamp_(low, high).add_(0.0)


def int8_grid(low: int = -128) -> Grid:
    """INT8 codes in [low, 127], two's complement, one a byte."""
    return Grid(
        8,
        lambda x: round_int(x, low, 127).to(torch.int8).view(torch.uint8),
        lambda codes: codes.view(torch.int8).float(),
        lambda x: round_int(x, low, 127),
    )


def int4_grid(low: int = -8) -> Grid:
    """INT4 codes in [low, 7], two's complement nibbles, two a byte."""
    return Grid(
        4,
        lambda x: pack_nibbles((round_int(x, low, 7).to(torch.int8) & 15).view(torch.uint8)),
        lambda packed: ((unpack_nibbles(packed) ^ 8).view(torch.int8) - 8).float(),
        lambda x: round_int(x, low, 7),
    )


E2M1 = Grid(4, lambda x: pack_e2m1(round_e2m1(x)), from_e2m1_bytes, round_e2m1)
E4M3 = Grid(8, lambda x: to_e4m3(x).view(torch.uint8), from_e4m3, round_e4m3)
