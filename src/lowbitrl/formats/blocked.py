"""Formats with one scale level: a block of columns (or a row, or a tensor) shares one decode scale.

    scale = rule.scale_of(max |x| of the block)         what is stored
    code  = grid.encode(rule.scaled(x, scale))
    value = grid.decode(code) * scale                   in fp32, then one rounding to the output dtype

A rule is where engines differ, a grid is where they agree. FP8, INT8, INT4 and MX are rules over this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .format import Format, QuantizedTensor, absmax, map_rows
from .grids import Grid


@dataclass(frozen=True)
class Rule:
    """The two steps on which engines differ.

    scale_of(amax) -> the stored scale; scaled(x, scale) -> x in units of its scale, before rounding to the
    grid. native=True hands both of them tensors of the input's dtype, for rules named after a library that
    computes there; otherwise fp32. scale_value(stored) -> fp32, for scales stored as exponents.
    """

    scale_of: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor], Tensor]
    native: bool = False
    scale_value: Callable[[Tensor], Tensor] = Tensor.float


class Blocked(Format):
    """``group`` columns a scale; ``per`` "row" or "tensor" where group is None.

    Scale: (..., K/group), (..., 1) per row, () per tensor.
    """

    def __init__(
        self, name: str, grid: Grid, rule: Rule, *, group: int | None = None, scale_bits: int = 0,
        per: Literal["row", "tensor"] = "row",
    ):  # fmt: skip
        self.name, self.grid, self.rule, self.group, self.per = name, grid, rule, group, per
        self.bits, self.multiple = grid.bits, group or grid.codes_per_byte
        self.scale_bits = scale_bits / group if group else 0.0
        self.is_batch_invariant = per == "row"

    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        if self.per == "tensor":
            scale = self.rule.scale_of(self._amax_of(x, amax))
            (qdata,) = self._map(lambda rows, s: (self._codes(rows, s),), x, scale)
            return qdata, scale, None
        qdata, scale = self._map(self._encode_rows, x, *_maybe(amax, x, self.rule.native))
        return qdata, scale, None

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        if self.per == "tensor":
            scale = self.rule.scale_of(self._amax_of(x, amax))
            return self._map(lambda rows, s: (self._round(rows, s, x.dtype),), x, scale)[0]
        return self._map(
            lambda rows, *a: (self._round(rows, self._scale(rows, *a), x.dtype),),
            x, *_maybe(amax, x, self.rule.native),
        )[0]  # fmt: skip

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * scale."""

        def rows(codes: Tensor, stored: Tensor) -> tuple[Tensor]:
            return (self._times_scale(self.grid.decode(codes), stored, dtype),)

        return map_rows(rows, q.qdata, q.scale, native=True)[0].view(q.shape)

    def _map(self, fn: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor) -> list[Tensor]:
        return map_rows(fn, x, *others, native=self.rule.native)

    def _amax_of(self, x: Tensor, amax: Tensor | None) -> Tensor:
        amax = absmax(x) if amax is None else amax
        return amax.to(x.dtype) if self.rule.native else amax

    def _scale(self, x: Tensor, amax: Tensor | None = None) -> Tensor:
        """Stored scales (R, G) of rows (R, K)."""
        blocks = x.shape[1] // self.group if self.group else 1
        return self.rule.scale_of(
            block_absmax(x, blocks) if amax is None else amax.expand(x.shape[0], blocks)
        )

    def _scaled(self, x: Tensor, scale: Tensor) -> Tensor:
        """Rows (R, K) in units of their scales, flat again and fp32."""
        if scale.dim() == 0:
            return self.rule.scaled(x, scale).float()
        blocks = x.view(*scale.shape, x.shape[1] // max(1, scale.shape[1]))
        return self.rule.scaled(blocks, scale.unsqueeze(-1)).view(x.shape).float()

    def _codes(self, x: Tensor, scale: Tensor) -> Tensor:
        return self.grid.encode(self._scaled(x, scale))

    def _encode_rows(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        scale = self._scale(x, amax)
        return self._codes(x, scale), scale

    def _round(self, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        return self._times_scale(self.grid.round(self._scaled(x, scale)), scale, dtype)

    def _times_scale(self, values: Tensor, stored: Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.rule.scale_value(stored)
        if scale.dim() == 0:
            return (values * scale).to(dtype)
        blocks = values.view(*scale.shape, values.shape[1] // max(1, scale.shape[1]))
        return (blocks * scale.unsqueeze(-1)).to(dtype).view(values.shape)


def _maybe(amax: Tensor | None, x: Tensor, native: bool) -> list[Tensor]:
    if amax is None:
        return []
    return [amax.to(x.dtype) if native else amax]


def block_absmax(x: Tensor, blocks: int) -> Tensor:
    """max |x| of each of ``blocks`` equal runs of columns: (R, K) -> (R, blocks); 0 for empty runs."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], blocks)
    if blocks == 1:
        return x.abs().amax(-1, keepdim=True)
    # Max pooling is this reduction, four times faster on CPU than amax over so short a dimension.
    return F.max_pool1d(x.abs().unsqueeze(1), x.shape[1] // blocks).squeeze(1)
