"""Where codes and scales lie in memory: nibbles, and (for other engines) int32 words and swizzled scales.

Nibbles   byte = code[2i] | code[2i+1] << 4: the low nibble is the even column.

What would break it: ModelOpt's INT4 tensor puts the even column in the *high* nibble.
"""

from __future__ import annotations

import torch
from torch import Tensor


def pack_nibbles(codes: Tensor) -> Tensor:
    """4-bit codes in the low nibbles of uint8 (..., K), K even -> uint8 (..., K/2)."""
    # A pair of bytes is one little-endian int16 with the even column in its low half.
    pairs = codes.contiguous().view(torch.int16)
    return ((pairs | (pairs >> 4)) & 0xFF).to(torch.uint8)


def unpack_nibbles(packed: Tensor) -> Tensor:
    """Inverse of ``pack_nibbles``: uint8 (..., K/2) -> uint8 codes 0..15 (..., K)."""
    return torch.stack([packed & 15, packed >> 4], -1).flatten(-2)


def pack_e2m1(values: Tensor) -> Tensor:
    """fp32 values already on the E2M1 grid (..., K), K even -> two codes a byte (..., K/2)."""
    # Scaled by 2^-14, E2M1's 0.5 becomes fp16's largest subnormal bit and 1.0 its smallest normal number, so
    # exponent and mantissa of the half are the three magnitude bits, at bit 9, and the sign is at bit 15.
    pairs = (values * 2.0**-14).half().view(torch.int32)
    low = ((pairs >> 9) & 0x7) | ((pairs >> 12) & 0x8)
    high = ((pairs >> 21) & 0x70) | ((pairs >> 24) & 0x80)
    return (low | high).to(torch.uint8)
