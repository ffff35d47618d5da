"""What a number format is, and what quantizing with one returns.

A format maps a tensor to codes and scales and back:

    value = code * scale                        one scale level (FP8, INT, MX)
    value = code * (scale * global_scale)       two levels (NVFP4), products in fp32, in this order
    out   = round(value, dtype)                 one rounding, at the very end

Every stored scale *decodes*: multiplying by it gives values back. The inverse ("encode") scales that some
checkpoints store exist only as locals named ``encode``.

Blocks run along the last dimension. Leading dimensions are free: (K,), (N, K), (B, T, K), (E, N, K).
Arithmetic is fp32 whatever the input's dtype, except in rules named after a library that computes in the
input's dtype. Rows are streamed in chunks, so the extra memory does not grow with the tensor.
"""

from __future__ import annotations

import difflib
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

# 256 Ki fp32 values stay in a CPU core's cache; elsewhere a chunk only bounds memory.
_CHUNK_CPU, _CHUNK_ELSEWHERE = 1 << 18, 1 << 26

INPUT_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


@dataclass(frozen=True, eq=False)
class QuantizedTensor:
    """A tensor in a low-bit format: what is stored, shipped and decoded.

    qdata: uint8. 4-bit codes two a byte (low nibble = even column), shape (..., K/2); 8-bit codes one a byte,
        shape (..., K), holding the bits of ``float8_e4m3fn`` or two's complement int8.
    scale: decode scales, row-major, unswizzled; the format's module says their shape and dtype.
    global_scale: fp32 decode scale over the block scales, broadcastable to (..., 1); None if one-level.
    shape: shape of the tensor that was quantized. format: name that ``get_format`` knows.
    """

    qdata: Tensor
    scale: Tensor
    global_scale: Tensor | None
    shape: torch.Size
    format: str

    def dequantize(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """Values of shape ``shape``: fp32 products, then one rounding to ``dtype``."""
        return get_format(self.format).decode(self, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of codes and scales together."""
        return sum(t.numel() * t.element_size() for t in self.tensors().values())

    def tensors(self) -> dict[str, Tensor]:
        """The stored tensors by name: qdata, scale and, where there is one, global_scale."""
        named = {"qdata": self.qdata, "scale": self.scale, "global_scale": self.global_scale}
        return {name: t for name, t in named.items() if t is not None}

    @classmethod
    def from_tensors(
        cls, tensors: Mapping[str, Tensor], shape: Iterable[int], format: str
    ) -> QuantizedTensor:
        """Inverse of ``tensors()``; ValueError for an unknown format, KeyError for a missing tensor."""
        known = get_format(format).name
        size = torch.Size(shape)
        return cls(tensors["qdata"], tensors["scale"], tensors.get("global_scale"), size, known)

    def to(self, device: torch.device | str) -> QuantizedTensor:
        """The same bytes on another device."""
        moved = {name: t.to(device) for name, t in self.tensors().items()}
        return self.from_tensors(moved, self.shape, self.format)


class Format(ABC):
    """One number format with one scale rule. Stateless; ``get_format(name)`` returns the only instance.

    name: as ``get_format`` takes it. bits: stored bits of one code. group: elements of the last dimension
    that share a scale, None where a whole row or tensor does. is_batch_invariant: whether ``quantize(x)``
    without ``amax`` gives each row the bytes it would get alone; where it is False a batch-mate can change a
    row's codes, so such a format is for weights, or for activations with a static ``amax``.
    """

    name: str
    bits: int
    group: int | None = None
    multiple: int = 1
    """What the last dimension must be a multiple of."""
    is_batch_invariant: bool = False
    per: str = "row"
    """What the coarsest scale covers: "tensor" (fused weights must share it), "token" or "row"."""
    scale_bits: float = 0.0
    """Bits of block scale per element (row and tensor scales vanish in long rows and are not counted)."""

    @property
    def bits_per_element(self) -> float:
        """Code bits plus block-scale bits, per element of a long row."""
        return self.bits + self.scale_bits

    def quantize(
        self, x: Tensor, *, amax: Tensor | None = None, name: str | None = None, check: bool = True
    ) -> QuantizedTensor:
        """Codes and scales of ``x`` (..., K).

        amax: absolute maximum to scale by instead of x's own (a fused group's joint one, or a calibrated
        static one): scalar, or broadcastable over leading dimensions, (E, 1, 1) for an expert stack; values
        beyond it saturate. name: what errors call the tensor. check=False, for hot loops, skips the pass
        (on CUDA also a synchronization) that looks for NaN and Inf; they then decode to NaN.

        Raises ValueError for NaN or Inf, a shape the format cannot block, or a dtype that is not floating.
        """
        self._validate(x, amax, name, check)
        with torch.no_grad():
            qdata, scale, global_scale = self._encode(x, _as_fp32(amax))
        return QuantizedTensor(qdata, scale, global_scale, x.shape, self.name)

    def fake_quantize(
        self, x: Tensor, *, amax: Tensor | None = None, name: str | None = None, check: bool = True
    ) -> Tensor:
        """``quantize(x, ...).dequantize(x.dtype)`` bit for bit; the gradient passes through unchanged."""
        self._validate(x, amax, name, check)
        if torch.is_grad_enabled() and x.requires_grad:
            return _StraightThrough.apply(x, self, _as_fp32(amax))  # type: ignore[no-any-return]
        return self._fake(x, _as_fp32(amax))

    def check_shape(self, shape: Iterable[int], name: str | None = None) -> None:
        """Raise ValueError if a tensor of this shape cannot be blocked, with the remedy."""
        size = tuple(shape)
        where = f"{name}: " if name else ""
        if not size:
            raise ValueError(f"{where}a 0-dimensional tensor has no last dimension to quantize along")
        if size[-1] % self.multiple:
            raise ValueError(
                f"{where}in_features={size[-1]} is not a multiple of {self.multiple}, the block of "
                f"{self.name}; keep it in BF16 by excluding it in the recipe"
            )

    @abstractmethod
    def decode(self, q: QuantizedTensor, dtype: torch.dtype) -> Tensor:
        """Values of ``q`` in ``dtype``."""

    @abstractmethod
    def _encode(self, x: Tensor, amax: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
        """(qdata, scale, global_scale) of a validated tensor."""

    def _fake(self, x: Tensor, amax: Tensor | None) -> Tensor:
        return self.decode(QuantizedTensor(*self._encode(x, amax), x.shape, self.name), x.dtype)

    def _validate(self, x: Tensor, amax: Tensor | None, name: str | None, check: bool) -> None:
        if x.dtype not in INPUT_DTYPES:
            raise ValueError(f"{name or 'tensor'}: cannot quantize {x.dtype}; expected floating point")
        self.check_shape(x.shape, name)
        if check and not x.is_meta:
            _check_finite(x, name or "tensor", self.name)
            if amax is not None:
                _check_finite(amax, f"amax of {name or 'tensor'}", self.name)

    def __repr__(self) -> str:
        return f"<format {self.name}: {self.bits_per_element:g} bits per element>"


class _StraightThrough(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x: Tensor, format: Format, amax: Tensor | None) -> Tensor:
        return format._fake(x, amax)

    @staticmethod
    def backward(ctx, *grads: Tensor) -> tuple[Tensor, None, None]:
        return grads[0], None, None


def absmax(x: Tensor) -> Tensor:
    """fp32 scalar max |x|, 0 for an empty tensor; NaN propagates. One pass, no temporary."""
    if x.numel() == 0:
        return torch.zeros((), dtype=torch.float32, device=x.device)
    low, high = torch.aminmax(x.detach())
    # abs again: -low is -0 for a tensor of zeros, and would make the encode scale -inf.
    return torch.maximum(-low, high).abs().float()


def row_absmax(x: Tensor) -> Tensor:
    """max |x| over the last dimension, kept: (..., K) -> (..., 1); 0 where K is 0."""
    return x.abs().amax(-1, keepdim=True) if x.shape[-1] else x.new_zeros(*x.shape[:-1], 1)


def map_rows(
    fn: Callable[..., tuple[Tensor, ...]], x: Tensor, *others: Tensor, native: bool = False
) -> list[Tensor]:
    """``fn`` over chunks of rows; outputs concatenated, with x's leading dimensions back.

    fn((r, K) in fp32, *others) -> tensors with r rows each. ``others`` have x's leading dimensions (any
    width) or broadcast over them as (..., 1); scalars are handed on whole. native=True leaves x's dtype
    alone.
    """
    lead, width = x.shape[:-1], x.shape[-1]
    flat = x if x.dim() == 2 else x.reshape(math.prod(lead), width)
    per_row = [_per_row(t, lead) for t in others]
    budget = _CHUNK_CPU if x.device.type == "cpu" else _CHUNK_ELSEWHERE
    step = max(1, budget // max(1, width))
    if flat.shape[0] <= step:
        outputs = fn((flat if native else flat.float()).contiguous(), *per_row)
    else:
        pieces = []
        for start in range(0, flat.shape[0], step):
            part = slice(start, start + step)
            chunk = (flat[part] if native else flat[part].float()).contiguous()
            pieces.append(fn(chunk, *(t[part] if t.dim() else t for t in per_row)))
        outputs = [torch.cat(parts) for parts in zip(*pieces, strict=True)]
    return [out.view(*lead, *out.shape[1:]) if out.dim() and x.dim() != 2 else out for out in outputs]


def _per_row(t: Tensor, lead: torch.Size) -> Tensor:
    """A scalar as (); anything else as (rows, width)."""
    if t.shape[:-1] != lead:
        t = t.reshape(()) if t.numel() == 1 else t.expand(*lead, 1)
    return t.reshape(math.prod(lead), t.shape[-1]) if t.dim() else t


def _as_fp32(amax: Tensor | None) -> Tensor | None:
    return None if amax is None else amax.detach().float()


def _check_finite(x: Tensor, name: str, format: str) -> None:
    if not bool(torch.isfinite(absmax(x))):
        bad = int((~torch.isfinite(x)).sum())
        raise ValueError(
            f"{name} of shape {tuple(x.shape)} holds {bad} NaN or Inf values; {format} cannot represent them"
        )


_FORMATS: dict[str, Format] = {}
_ALIASES: dict[str, str] = {}


def register(*formats: Format) -> None:
    """Make formats known to ``get_format``; a name may be taken once."""
    for format in formats:
        if format.name in _FORMATS:
            raise ValueError(f"format {format.name!r} is registered twice")
        _FORMATS[format.name] = format


def alias(name: str, target: str) -> None:
    """Let ``get_format(name)`` return the format called ``target``."""
    _ALIASES[name] = target


def get_format(name: str) -> Format:
    """The format of that name ("nvfp4", "fp8-token", "int4-g128:compressed-tensors", ...).

    Raises ValueError naming the nearest known names for one it does not know.
    """
    found = _FORMATS.get(_ALIASES.get(name, name))
    if found is not None:
        return found
    near = difflib.get_close_matches(name, [*_FORMATS, *_ALIASES], n=4, cutoff=0.4) or sorted(_FORMATS)
    raise ValueError(f"unknown format {name!r}; nearest known: {', '.join(near)}")


def known_formats() -> list[str]:
    """Every format's own name, sorted; ``get_format`` takes some second names besides."""
    return sorted(_FORMATS)
