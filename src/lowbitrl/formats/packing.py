"""Where codes and scales lie in memory: nibbles, and (for other engines) int32 words and swizzled scales.

    nibbles     byte i = code[2i] | code[2i+1] << 4: the low nibble is the even column
    int32       word i = sum of (code[8i+j] + 8) << 4j: compressed-tensors' pack-quantized INT4
    128 x 4     512-byte tiles of block scales, four interleaved runs of 32 rows: cuBLAS, CUTLASS

Everything else in the library keeps codes in nibbles and scales row-major; these are the doors to engines.
What would break it: ModelOpt's INT4QTensor puts the even column in the *high* nibble, and its AWQ export packs
along the output dimension.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
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


INT4_OFFSET = 8
_NIBBLES_A_WORD = 8


def pack_int4_words(packed: Tensor) -> Tensor:
    """Nibble bytes of INT4 codes (..., K/2), K a multiple of 8 -> int32 words (..., K/8).

    Column 8i is the lowest nibble of word i, and codes are stored plus 8 (uint4b8): the ``weight_packed`` of
    compressed-tensors' pack-quantized checkpoints.
    """
    if packed.shape[-1] % 4:
        raise ValueError(f"K={packed.shape[-1] * 2} is not a multiple of 8, the codes of an int32 word")
    # Two's complement to offset binary is one flipped sign bit a nibble; four bytes are one little-endian word.
    return (packed ^ 0x88).contiguous().view(torch.int32)


def unpack_int4_words(words: Tensor) -> Tensor:
    """Inverse of ``pack_int4_words``: int32 (..., K/8) -> nibble bytes uint8 (..., K/2)."""
    return words.contiguous().view(torch.uint8) ^ 0x88


SWIZZLE_ROWS, SWIZZLE_COLUMNS = 128, 4


def swizzle_128x4(scale: Tensor) -> Tensor:
    """Row-major block scales (N, G), one byte each -> the flat layout cuBLAS and CUTLASS read.

    Padded with zero bytes to (N', G'), multiples of 128 and 4; the byte of row r, column c goes to
    ((r / 128) * (G' / 4) + c / 4) * 512 + (r % 32) * 16 + ((r / 32) % 4) * 4 + c % 4. Any leading dimensions
    are swizzled one by one: (..., N, G) -> (..., N' * G'). Keeps the dtype.
    """
    n, g = scale.shape[-2:]
    rows, columns = -(-n // SWIZZLE_ROWS), -(-g // SWIZZLE_COLUMNS)
    padded = F.pad(scale.view(torch.uint8), (0, columns * SWIZZLE_COLUMNS - g, 0, rows * SWIZZLE_ROWS - n))
    tiles = padded.unflatten(-1, (columns, 4)).unflatten(-3, (rows, 4, 32))
    return _last_dims(tiles, (0, 3, 2, 1, 4)).flatten(-5).view(scale.dtype)


def unswizzle_128x4(swizzled: Tensor, n: int, g: int) -> Tensor:
    """Inverse of ``swizzle_128x4``: flat (..., N' * G') -> (..., n, g) without the padding."""
    rows, columns = -(-n // SWIZZLE_ROWS), -(-g // SWIZZLE_COLUMNS)
    tiles = swizzled.view(torch.uint8).unflatten(-1, (rows, columns, 32, 4, 4))
    padded = _last_dims(tiles, (0, 3, 2, 1, 4)).flatten(-2).flatten(-4, -2)
    return padded[..., :n, :g].contiguous().view(swizzled.dtype)


def _last_dims(x: Tensor, order: tuple[int, ...]) -> Tensor:
    """Permute the last ``len(order)`` dimensions, leave the others."""
    lead = x.dim() - len(order)
    return x.permute(*range(lead), *(lead + i for i in order))
