"""INT4, symmetric, weights: two's complement nibbles, one decode scale per ``g`` columns. value = code * scale.

    rule                   scale                               code
    (ours)                 bf16(amax / 7.5)                    clamp(round(x / scale), -8, 7)
    :compressed-tensors    amax / 7.5 [dtype], eps for 0       clamp(round(x / scale [dtype]), -8, 7)
    :torchao               amax / 7.5 [dtype], tiny for 0      clamp(round(x * (1 / scale) [dtype]), -8, 7)
    :torchao-noclip        max(-min / 8, max / 7) [dtype]      as :torchao
    :modelopt              amax / 7                            clamp(round(x / scale), -8, 7)
    :modelopt-tensor       amax / 7 [dtype]                    clamp(round(x * (7 * (1/amax)) [dtype]), -8, 7)

[dtype] means computed, and for scales stored, in the input's dtype; the rest is fp32. amax / 7.5 uses all
sixteen codes (5% less error than / 7) but puts every group's largest element exactly on the tie 7.5, so that
x / s and x * (1 / s) already differ. Ties: to even. Zero groups: codes 0. Ours codes against the BF16-rounded
scale it stores, because that is what every reader multiplies by.

Matched byte for byte: compressed-tensors 0.20.1 (llm-compressor, GPTQ), torchao 0.18.0 (SYMMETRIC and
SYMMETRIC_NO_CLIPPING_ERR), ModelOpt 0.47.0 (AWQ export, and INT4QTensor). What would break it: dequantizing
with the unrounded scale; dividing in another dtype (0.1-0.6% of the codes).

``int4-g128:w4a8`` is what vLLM's CUTLASS W4A8 kernel multiplies with on Hopper: the same codes, group scales
re-encoded in FP8 under a channel scale. Use it to see the served weight; its bytes come from the checkpoint's
plain ones (``w4a8_scales``). Rows and columns must be multiples of 128.

Formats: int4-g128, -g64, -g32, -g16. Scale: (..., K/g).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocked import Blocked, Rule
from .format import QuantizedTensor, map_rows, register, row_absmax
from .fp8 import divide, divide_unless_zero, token_scale
from .grids import from_e4m3, int4_grid, quotient, to_e4m3

GROUPS = (128, 64, 32, 16)
FULL = 7.5


def our_scale(amax: Tensor) -> Tensor:
    """bf16(amax / 7.5)."""
    return quotient(amax, FULL).bfloat16()


def ct_scale(amax: Tensor) -> Tensor:
    """amax / 7.5, the dtype's eps for zeros."""
    scale = quotient(amax, FULL)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


def torchao_scale(amax: Tensor) -> Tensor:
    """max(amax / 7.5, the smallest normal fp32)."""
    return quotient(amax, FULL).clamp(min=torch.finfo(torch.float32).tiny)


def _noclip_scale(scale: Tensor) -> Tensor:
    return scale.clamp(min=torch.finfo(torch.float32).tiny)


def seventh(amax: Tensor) -> Tensor:
    """amax / 7."""
    return quotient(amax, 7.0)


def times_reciprocal(x: Tensor, scale: Tensor, b: Tensor) -> Tensor:
    """x * (1 / scale); codes are 0 where FP16 cannot hold the reciprocal."""
    return x * scale.reciprocal().nan_to_num(nan=float("nan"), posinf=0.0)


def times_seven_over_amax(x: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    """x * (7 * (1 / amax)), each step in x's dtype; codes of a zero group are 0."""
    return x * (amax.reciprocal() * 7.0).nan_to_num(nan=float("nan"), posinf=0.0)


class NoClip(Blocked):
    """Measures max(-min / 8, max / 7), the least scale that clips neither end, in place of max |x|."""

    def _measure(self, x: Tensor, amax: Tensor | None) -> Tensor:
        if amax is not None:
            return super()._measure(x, quotient(amax, 7.0))
        groups = x.unflatten(1, (x.shape[1] // self.multiple, self.multiple))
        low, high = groups.amin(-1).clamp(max=0.0), groups.amax(-1).clamp(min=0.0)
        return torch.maximum(-low / 8.0, quotient(high, 7.0))


def w4a8_scales(scale: Tensor) -> tuple[Tensor, Tensor]:
    """Group scales (..., G) -> (float8_e4m3fn group scales (..., G), fp32 channel scale (..., 1)).

    fp8 = e4m3(e4m3(scale / ch) / 8) and 8 * ch, with ch the per-token FP8 scale of the row of scales: vLLM
    0.33.0's conversion with its CUDA kernel's division. The 8 leaves room for code * fp8 in E4M3.
    """
    scale = scale.float()
    channel = token_scale(row_absmax(scale))
    once = from_e4m3(to_e4m3(scale / channel))
    return to_e4m3(once / 8.0), channel * 8.0


class W4A8(Blocked):
    """INT4 codes under FP8 group scales and an fp32 channel scale: value = code * (scale * global_scale)."""

    def check_shape(self, shape, name: str | None = None) -> None:
        """As every format's; the kernel's tiles need rows in multiples of 128 too."""
        super().check_shape(shape, name)
        rows = tuple(shape)[-2] if len(tuple(shape)) > 1 else 0
        if rows % 128:
            raise ValueError(
                f"{name or 'tensor'}: out_features={rows} is not a multiple of 128; use int4-g128"
            )

    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        qdata, scale, _ = super()._encode(x, amax)
        return qdata, *w4a8_scales(scale)

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        return self.decode(QuantizedTensor(*self._encode(x, amax), x.shape, self.name), x.dtype)

    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values code * (scale * global_scale)."""
        assert q.global_scale is not None

        def rows(codes: Tensor, scale: Tensor, channel: Tensor) -> tuple[Tensor]:
            return (self._times_scale(self.grid.decode(codes), from_e4m3(scale) * channel, dtype),)

        return map_rows(rows, q.qdata, q.scale, q.global_scale, native=True)[0].view(q.shape)


def w4a8(q: QuantizedTensor) -> QuantizedTensor:
    """An ``int4-g128`` tensor as the W4A8 kernel serves it: same codes, re-encoded scales."""
    fp8, channel = w4a8_scales(q.scale)
    return QuantizedTensor(q.qdata, fp8, channel, q.shape, "int4-g128:w4a8")


OURS = Rule(our_scale, lambda x, scale, b: divide_unless_zero(x, scale.float(), b))
RULES = {
    "": OURS,
    ":compressed-tensors": Rule(ct_scale, divide, native=True),
    ":torchao": Rule(torchao_scale, times_reciprocal, native=True),
    ":modelopt": Rule(seventh, divide_unless_zero),
    ":modelopt-tensor": Rule(seventh, times_seven_over_amax, native=True),
}

NOCLIP = Rule(_noclip_scale, times_reciprocal, native=True)

for _g in GROUPS:
    for _suffix, _rule in RULES.items():
        register(Blocked(f"int4-g{_g}{_suffix}", int4_grid(), _rule, group=_g, scale_bits=16))
    register(NoClip(f"int4-g{_g}:torchao-noclip", int4_grid(), NOCLIP, group=_g, scale_bits=16))
register(W4A8("int4-g128:w4a8", int4_grid(), OURS, group=128, scale_bits=8))
