"""Quantize-dequantize in one call, by format name, with a straight-through gradient."""

from __future__ import annotations

from torch import Tensor

from .format import get_format


def fake_quantize(
    x: Tensor, format: str, *, amax: Tensor | None = None, name: str | None = None, check: bool = True
) -> Tensor:
    """``get_format(format).fake_quantize(x, ...)``: same shape and dtype as x, dL/dx = dL/dout."""
    return get_format(format).fake_quantize(x, amax=amax, name=name, check=check)
