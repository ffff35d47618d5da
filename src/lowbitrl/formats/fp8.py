"""FP8 E4M3: one byte a code, fp32 decode scales.

    fp8-channel, fp8-token   scale = max(amax_row / 448, 1 / (448 * 512));  code = e4m3(x / scale)
    fp8-tensor               scale = max(amax / 448, 1 / (448 * 512));      code = e4m3(x / scale)
    value = code * scale

Ties: to even. Zero rows: the floor's scale, codes 0. Rows quieter than 1/512 are coded coarsely,
by that floor.

``fp8-token`` and ``fp8-channel`` match vLLM 0.33.0's CUDA per-token kernel and its online per-channel weights
byte for byte. What would break it: x * (1 / scale) for x / scale (4e-4 of the codes), amax / 448 in BF16
(80-100% of the scales).

Scale: fp32, (..., 1) per row, () per tensor. No global scale. A static ``amax`` replaces the dynamic one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from .format import Format, QuantizedTensor, absmax, map_rows, register, row_absmax
from .grids import E4M3_MAX, from_e4m3, to_e4m3

# vLLM's floor on dynamic per-token scales: a row this quiet would only amplify noise.
TOKEN_FLOOR = 1.0 / (E4M3_MAX * 512.0)


@dataclass(frozen=True)
class Rule:
    """scale_of(amax) -> decode scale; scaled(x, scale) -> x in units of its scale, before rounding."""

    scale_of: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor], Tensor]


def token_scale(amax: Tensor) -> Tensor:
    """max(amax / 448, 1 / (448 * 512))."""
    return (amax / E4M3_MAX).clamp_(min=TOKEN_FLOOR)


class Fp8Rows(Format):
    """FP8 with one scale a row ("row") or one a tensor ("tensor")."""

    bits = 8

    def __init__(self, name: str, rule: Rule, per: str = "row"):
        self.name, self.rule, self.per = name, rule, per
        self.is_batch_invariant = per == "row"

    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, None]:
        if self.per == "tensor":
            scale = self.rule.scale_of(absmax(x) if amax is None else amax)
            return map_rows(self._codes, x, scale)[0], scale, None
        qdata, scale = map_rows(self._encode_rows, x, *([] if amax is None else [amax]))
        return qdata, scale, None

    def _encode_rows(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale = self.rule.scale_of(row_absmax(x) if amax is None else amax.expand(x.shape[0], 1))
        return *self._codes(x, scale), scale

    def _codes(self, x: Tensor, scale: Tensor) -> tuple[Tensor]:
        return (to_e4m3(self.rule.scaled(x, scale)).view(torch.uint8),)

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * scale."""

        def rows(codes: Tensor, scale: Tensor) -> tuple[Tensor]:
            return ((from_e4m3(codes) * scale).to(dtype),)

        return map_rows(rows, q.qdata, q.scale, native=True)[0]


DIVIDE = Rule(token_scale, torch.div)

register(
    Fp8Rows("fp8-channel", DIVIDE),
    Fp8Rows("fp8-token", DIVIDE),
    Fp8Rows("fp8-tensor", DIVIDE, per="tensor"),
)
