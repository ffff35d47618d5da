"""The second FP4 pass over the channels where the first one hurt most (QUADS eq. 20-24).

    D   = Q(X) - X                          error of the first pass            (eq. 20)
    s_j = ||D[:, j]||_2 over real tokens    score of channel j                 (eq. 23)
    S   = the k% channels with largest s_j  chosen anew in every forward pass  (eq. 24)
    X~  = Q(X) - M_S * Q(D)                 what the matrix product sees       (eq. 21)

Each pass is decoded in fp32, subtracted in fp32 and rounded once to the input's dtype. Padding
never counts in s_j: a dummy row would otherwise move the channels of every real request.
"""

from __future__ import annotations

import math
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from .format import Format

Scope = Literal["batch", "token"]

NAN_KEY = 0x7F800001
"""One above infinity's bits."""

RUN = 16
"""Rows whose squares are added one after the other; runs are then folded in halves."""


def channel_count(width: int, fraction: float) -> int:
    """How many of `width` channels a fraction selects (rounded up, so any fraction > 0 selects one)."""
    # 0.3 * 10 is 3.0000000000000004 in binary: without the rounding ceil would select a fourth channel.
    return min(width, math.ceil(round(width * fraction, 6)))


def channel_scores(error: Tensor, real: Tensor | None) -> Tensor:
    """Column L2 norms of a quantization error over real tokens.

    Args:
        error: (..., K) fp32.
        real: (...) bool, True for tokens that count; None means all.

    Returns:
        (K,) fp32.
    """
    rows = error.reshape(-1, error.shape[-1])
    if real is not None:
        # where, not a product: a padded row may hold anything, NaN included.
        rows = torch.where(real.reshape(-1, 1), rows, 0.0)
    return column_sums(rows.square()).sqrt()


def column_sums(rows: Tensor) -> Tensor:
    """Sum of fp32 rows (R, K) -> (K,), in an order that any device can follow.

    Sixteen rows at a time are added in order; the runs, padded with zeros to a power of two, are
    folded in halves: run i + run i + n/2. So a tie is a tie everywhere.
    """
    count = max(1, -(-rows.shape[0] // RUN))
    padded = F.pad(rows, (0, 0, 0, count * RUN - rows.shape[0])).view(count, RUN, rows.shape[1])
    runs = padded[:, 0].clone()
    for i in range(1, RUN):
        runs += padded[:, i]
    runs = F.pad(runs, (0, 0, 0, (1 << (count - 1).bit_length()) - count))
    while len(runs) > 1:
        low, high = runs.chunk(2)
        runs = low + high
    return runs[0]


def select_channels(scores: Tensor, count: int) -> Tensor:
    """Boolean mask of the `count` largest fp32 scores, none negative, along the last dim; the lower index wins a tie.

    NaN is more than any number and ties with itself: what a poisoned token does to the others is defined too.
    """
    # Bits of such numbers order as they do.
    keys = torch.where(scores.isnan(), NAN_KEY, scores.view(torch.int32))
    # By threshold: sorting every row took most of a "token" scope's time.
    least = keys.topk(count, dim=-1, sorted=False).values.amin(-1, keepdim=True)
    above, equal = keys > least, keys == least
    left = count - above.sum(-1, keepdim=True, dtype=torch.int32)
    return above | (equal & (equal.cumsum(-1, dtype=torch.int32) <= left))


def compensate(
    x: Tensor,
    activation: Format,
    fraction: float,
    scope: Scope = "batch",
    real: Tensor | None = None,
    *,
    amax: Tensor | None = None,
    repair: Format | None = None,
) -> Tensor:
    """X~ of QUADS eq. 21.

    Args:
        x: (..., K) activations, any float dtype.
        activation: the FP4 activation format of both passes; each pass has its own scales.
        amax: static maximum of the first pass; its own dynamic one if None.
        repair: format of the second pass where it is not the first's: under a static maximum the
            error still needs a dynamic one.
        fraction: share of channels repaired, 0..1; 0 is the plain quantizer.
        scope: "batch" scores columns over real tokens; "token" picks channels row by row, which
            makes a row independent of its batch.
        real: (...) bool mask of real tokens; None means all.

    Returns:
        (..., K) in x.dtype.
    """
    exact = x.float()
    first = activation.fake_quantize(exact, amax=amax, check=False)
    if not fraction:
        return first.to(x.dtype)
    error = first - exact
    second = (repair or activation).fake_quantize(error, check=False)
    count = channel_count(x.shape[-1], fraction)
    if count < x.shape[-1]:
        scores = channel_scores(error, real) if scope == "batch" else error.abs()
        second = torch.where(select_channels(scores, count), second, 0.0)
    return (first - second).to(x.dtype)
