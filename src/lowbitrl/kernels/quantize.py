"""``quantize`` and ``fake_quantize`` of any format, by the fastest backend that gives the reference's bits.

    quantize(x, "nvfp4")              == get_format("nvfp4").quantize(x), byte for byte
    fake_quantize(x, "fp8-token")     == get_format("fp8-token").fake_quantize(x), bit for bit

No host synchronization, so CUDA graphs can capture both; NaN and Inf are not looked for and decode to NaN.
The Triton kernels read x once and write once. Only NVFP4 with one scale a tensor and no ``amax`` reads it
twice: once for the maximum, once, from the end, so that the cache still holds what was read last. For that, on
BF16, there is a CUDA kernel too: one launch, and what fits in shared memory is read once.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from lowbitrl.formats import Format, QuantizedTensor, get_format
from lowbitrl.formats.blocked import Blocked
from lowbitrl.formats.format import absmax as reference_absmax
from lowbitrl.formats.nvfp4 import Nvfp4

from .backend import AUTO, REFERENCE, TRITON, choose
from .cuda_library import CUDA
from .quantizer_choice import best_first, preferred
from .weight_cuda import launch_weight, why_not_weight

# A program holds a row in registers: 16 warps hold this many columns before they spill.
LONGEST_ROW = 1 << 15


@dataclass(frozen=True)
class Blocks:
    """How a one-level format looks to ``blocked_triton``: rule, grid, and where its scales lie."""

    rule: str
    grid: str
    group: int | None = None
    tiled: bool = False
    scale_dtype: torch.dtype = torch.float32


NVFP4_FLOORS = {"nvfp4": True, "nvfp4-tensor": False, "nvfp4-token": False, "nvfp4-token:vllm": False}
BLOCKS = {
    "fp8-token": Blocks("fp8-token", "e4m3"),
    "fp8-channel": Blocks("fp8-token", "e4m3"),
    "fp8-tensor": Blocks("fp8-token", "e4m3"),
    "fp8-1x128": Blocks("fp8-group", "e4m3", 128),
    "fp8-block": Blocks("fp8-tile", "e4m3", 128, tiled=True),
    "int8-token": Blocks("int8", "int8"),
    "int8-channel": Blocks("int8", "int8"),
    "mxfp4": Blocks("mxfp4", "e2m1", 32, scale_dtype=torch.uint8),
    "mxfp8": Blocks("mxfp8", "e4m3", 32, scale_dtype=torch.uint8),
} | {f"int4-g{g}": Blocks("int4", "int4", g, scale_dtype=torch.bfloat16) for g in (128, 64, 32, 16)}


def quantize(
    x: Tensor, format: str | Format, *, amax: Tensor | None = None, parts: int = 1, backend: str = AUTO
) -> QuantizedTensor:
    """Codes and scales of x (..., K), as ``Format.quantize(x, amax=amax, check=False)``.

    Args:
        parts: of an x (parts, N, K) under a format with one scale a tensor: each matrix has its own maximum.

    Raises:
        ValueError: K is not a multiple of the format's block; the backend can't run this.
    """
    fmt = get_format(format) if isinstance(format, str) else format
    chosen = quantizer_backend("quantize", x, fmt, amax, backend)
    if parts > 1 and chosen != CUDA and fmt.per == "tensor" and amax is None:
        amax = absmax(x, parts=parts, backend=chosen).view(-1, 1, 1)
    if chosen == REFERENCE:
        return fmt.quantize(x, amax=amax, check=False)
    fmt.check_shape(x.shape)
    qdata, scale, decode = torch.ops.lowbitrl.quantize(x.detach(), fmt.name, amax, parts, chosen)
    return QuantizedTensor(qdata, scale, decode if isinstance(fmt, Nvfp4) else None, x.shape, fmt.name)


def encode(
    x: Tensor, format: Format, *, amax: Tensor | None = None, parts: int = 1, name: str | None = None
) -> QuantizedTensor:
    """``quantize`` for weights: as ``Format.quantize``, with its look for NaN and Inf, which synchronizes.

    Args:
        amax: the maximum of a group that x belongs to; finite only if all of x is, so it is what is checked.
        parts: as ``quantize``'s.
        name: what errors call x.

    Raises:
        ValueError: NaN or Inf in x; a shape the format cannot block.
    """
    encoded, evidence = encode_unchecked(x, format, amax=amax, parts=parts, name=name)
    if evidence is not None and not bool(torch.isfinite(evidence).all()):
        return format.quantize(x, amax=amax, name=name)  # raises, naming x and counting what is not finite
    return encoded


def encode_unchecked(
    x: Tensor, format: Format, *, amax: Tensor | None = None, parts: int = 1, name: str | None = None
) -> tuple[QuantizedTensor, Tensor | None]:
    """As ``encode``, but NaN is still to be looked for, in ``evidence_of`` x; None where it has been."""
    if x.device.type != "cuda" or quantizer_backend("quantize", x, format, amax) == REFERENCE:
        if parts > 1 and format.per == "tensor" and amax is None:
            amax = absmax(x, parts=parts).view(-1, 1, 1)
        return format.quantize(x, amax=amax, name=name), None
    encoded = quantize(x, format, amax=amax, parts=parts)
    return encoded, evidence_of(x, encoded, amax)


def evidence_of(x: Tensor, encoded: QuantizedTensor, amax: Tensor | None = None) -> Tensor:
    """What is finite if and only if all of x is: maxima, or the scales made of them where those are floats."""
    scale = encoded.scale if encoded.global_scale is None else encoded.global_scale
    if amax is None and scale.dtype not in (torch.float32, torch.bfloat16):
        amax = absmax(x)
    return scale if amax is None else amax


def fake_quantize(
    x: Tensor, format: str | Format, *, amax: Tensor | None = None, backend: str = AUTO
) -> Tensor:
    """Values of ``quantize`` in x's dtype, no bytes written between; no gradient."""
    fmt = get_format(format) if isinstance(format, str) else format
    chosen = quantizer_backend("fake_quantize", x, fmt, amax, backend)
    if chosen == REFERENCE:
        return fmt.fake_quantize(x.detach(), amax=amax, check=False)
    fmt.check_shape(x.shape)
    return torch.ops.lowbitrl.fake_quantize(x.detach(), fmt.name, amax, chosen)


def absmax(x: Tensor, *, parts: int = 1, backend: str = AUTO) -> Tensor:
    """fp32 (parts,): max |x| of ``parts`` equal runs of a contiguous x (1: of the tensor); NaN wins."""
    if choose("absmax", backend, x.device, {TRITON: None, REFERENCE: None}) == REFERENCE:
        return torch.stack([reference_absmax(part) for part in x.reshape(parts, -1)])
    return torch.ops.lowbitrl.absmax(x.detach(), parts)


def why_not_triton(x: Tensor, fmt: Format) -> str | None:
    """Why the Triton kernels can't quantize x in this format, None if they can."""
    if fmt.name in NVFP4_FLOORS:
        whole_row = fmt.per == "token"
    elif fmt.name in BLOCKS:
        whole_row = BLOCKS[fmt.name].group is None
    else:
        return f"the rule of {fmt.name} has no kernel"
    if whole_row and x.dim() and x.shape[-1] > LONGEST_ROW:
        return f"K={x.shape[-1]} is longer than {LONGEST_ROW}, the row a program can hold"
    return None


def why_not_cuda(x: Tensor, fmt: Format, amax: Tensor | None) -> str | None:
    """Why the CUDA kernel can't quantize x in this format, None if it can."""
    if fmt.name not in NVFP4_FLOORS or fmt.per != "tensor" or amax is not None:
        return "it measures the maximum of NVFP4 weights with one scale a tensor, no other"
    return why_not_weight(x)


def quantizer_backend(
    op: str, x: Tensor, fmt: Format, amax: Tensor | None = None, backend: str = AUTO
) -> str:
    """What ``op``, "quantize" or "fake_quantize", runs; ValueError where ``backend`` can't."""
    width = x.shape[-1] if x.dim() else 1
    first = preferred(op, x.numel() // max(width, 1), width)
    candidates = {CUDA: why_not_cuda(x, fmt, amax), TRITON: why_not_triton(x, fmt), REFERENCE: None}
    return choose(op, backend, x.device, best_first(first, candidates))


@torch.library.custom_op("lowbitrl::quantize", mutates_args=())
def _quantize(
    x: Tensor, format: str, amax: Tensor | None, parts: int = 1, backend: str = TRITON
) -> tuple[Tensor, Tensor, Tensor]:
    if backend == CUDA:
        return _measured(x, format, parts)
    fmt, rows, amax = _prepare(x, format, amax)
    lead, none = x.shape[:-1], x.new_empty(0, dtype=torch.float32)
    if isinstance(fmt, Nvfp4):
        qdata, scale, decode = _nvfp4(rows, x, amax, fmt, encode=True)
        shared = fmt.rule.global_scales(amax)[1] if amax is not None else decode.view(*lead, 1)
        return qdata.view(*lead, *qdata.shape[1:]), _lines(scale.view(torch.float8_e4m3fn), x), shared
    assert isinstance(fmt, Blocked)
    qdata, scale = _blocked(rows, x, amax, fmt, encode=True)
    qdata = qdata.view(*lead, *qdata.shape[1:])
    if fmt.per == "tensor":
        assert amax is not None
        return qdata, fmt.rule.scale_of(amax), none
    return qdata, _lines(scale, x, BLOCKS[format].group if BLOCKS[format].tiled else None), none


def _lines(scale: Tensor, x: Tensor, tall: int | None = None) -> Tensor:
    """Scales (lines, S) with x's leading dimensions; where ``tall`` rows share a line, that many fewer."""
    down = x.shape[:-1] if tall is None else (*x.shape[:-2], -(-x.shape[-2] // tall))
    return scale.view(*down, scale.shape[1])


def _measured(x: Tensor, format: str, parts: int) -> tuple[Tensor, Tensor, Tensor]:
    fmt, lead = get_format(format), x.shape[:-1]
    assert isinstance(fmt, Nvfp4)
    codes, scales, peaks = launch_weight(x, parts, floor=NVFP4_FLOORS[format], encode=True)
    shared = fmt.rule.global_scales(peaks.view(-1, 1, 1) if parts > 1 else peaks.view(()))[1]
    return codes.view(*lead, -1), scales.view(torch.float8_e4m3fn).view(*lead, -1), shared


@torch.library.custom_op("lowbitrl::fake_quantize", mutates_args=())
def _fake_quantize(x: Tensor, format: str, amax: Tensor | None, backend: str = TRITON) -> Tensor:
    if backend == CUDA:
        return launch_weight(x, 1, floor=NVFP4_FLOORS[format], encode=False)[0]
    fmt, rows, amax = _prepare(x, format, amax)
    run = _nvfp4 if isinstance(fmt, Nvfp4) else _blocked
    return run(rows, x, amax, fmt, encode=False)[0].view(x.shape)  # type: ignore[operator]


@torch.library.custom_op("lowbitrl::absmax", mutates_args=())
def _absmax(x: Tensor, parts: int) -> Tensor:
    from .absmax_triton import launch_absmax

    return launch_absmax(x.contiguous(), parts)


@_quantize.register_fake
def _(
    x: Tensor, format: str, amax: Tensor | None, parts: int = 1, backend: str = TRITON
) -> tuple[Tensor, Tensor, Tensor]:
    if parts > 1 and amax is None:
        amax = x.new_empty(parts, 1, 1, dtype=torch.float32)
    q = get_format(format).quantize(x, amax=amax, check=False)
    return q.qdata, q.scale, x.new_empty(0, dtype=torch.float32) if q.global_scale is None else q.global_scale


@_fake_quantize.register_fake
def _(x: Tensor, format: str, amax: Tensor | None, backend: str = TRITON) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)


@_absmax.register_fake
def _(x: Tensor, parts: int) -> Tensor:
    return x.new_empty(parts, dtype=torch.float32)


def _prepare(x: Tensor, format: str, amax: Tensor | None) -> tuple[Format, Tensor, Tensor | None]:
    """The format; x as rows (R, K) with adjacent columns; fp32 amax, measured if one covers the tensor."""
    fmt = get_format(format)
    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    if amax is None and fmt.per == "tensor":
        from .absmax_triton import launch_absmax

        amax = launch_absmax(rows.contiguous()).view(())
    return fmt, rows, None if amax is None else amax.float()


def _spread(amax: Tensor | None, x: Tensor) -> Tensor | None:
    """amax as (G,), G a divisor of x's rows: one, one an expert, or one a row."""
    if amax is None or amax.numel() == 1:
        return None if amax is None else amax.reshape(1)
    if x.dim() == 3 and amax.shape == (x.shape[0], 1, 1):
        return amax.reshape(-1)
    return amax.expand(*x.shape[:-1], 1).reshape(-1)


def _nvfp4(
    rows: Tensor, x: Tensor, amax: Tensor | None, fmt: Nvfp4, *, encode: bool
) -> tuple[Tensor, Tensor, Tensor]:
    from .nvfp4_triton import launch_nvfp4

    return launch_nvfp4(
        rows, _spread(amax, x), floor=NVFP4_FLOORS[fmt.name], encode=encode, reverse=fmt.per == "tensor"
    )


def _blocked(
    rows: Tensor, x: Tensor, amax: Tensor | None, fmt: Blocked, *, encode: bool
) -> tuple[Tensor, Tensor]:
    from .blocked_triton import launch_blocked

    how = BLOCKS[fmt.name]
    return launch_blocked(
        rows, _spread(amax, x), rule=how.rule, grid=how.grid, group=how.group, tiled=how.tiled,
        encode=encode, scales=fmt.per != "tensor", scale_dtype=how.scale_dtype,
        parts=math.prod(x.shape[:-2]) if how.tiled else 1,
    )  # fmt: skip
