"""NVFP4: E2M1 codes, one E4M3 scale per 16 columns, one fp32 global scale.

Ours, b being a block's max |x| and amax the tensor's (or fused group's, or row's) max |x|:

    S      = 2688 / amax                         2688 = 448 * 6; S = 1 where amax is 0 or S overflows
    scale  = e4m3(clamp(S * (b * (1/6)), floor, 448)),  0 where b = 0;  floor = 2^-6 for weights, none else
    global = 1 / S
    code   = e2m1(x * (1 / (scale * global))),  0 where that reciprocal is infinite
    value  = code * (scale * global)

Ties: to the even code in both grids (see grids.py). Zero blocks: scale 0, codes 0, values +0.
The floor keeps block scales normal: some weight-only kernels flush subnormal E4M3 to zero, torchao raises
them to 2^-6; from 2^-6 up all readers agree. Activations are never read by others and have no floor.

Matches vLLM 0.33.0's CUDA kernel with exact reciprocals, and its emulation on CPU, byte for byte where no
floor applies. What would break it: b / 6 for b * (1/6), S / scale for 1 / (scale * (1/S)), or computing
amax or S in BF16. On paper nothing changes; on BF16 data up to 4% of the scale bytes do.
All divisions are IEEE (``quotient``): torch's ``2688 / amax`` is 2688 * (1 / amax), another last bit for a
quarter of all amax.

Formats: ``nvfp4`` weights, one amax a tensor. ``nvfp4-token`` activations, one amax a row: batch invariant.
``nvfp4-tensor`` activations, one amax a batch (or a static one through ``amax=``): not batch invariant.
Scale: float8_e4m3fn (..., K/16). Global scale: fp32, () or amax's shape, (..., 1) per token.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .blocked import block_absmax
from .format import Format, QuantizedTensor, absmax, map_rows, register, row_absmax
from .grids import (
    E2M1_MAX,
    E4M3_MAX,
    E4M3_MIN_NORMAL,
    from_e2m1_bytes,
    from_e4m3,
    quotient,
    round_e2m1,
    to_e4m3,
)
from .packing import pack_e2m1

BLOCK = 16
FULL_RANGE = E2M1_MAX * E4M3_MAX
SIXTH = 1.0 / 6.0
# nan_to_num would turn NaN into 0 by default; an unchecked NaN must stay visible in what is decoded.
NAN = float("nan")


@dataclass(frozen=True)
class Rule:
    """The three steps on which engines differ.

    global_scales(amax) -> (encode S, decode p); block_scale(b, S, p) -> E4M3; scaled(x, scale, S, p) -> x in
    units of its block's scale, before rounding to E2M1.
    Shapes: amax, S, p () or (R, 1); b, scale (R, K/16); x (R, K/16, 16). All fp32, but amax and b come in
    the input's dtype when native.
    """

    global_scales: Callable[[Tensor], tuple[Tensor, Tensor]]
    block_scale: Callable[[Tensor, Tensor, Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor]
    native: bool = False


def encode_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    """S = 2688 / amax and 1 / S, with S = 1 for a tensor too small to need or bear scaling."""
    encode = quotient(FULL_RANGE, amax).nan_to_num_(nan=NAN, posinf=1.0)
    return encode, encode.reciprocal()


def block_scale(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """e4m3(S * (b * (1/6))): 0 for zero blocks, subnormal scales kept."""
    return to_e4m3(encode * (b * SIXTH))


def block_scale_floored(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """As ``block_scale``, raised to 2^-6 except for zero blocks."""
    scale = (encode * (b * SIXTH)).clamp_(min=E4M3_MIN_NORMAL)
    return to_e4m3(torch.where(b > 0, scale, 0.0))


def scaled(x: Tensor, scale: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    """x * (1 / (scale * (1/S))). A zero or vanishing scale has an infinite reciprocal: its codes are 0."""
    return x * (scale * decode).reciprocal_().nan_to_num_(nan=NAN, posinf=0.0).unsqueeze(-1)


class Nvfp4(Format):
    """NVFP4 under one rule; ``per``, "tensor" or "token", shares a global scale when no amax is given."""

    bits, group, multiple, scale_bits = 4, BLOCK, BLOCK, 8 / BLOCK

    def __init__(self, name: str, rule: Rule, per: str = "tensor"):
        self.name, self.rule, self.per = name, rule, per
        self.is_batch_invariant = per == "token"

    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if amax is None and self.per == "token":
            qdata, scale, decode = self._map(self._encode_rows, x)
            return qdata, scale, decode
        amax = self._amax_of(x, amax)
        qdata, scale = self._map(lambda *rows: self._encode_rows(*rows)[:2], x, amax)
        return qdata, scale, self.rule.global_scales(amax)[1]

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        dynamic = amax is None and self.per == "token"
        shared = [] if dynamic else [self._amax_of(x, amax)]
        return self._map(lambda *rows: (self._fake_rows(x.dtype, *rows),), x, *shared)[0]

    def _map(self, fn: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor) -> list[Tensor]:
        return map_rows(fn, x, *others, native=self.rule.native)

    def _amax_of(self, x: Tensor, amax: Tensor | None) -> Tensor:
        amax = absmax(x) if amax is None else amax
        return amax.to(x.dtype) if self.rule.native else amax

    def _encode_rows(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor, Tensor]:
        values, scale, decode = self._round(x, amax)
        return pack_e2m1(values).flatten(1), scale, decode

    def _fake_rows(self, dtype: torch.dtype, x: Tensor, amax: Tensor | None = None) -> Tensor:
        values, scale, decode = self._round(x, amax)
        return _apply_scales(values, from_e4m3(scale), decode, dtype).view(x.shape)

    def _round(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor]:
        """Rows (R, K) -> E2M1 values (R, K/16, 16), E4M3 scales (R, K/16), decode global () or (R, 1)."""
        b = block_absmax(x, x.shape[1] // BLOCK)
        encode, decode = self.rule.global_scales(row_absmax(b) if amax is None else amax)
        scale = self.rule.block_scale(b, encode, decode)
        blocks = x.view(*b.shape, BLOCK).float()
        return round_e2m1(self.rule.scaled(blocks, from_e4m3(scale), encode, decode)), scale, decode

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * (scale * global_scale)."""
        assert q.global_scale is not None

        def rows(qdata: Tensor, scale: Tensor, decode: Tensor) -> tuple[Tensor]:
            values = from_e2m1_bytes(qdata).view(*scale.shape, BLOCK)
            return (_apply_scales(values, from_e4m3(scale), decode, dtype).flatten(1),)

        return map_rows(rows, q.qdata, q.scale, q.global_scale, native=True)[0].view(q.shape)


def _apply_scales(values: Tensor, scale: Tensor, decode: Tensor, dtype: torch.dtype) -> Tensor:
    # In place: the values are this module's own, and a fresh buffer costs more than the product.
    return values.mul_((scale * decode).unsqueeze(-1)).to(dtype)


OURS = Rule(encode_global, block_scale, scaled)
OURS_WEIGHTS = Rule(encode_global, block_scale_floored, scaled)

register(
    Nvfp4("nvfp4", OURS_WEIGHTS),
    Nvfp4("nvfp4-token", OURS, per="token"),
    Nvfp4("nvfp4-tensor", OURS),
)
