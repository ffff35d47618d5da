"""``quantize_residual``: from activations to what the matrix product sees, both FP4 passes in one op.

    X~ = Q(X) - M Q(Q(X) - X),  M the channels of formats/residual.py

equal to ``compensate`` bit for bit, channels and ties included. No host synchronization. Launches on CUDA, by
"cuda" (BF16 rows, sm90, needs nvcc) and by "triton"; a measured table says which is faster where:

    scope "token", or every channel      1
    scope "batch", up to 256 tokens      2
    scope "batch", more tokens           3 and 4, X read twice; "cuda" only by name (its 3 are not measured yet)
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbitrl.formats import Format, get_format
from lowbitrl.formats.residual import Scope, channel_count, compensate

from .backend import AUTO, REFERENCE, TRITON, choose
from .cuda_library import CUDA
from .quantize import LONGEST_ROW, fake_quantize
from .quantizer_choice import best_first, preferred
from .residual_cuda import DECODE_TOKENS, why_not_rows

# Formats whose first and second pass the kernels know.
KERNEL_FORMATS = ("nvfp4-token", "nvfp4-token:vllm")


def quantize_residual(
    x: Tensor, fraction: float, *, format: str | Format = "nvfp4-token", scope: Scope = "batch",
    real: Tensor | None = None, backend: str = AUTO,
) -> Tensor:  # fmt: skip
    """X~ (..., K) of x in x's dtype, as ``compensate(x, format, fraction, scope, real)``; no gradient.

    Args:
        x: (..., K), K a multiple of the format's block.
        fraction: share of channels repaired, 0..1; 0 is ``fake_quantize``.
        scope: "batch" scores channels over all real tokens, "token" for each token alone.
        real: (...) bool, which tokens count for the scores; None: all.

    Raises:
        ValueError: K is not a multiple of the block; the backend can't run this.
    """
    fmt = get_format(format) if isinstance(format, str) else format
    if not fraction:
        return fake_quantize(x, fmt, backend=backend)
    chosen = residual_backend(x, fraction, format=fmt, scope=scope, backend=backend)
    if chosen == REFERENCE:
        return compensate(x.detach(), fmt, fraction, scope, real)
    fmt.check_shape(x.shape)
    count = channel_count(x.shape[-1], fraction)
    return torch.ops.lowbitrl.quantize_residual(x.detach(), count, scope, real, chosen)


def residual_backend(
    x: Tensor, fraction: float, *, format: Format, scope: Scope = "batch", backend: str = AUTO
) -> str:
    """What ``quantize_residual`` runs for a fraction over 0; ValueError where ``backend`` can't."""
    rule, width = _why_not_format(format), x.shape[-1] if x.dim() else 1
    rows = x.numel() // max(width, 1)
    first = preferred(table_name(rows, width, fraction, scope), rows, width)
    candidates = {CUDA: rule or why_not_rows(x), TRITON: rule or _why_not_triton(x), REFERENCE: None}
    return choose("quantize_residual", backend, x.device, best_first(first, candidates))


def table_name(rows: int, width: int, fraction: float, scope: Scope) -> str:
    """What the table of measured backends calls the op: by which kernels run, not by its arguments."""
    if channel_count(width, fraction) == width:
        return "residual all"
    return "residual long" if scope == "batch" and rows > DECODE_TOKENS else f"residual {scope}"


def _why_not_format(fmt: Format) -> str | None:
    known = fmt.name in KERNEL_FORMATS
    return None if known else f"the kernels repair {', '.join(KERNEL_FORMATS)}, not {fmt.name}"


def _why_not_triton(x: Tensor) -> str | None:
    if x.dim() and x.shape[-1] > LONGEST_ROW:
        return f"K={x.shape[-1]} is longer than {LONGEST_ROW}, the row a program can hold"
    return None


@torch.library.custom_op("lowbitrl::quantize_residual", mutates_args=())
def _quantize_residual(x: Tensor, count: int, scope: str, real: Tensor | None, backend: str) -> Tensor:
    if backend == CUDA:
        from .residual_cuda import launch_residual
    else:
        from .residual_triton import launch_residual

    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    marks = None if real is None else real.reshape(-1).contiguous().view(torch.uint8)
    return launch_residual(rows, count, scope, marks).view(x.shape)


@_quantize_residual.register_fake
def _(x: Tensor, count: int, scope: str, real: Tensor | None, backend: str) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
