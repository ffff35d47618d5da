"""``quantize_residual``: from activations to what the matrix product sees, both FP4 passes in one op.

    X~ = Q(X) - M Q(Q(X) - X),  M the channels of formats/residual.py

equal to ``compensate`` bit for bit, channels and ties included. No host synchronization. Launches on CUDA:

    scope "token", or every channel      1
    scope "batch", up to 256 tokens      2
    scope "batch", more tokens           4, X read twice
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lowbitrl.formats import Format, get_format
from lowbitrl.formats.residual import Scope, channel_count, compensate

from .backend import AUTO, REFERENCE, TRITON, choose
from .quantize import LONGEST_ROW, fake_quantize

# Formats whose first and second pass the kernels know.
TRITON_FORMATS = ("nvfp4-token", "nvfp4-token:vllm")


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
    candidates = {TRITON: _why_not_triton(x, fmt), REFERENCE: None}
    if choose("quantize_residual", backend, x.device, candidates) == REFERENCE:
        return compensate(x.detach(), fmt, fraction, scope, real)
    fmt.check_shape(x.shape)
    count = channel_count(x.shape[-1], fraction)
    return torch.ops.lowbitrl.quantize_residual(x.detach(), count, scope, real)


def _why_not_triton(x: Tensor, fmt: Format) -> str | None:
    if fmt.name not in TRITON_FORMATS:
        return f"the kernel repairs {', '.join(TRITON_FORMATS)}, not {fmt.name}"
    if x.dim() and x.shape[-1] > LONGEST_ROW:
        return f"K={x.shape[-1]} is longer than {LONGEST_ROW}, the row a program can hold"
    return None


@torch.library.custom_op("lowbitrl::quantize_residual", mutates_args=())
def _quantize_residual(x: Tensor, count: int, scope: str, real: Tensor | None) -> Tensor:
    from .residual_triton import launch_residual

    rows = x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
    rows = rows if rows.stride(-1) == 1 else rows.contiguous()
    marks = None if real is None else real.reshape(-1).contiguous().view(torch.uint8)
    return launch_residual(rows, count, scope, marks).view(x.shape)


@_quantize_residual.register_fake
def _(x: Tensor, count: int, scope: str, real: Tensor | None) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device=x.device)
