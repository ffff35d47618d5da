"""What happens to a layer's input: quantized once for all that read it, over the tokens that are real."""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbitrl.formats import Calibrator, QuantizedTensor, get_format
from lowbitrl.kernels.quantize import quantize
from lowbitrl.kernels.residual import quantize_residual
from lowbitrl.quant.recipe import STATIC, Scope
from lowbitrl.quant.residual import compensate

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator


class TokenContext:
    """Which tokens of the current forward pass are real; one object shared by a model's sites.

    Attributes:
        observing: static sites note the maxima of what they see. open: those leave their inputs as
            they are, for the pass that finds the first scales.
    """

    def __init__(self) -> None:
        self.real: Tensor | None = None
        self.observing = False
        self.open = False

    @contextmanager
    def real_tokens(self, mask: Tensor | None) -> Iterator[None]:
        """Set the (batch, length) mask for the forward passes inside; None means all are real."""
        previous, self.real = self.real, mask
        try:
            yield
        finally:
            self.real = previous

    @contextmanager
    def observation(self, open: bool = False) -> Iterator[None]:
        """Set `observing`, and `open` if asked for, for the forward passes inside."""
        previous = self.observing, self.open
        self.observing, self.open = True, open
        try:
            yield
        finally:
            self.observing, self.open = previous


class ActivationSite:
    """The input quantizer of a fused group: q, k and v see the same tensor, quantized once.

    Args:
        members: how many linears read the input; the result is dropped after the last of them.
        scale: holds the static maximum; None where every row measures its own.
        quantizes: False for a learner's site that only observes what the rollout's will quantize.
    """

    def __init__(
        self,
        format_name: str,
        residual: float,
        scope: Scope,
        tokens: TokenContext,
        members: int = 1,
        *,
        scale: Calibrator | None = None,
        quantizes: bool = True,
    ) -> None:
        self.format = get_format(format_name)
        self.repair = get_format(_DYNAMIC.get(format_name, format_name))
        self.scale = scale
        self.quantizes = quantizes
        self.residual = residual
        self.scope: Scope = scope
        self.tokens = tokens
        self.members = members
        self._memo: _Memo | None = None

    def __call__(self, x: Tensor) -> Tensor:
        """(..., K) -> (..., K): quantize-dequantize with a straight-through gradient.

        Raises:
            RuntimeError: a static site without a scale: no update or calibration has brought one.
        """
        quantized = self._once(x, lambda exact: self.quantized(exact, self._real(exact)))
        return x if quantized is None else straight_through(x, quantized)

    def codes(self, x: Tensor) -> QuantizedTensor:
        """The bytes whose values `__call__` gives; only where there is no residual and no static scale."""
        assert not self.residual
        assert self.scale is None
        return self._once(x, lambda exact: quantize(exact, self.format))

    def quantized(self, x: Tensor, real: Tensor | None) -> Tensor | None:
        """X~ of rows (..., K), observed on the way; None where the input stays as it is."""
        if self.scale is not None and self.tokens.observing:
            self.scale.observe(x, real)
        if not self.quantizes or (self.scale is not None and self.tokens.open):
            return None
        if self.scale is None:
            return quantize_residual(x, self.residual, format=self.format, scope=self.scope, real=real)
        amax = self.scale.amax
        return compensate(x, self.format, self.residual, self.scope, real, amax=amax, repair=self.repair)

    def _once(self, x: Tensor, quantize: Callable[[Tensor], Any]) -> Any:
        """`quantize(x)`, made for the first member that asks and dropped after the last."""
        memo = self._memo
        if memo is None or not memo.matches(x, self.tokens.real):
            with torch.no_grad():
                memo = _Memo(weakref.ref(x), _version(x), self.tokens.real, quantize(x))
        memo.uses += 1
        self._memo = memo if memo.uses < self.members else None
        return memo.quantized

    def _real(self, x: Tensor) -> Tensor | None:
        """The mask of real tokens, checked against x's (..., K); None means all are real."""
        real = self.tokens.real
        if real is not None and real.numel() != x[..., 0].numel():
            raise ValueError(
                f"real-token mask of shape {tuple(real.shape)} does not cover an input of shape "
                f"{tuple(x.shape)}: set it for every forward pass with real_tokens(model, mask)"
            )
        return real

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_memo": None}


_DYNAMIC = {static: dynamic for dynamic, static in STATIC.items()}


@dataclass
class _Memo:
    source: weakref.ref[Tensor]
    version: int
    real: Tensor | None
    quantized: Any
    uses: int = 0

    def matches(self, x: Tensor, real: Tensor | None) -> bool:
        return self.source() is x and self.version == _version(x) and self.real is real


def _version(x: Tensor) -> int:
    # Inference tensors keep no version counter, and cannot be written in place by autograd code.
    return -1 if x.is_inference() else x._version


def straight_through(x: Tensor, quantized: Tensor) -> Tensor:
    """`quantized`, with x's gradient where x has one."""
    return _StraightThrough.apply(x, quantized) if x.requires_grad else quantized


class _StraightThrough(torch.autograd.Function):
    """Forward: the quantized value. Backward: identity (QUADS eq. 13)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, quantized: Tensor) -> Tensor:
        return quantized.view_as(quantized)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return grads[0], None
