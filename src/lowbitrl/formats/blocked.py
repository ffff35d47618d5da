"""Formats with one scale level: a block of columns (or a row, or a tensor) shares one decode scale.

    scale = rule.scale_of(max |x| of the block)         what is stored
    code  = grid.encode(rule.scaled(x, scale, max |x|))
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

    scale_of(b) -> the stored scale of a block whose max |x| is b; scaled(x, scale, b) -> x in units of its
    scale, before rounding to the grid. Both work in fp32, or in the input's dtype when native (for rules named
    after a library that computes there). scale_value(stored) -> fp32, for scales stored as exponents.
    """

    scale_of: Callable[[Tensor], Tensor]
    scaled: Callable[[Tensor, Tensor, Tensor], Tensor]
    native: bool = False
    scale_value: Callable[[Tensor], Tensor] = Tensor.float


class Blocked(Format):
    """``group`` columns a scale; where group is None, one scale per "row" or per "tensor".

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
        shared = self._shared_amax(x, amax)
        if self.per == "tensor":
            (qdata,) = self._map(lambda *rows: (self._codes(*rows),), x, *shared)
            return qdata, self.rule.scale_of(shared[0]), None
        qdata, scale = self._map(self._encode_rows, x, *shared)
        return qdata, scale, None

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        return self._map(self._fake_rows(x.dtype), x, *self._shared_amax(x, amax))[0]

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * scale."""

        def rows(codes: Tensor, stored: Tensor) -> tuple[Tensor]:
            return (self._times_scale(self.grid.decode(codes), stored, dtype),)

        return map_rows(rows, q.qdata, q.scale, native=True)[0].view(q.shape)

    def _map(self, fn: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor) -> list[Tensor]:
        return map_rows(fn, x, *others, native=self.rule.native)

    def _shared_amax(self, x: Tensor, amax: Tensor | None) -> list[Tensor]:
        """What every row has to be told: nothing, when each measures its own."""
        if amax is None:
            if self.per == "row":
                return []
            amax = absmax(x)
        return [amax.to(x.dtype) if self.rule.native else amax]

    def _measure(self, x: Tensor, amax: Tensor | None) -> Tensor:
        """b of rows (R, K): (R, G), or () when it is the tensor's."""
        if self.per == "tensor" and amax is not None:
            return amax
        blocks = x.shape[1] // self.group if self.group else 1
        return block_absmax(x, blocks) if amax is None else amax.expand(x.shape[0], blocks)

    def _encode_rows(self, x: Tensor, amax: Tensor | None = None) -> tuple[Tensor, Tensor]:
        b = self._measure(x, amax)
        return self._codes(x, b), self.rule.scale_of(b)

    def _fake_rows(self, dtype: torch.dtype) -> Callable[..., tuple[Tensor]]:
        def fake(x: Tensor, amax: Tensor | None = None) -> tuple[Tensor]:
            b = self._measure(x, amax)
            return (self._times_scale(self.grid.round(self._scaled(x, b)), self.rule.scale_of(b), dtype),)

        return fake

    def _codes(self, x: Tensor, b: Tensor) -> Tensor:
        return self.grid.encode(self._scaled(x, b))

    def _scaled(self, x: Tensor, b: Tensor) -> Tensor:
        """Rows (R, K) in units of their scales, flat again and fp32."""
        scale = self.rule.scale_of(b)
        if b.dim() == 0:
            return self.rule.scaled(x, scale, b).float()
        return self.rule.scaled(_blocks(x, b), scale.unsqueeze(-1), b.unsqueeze(-1)).view(x.shape).float()

    def _times_scale(self, values: Tensor, stored: Tensor, dtype: torch.dtype) -> Tensor:
        scale = self.rule.scale_value(stored)
        if scale.dim() == 0:
            return (values * scale).to(dtype)
        return (_blocks(values, scale) * scale.unsqueeze(-1)).to(dtype).view(values.shape)


def _blocks(x: Tensor, per_block: Tensor) -> Tensor:
    """(R, K) -> (R, G, K/G) for the G of ``per_block`` (R, G)."""
    return x.view(*per_block.shape, x.shape[1] // max(1, per_block.shape[1]))


def block_absmax(x: Tensor, blocks: int) -> Tensor:
    """max |x| of each of ``blocks`` equal runs of columns: (R, K) -> (R, blocks); 0 for empty runs."""
    if x.numel() == 0:
        return x.new_zeros(x.shape[0], blocks)
    if blocks == 1:
        return x.abs().amax(-1, keepdim=True)
    # Max pooling is this reduction, four times faster on CPU than amax over so short a dimension.
    return F.max_pool1d(x.abs().unsqueeze(1), x.shape[1] // blocks).squeeze(1)
