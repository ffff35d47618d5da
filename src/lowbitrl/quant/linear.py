"""Linear layers that wear a plan: one for the learner, one for the rollout, the same arithmetic.

Both classes are put on by class swap, so parameter names, ties and hooks of the model stay as
they were. Their shared parts are the weight group (which bytes) and the activation site (what
happens to the input); given the same bytes and input the two sides return the same bits.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lowbitrl.formats import QuantizedTensor
from lowbitrl.kernels.decode import decode
from lowbitrl.kernels.w4a16 import w4a16_matmul
from lowbitrl.kernels.w4a16_choice import measured_on, tokens_by_bytes
from lowbitrl.kernels.w8a8 import w8a8_matmul
from lowbitrl.kernels.weights4 import why_not_weight4
from lowbitrl.quant.groups import WeightGroup
from lowbitrl.quant.plan import LayerPlan
from lowbitrl.quant.sites import ActivationSite


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
