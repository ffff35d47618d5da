"""MX: one power of two (E8M0, a biased exponent byte) per 32 columns. value = code * 2^(scale - 127).

b being a block's max |x|, e(b) its fp32 exponent field, and the element's largest value M = 1.m * 2^E:

    rule      scale byte                                         saturates
    :floor    e(b) - E                                           up to 2^(E+1) / M: 1.33 (FP4), 1.14 (FP8)
    :even     e(b rounded to the element's mantissa) - E         less: b's top goes to M or rounds up
    :ceil     exponent of b / M, up if any mantissa bit is set   never

    mxfp4     E2M1 codes, E = 2, M = 6; plain is :even           mxfp8   E4M3 codes, E = 8, M = 448; plain is :ceil
    code = grid(x * 2^(127 - scale)), an exact multiplication

Values above 1.75 * 2^127 leave fp32 under :even, which rounds their block up to 2^128.
Ties: to even, except mxfp4:modelopt: toward zero. Zero blocks: byte 0, codes 0. Bytes clamp to 0..254.
Matched byte for byte: torchao 0.18.0 FLOOR, EVEN, RCEIL; compressed-tensors 0.20.1 (= mxfp4:even); ModelOpt
0.47.0 (mxfp4:modelopt: :ceil scales). Between modes 14-43% of the scale bytes differ. What would break it:
log2 in fp32 for the exponent bits.

Scale: uint8 (..., K/32). Batch invariant.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from .blocked import Blocked, Rule
from .format import alias, register
from .grids import E2M1, E2M1_MAX, E4M3, E4M3_MAX, quotient, round_e2m1_ties_to_zero
from .packing import pack_e2m1

BLOCK = 32
BIAS, LARGEST = 127, 254


def _bits(x: Tensor) -> Tensor:
    return x.float().contiguous().view(torch.int32)


def power_of_two(byte: Tensor) -> Tensor:
    """uint8 scale bytes -> fp32 2^(byte - 127), exactly; byte 0 is the subnormal 2^-127."""
    exponent = byte.int()
    return torch.where(exponent == 0, 1 << 22, exponent << 23).view(torch.float32)


def _byte(exponent: Tensor) -> Tensor:
    return exponent.clamp(0, LARGEST).to(torch.uint8)


def floor_scale(top: int) -> Callable[[Tensor], Tensor]:
    """Exponent of b, less the element's largest exponent."""
    return lambda b: _byte((_bits(b) >> 23) - top)


def even_scale(top: int, mantissa: int) -> Callable[[Tensor], Tensor]:
    """As ``floor_scale`` after rounding b, half up, to ``mantissa`` bits, which may carry into the exponent."""
    half = 1 << (22 - mantissa)
    return lambda b: _byte(((_bits(b) + half) >> 23) - top)


def ceil_scale(largest: float) -> Callable[[Tensor], Tensor]:
    """Least power of two that brings b within ``largest``."""
    return lambda b: _byte((_bits(quotient(b.float(), largest)) + 0x7FFFFF) >> 23)


def unscale(x: Tensor, byte: Tensor, b: Tensor) -> Tensor:
    """x * 2^(127 - byte), exact unless it leaves fp32's range. Byte 254's reciprocal is the subnormal 2^-127."""
    return x * power_of_two((2 * BIAS - byte.int()).clamp(max=LARGEST))


def _rule(scale_of: Callable[[Tensor], Tensor]) -> Rule:
    return Rule(scale_of, unscale, scale_value=power_of_two)


E2M1_TIES_TO_ZERO = replace(
    E2M1, encode=lambda x: pack_e2m1(round_e2m1_ties_to_zero(x)), round=round_e2m1_ties_to_zero
)

register(
    Blocked("mxfp4", E2M1, _rule(even_scale(2, 1)), group=BLOCK, scale_bits=8),
    Blocked("mxfp4:floor", E2M1, _rule(floor_scale(2)), group=BLOCK, scale_bits=8),
    Blocked("mxfp4:ceil", E2M1, _rule(ceil_scale(E2M1_MAX)), group=BLOCK, scale_bits=8),
    Blocked("mxfp4:modelopt", E2M1_TIES_TO_ZERO, _rule(ceil_scale(E2M1_MAX)), group=BLOCK, scale_bits=8),
    Blocked("mxfp8", E4M3, _rule(ceil_scale(E4M3_MAX)), group=BLOCK, scale_bits=8),
    Blocked("mxfp8:floor", E4M3, _rule(floor_scale(8)), group=BLOCK, scale_bits=8),
    Blocked("mxfp8:even", E4M3, _rule(even_scale(8, 3)), group=BLOCK, scale_bits=8),
)
for _second, _first in {
    "mxfp4:even": "mxfp4",
    "mxfp4:compressed-tensors": "mxfp4",
    "mxfp4:vllm": "mxfp4",
    "mxfp4:torchao": "mxfp4:floor",
    "mxfp8:torchao": "mxfp8:floor",
    "mxfp8:ceil": "mxfp8",
}.items():
    alias(_second, _first)
