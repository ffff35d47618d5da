"""Linear layers that wear a plan: one for the learner, one for the rollout, the same arithmetic.

Both classes are put on by class swap, so parameter names, ties and hooks of the model stay as
they were. Their shared parts are the weight group (which bytes) and the activation site (what
happens to the input); given the same bytes and input the two sides return the same bits.
"""

from __future__ import annotations

import weakref
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbitrl.formats import Calibrator, Format, QuantizedTensor, get_format
from lowbitrl.kernels.decode import decode
from lowbitrl.kernels.quantize import absmax, encode_unchecked, quantize
from lowbitrl.kernels.residual import quantize_residual
from lowbitrl.kernels.w4a16 import w4a16_matmul
from lowbitrl.kernels.w4a16_choice import measured_on, tokens_by_bytes
from lowbitrl.kernels.w8a8 import w8a8_matmul
from lowbitrl.kernels.weights4 import why_not_weight4
from lowbitrl.quant.plan import LayerPlan
from lowbitrl.quant.recipe import STATIC, Scope
from lowbitrl.quant.residual import compensate
from lowbitrl.quant.shards import whole

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence


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


class WeightGroup:
    """Linears that share one global scale, and the bytes of their current weights.

    The bytes are cached against the weights' version counters, so they are made once per
    optimizer step however many micro-batches run, and never outlive an in-place update.
    Writes through `.data` bypass those counters: call `invalidate` after them. So do the gathers of
    a sharded learner, whose bytes live until they are invalidated.

    Attributes:
        device: where the full weights of a sharded learner are gathered; None: it is not sharded.
        keeps: hold the bytes of a sharded learner until they are invalidated, or make them anew in every pass.
    """

    device: torch.device | None = None
    keeps: bool = True

    def __init__(self, layers: Sequence[LayerPlan], modules: Sequence[nn.Linear]) -> None:
        assert layers[0].weight is not None
        self.names = tuple(layer.name for layer in layers)
        self.parameters = tuple(layer.parameter for layer in layers)
        self.format = get_format(layers[0].weight)
        self.dtype = modules[0].weight.dtype
        self._modules = tuple(modules)
        self._bytes: dict[str, QuantizedTensor] = {}
        self._key: tuple[Any, ...] = ()

    def encoded(self) -> dict[str, QuantizedTensor]:
        """Bytes of each member by module name, encoded anew only if a weight has changed."""
        if self._stale():
            if not self.keeps:
                return encode_group(self.weights(), self.format)
            refresh([self])
        return self._bytes

    def weights(self) -> dict[str, Tensor]:
        """Full weights (N_i, K) by module name, in the compute dtype."""
        pairs = zip(self.names, self._modules, strict=True)
        return {n: whole(m.weight, self.dtype, self.device) for n, m in pairs}

    def adopt(self, encoded: dict[str, QuantizedTensor]) -> None:
        """Hold these as the bytes of the weights as they are."""
        self._bytes, self._key = encoded, self._version()

    def _stale(self) -> bool:
        return self._version() != self._key

    def _version(self) -> tuple[Any, ...]:
        return version_key([m.weight for m in self._modules], self.device)

    def invalidate(self) -> None:
        """Let the cached bytes go."""
        self._bytes, self._key = {}, ()


def version_key(weights: Sequence[Tensor], sharded: object) -> tuple[Any, ...]:
    """What changes when an unsharded weight does; of a sharded one it only differs from no key at all."""
    return ("sharded",) if sharded else tuple((id(w), w._version, w.dtype) for w in weights)


def refresh(groups: Sequence[WeightGroup]) -> None:
    """Encode the groups whose weights have changed, with one look for NaN at all of them.

    A look is a wait for the device: one a weight would leave a GPU idle hundreds of times a step.

    Raises:
        ValueError: NaN or Inf in a weight, naming it.
    """
    changed = [group for group in groups if group._stale()]
    looks = []
    for group in changed:
        encoded, evidence = _encode_unchecked(group.weights(), group.format)
        group.adopt(encoded)
        looks += evidence
    if not _all_finite(looks):
        for group in changed:
            group.invalidate()
        for group in changed:
            encode_group(group.weights(), group.format)  # raises at the first that is not finite


def encode_group(weights: dict[str, Tensor], fmt: Format) -> dict[str, QuantizedTensor]:
    """Quantize a fused group; a format with a scale per tensor takes one joint absmax.

    Args:
        weights: (N_i, K) by module name, in the compute dtype.

    Raises:
        ValueError: NaN or Inf in a weight, naming it.
    """
    encoded, looks = _encode_unchecked(weights, fmt)
    if not _all_finite(looks):
        raise _not_finite(weights)
    return encoded


def _all_finite(looks: list[Tensor]) -> bool:
    """One look at all of them, whatever their shapes: every launch for each would cost a publication milliseconds."""
    return not looks or bool(torch.isfinite(torch.cat([t.reshape(-1).float() for t in looks])).all())


def _not_finite(weights: dict[str, Tensor]) -> ValueError:
    broken = next(name for name, weight in weights.items() if not bool(torch.isfinite(weight).all()))
    return ValueError(f"{broken}.weight holds NaN or Inf; resume from the last good checkpoint")


def _encode_unchecked(
    weights: dict[str, Tensor], fmt: Format
) -> tuple[dict[str, QuantizedTensor], list[Tensor]]:
    """Bytes by module name, and what is still to be looked at: tensors that are finite where weights are."""
    joint = None
    if len(weights) > 1 and fmt.per == "tensor":
        joint = torch.stack([absmax(weight).view(()) for weight in weights.values()]).amax()
        if not joint.is_cuda and not torch.isfinite(joint):
            raise _not_finite(weights)
    pairs = {n: encode_unchecked(w, fmt, amax=joint, name=f"{n}.weight") for n, w in weights.items()}
    looks = [evidence for _, evidence in pairs.values() if evidence is not None]
    return {name: encoded for name, (encoded, _) in pairs.items()}, looks


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


class _AlignedLinear(torch.autograd.Function):
    """y = x W^^T; dL/dx = dL/dy W^ with the quantized weight, dL/dW := dL/dW^ (QUADS eq. 12-13).

    Backward decodes the bytes again instead of keeping a weight-sized copy per layer.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, bytes_: QuantizedTensor) -> Tensor:
        ctx.save_for_backward(x, *bytes_.tensors().values())
        ctx.bytes_ = (tuple(bytes_.tensors()), bytes_.shape, bytes_.format)
        # The bias goes into the product: added after it, a BF16 output would be rounded twice.
        return F.linear(x, decode(bytes_, x.dtype), bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None]:
        grad = grads[0]
        x, *parts = ctx.saved_tensors
        names, shape, fmt = ctx.bytes_
        grad_x = grad_w = None
        grad_bias = grad.flatten(0, -2).sum(0) if ctx.needs_input_grad[2] else None
        if ctx.needs_input_grad[0]:
            weight = QuantizedTensor.from_tensors(dict(zip(names, parts, strict=True)), shape, fmt)
            grad_x = grad @ decode(weight, grad.dtype)
        if ctx.needs_input_grad[1]:
            grad_w = grad.flatten(0, -2).T @ x.flatten(0, -2)
        return grad_x, grad_w, grad_bias, None


class _AlignedCodes(torch.autograd.Function):
    """y = x^ W^^T from the 8-bit codes of both; gradients as `_AlignedLinear`'s, with decoded values, in BF16.

    What is kept for backward are the codes: half of BF16 activations.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        codes: QuantizedTensor,
        bytes_: QuantizedTensor,
    ) -> Tensor:
        ctx.codes, ctx.bytes_ = codes, bytes_
        return w8a8_matmul(codes, bytes_, bias=bias)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None, None, None]:
        grad, needed = grads[0], ctx.needs_input_grad
        grad_x = grad @ decode(ctx.bytes_, grad.dtype) if needed[0] else None
        x = ctx.codes.dequantize(grad.dtype).flatten(0, -2) if needed[1] else None
        grad_w = grad.flatten(0, -2).T @ x if x is not None else None
        grad_bias = grad.flatten(0, -2).sum(0) if needed[2] else None
        return grad_x, grad_w, grad_bias, None, None


CODE_PAIRS = {("fp8-token", "fp8-channel"), ("int8-token", "int8-channel")}
"""Formats of activations and weights whose codes are multiplied as they are."""

CODES_CHECKED_ON: str | None = None
"""The GPU that products of codes have been compared on; None: not yet, and decoded values are multiplied."""


def multiplies_codes(x: Tensor, site: ActivationSite | None, bytes_: QuantizedTensor | None) -> bool:
    """Whether 8-bit codes of both sides are multiplied as they are: BF16 work on a GPU, a scale a row."""
    if (
        site is None
        or bytes_ is None
        or not x.is_cuda
        or x.dtype != torch.bfloat16
        or CODES_CHECKED_ON is None
    ):
        return False
    return site.scale is None and site.quantizes and (site.format.name, bytes_.format) in CODE_PAIRS


class LearnerLinear(nn.Linear):
    """A trainable linear whose forward uses the published bytes of its weight.

    The parameter stays the optimizer's: in the compute dtype, named `weight`, straight-through.
    """

    plan: LayerPlan
    group: WeightGroup | None
    site: ActivationSite | None

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        bytes_ = self.group.encoded()[self.plan.name] if self.group is not None else None
        if multiplies_codes(input, self.site, bytes_):
            assert self.site is not None
            return _AlignedCodes.apply(input, self.weight, self.bias, self.site.codes(input), bytes_)
        x = self.site(input) if self.site is not None else input
        if bytes_ is None:
            return F.linear(x, self.weight, self.bias)
        return _AlignedLinear.apply(x, self.weight, self.bias, bytes_)


class RolloutLinear(nn.Linear):
    """A frozen linear that holds bytes and multiplies by their values.

    `encoded` is what was published: by reference on a CPU, in storage of its own on CUDA, where
    captured graphs hold its address. `weight` is its decoded value in the compute dtype, which the
    learner multiplies by too: the same bits on the same input. With `low_bit`, products of a few
    tokens on CUDA read 4-bit bytes instead (`kernels.w4a16_matmul`), which rounds elsewhere.
    """

    plan: LayerPlan
    site: ActivationSite | None
    encoded: QuantizedTensor | None
    low_bit: bool

    def adopt(self, encoded: QuantizedTensor) -> None:
        """Serve these bytes from now on; bytes and decoded weight keep their addresses on CUDA."""
        self.encoded = in_place(self.encoded, encoded)
        self.weight.data.copy_(decode(encoded, self.weight.dtype))

    def forward(self, input: Tensor) -> Tensor:
        """(..., K) -> (..., N)."""
        if multiplies_codes(input, self.site, self.encoded):
            assert self.site is not None
            assert self.encoded is not None
            return w8a8_matmul(self.site.codes(input), self.encoded, bias=self.bias)
        x = self.site(input) if self.site is not None else input
        if self.low_bit and self.encoded is not None and multiplies_bytes(x, self.encoded):
            return w4a16_matmul(x, self.encoded, bias=self.bias)
        return F.linear(x, self.weight, self.bias)


def multiplies_bytes(x: Tensor, encoded: QuantizedTensor) -> bool:
    """Whether a product of x (..., K) should read 4-bit bytes: few BF16 tokens on a GPU, measured to be faster."""
    if not x.is_cuda or x.dtype != torch.bfloat16 or measured_on() is None or why_not_weight4(encoded):
        return False
    return x[..., 0].numel() <= most_tokens(encoded)


def most_tokens(encoded: QuantizedTensor) -> int:
    """Tokens of a pass up to which reading these 4-bit bytes was measured to be faster than decoded weights."""
    return tokens_by_bytes(encoded.global_scale is not None, *encoded.shape)


def in_place(held: QuantizedTensor | None, encoded: QuantizedTensor) -> QuantizedTensor:
    """The new bytes at the addresses of those held; on a CPU, or where the layout differs, a new holder."""
    if not encoded.qdata.is_cuda:
        return encoded
    new, old = encoded.tensors(), {} if held is None else held.tensors()
    if {n: (t.shape, t.dtype) for n, t in new.items()} != {n: (t.shape, t.dtype) for n, t in old.items()}:
        copies = {n: t.clone(memory_format=torch.contiguous_format) for n, t in new.items()}
        return QuantizedTensor.from_tensors(copies, encoded.shape, encoded.format)
    for name, tensor in new.items():
        old[name].copy_(tensor)
    assert held is not None
    return held
