"""The shape most surrogates share: a ratio clipped to one interval per sign of the advantage."""

from typing import NamedTuple

import torch
from torch import Tensor


class Surrogate(NamedTuple):
    """What a surrogate returns, before weights, masks and division.

    `loss` (B, T) or (B, 1) is minimized; `clipped`, same shape, marks where the bound acted (None: the
    surrogate has no hard bound).
    """

    loss: Tensor
    clipped: Tensor | None = None


def by_sign(advantages_B1: Tensor, positive: float, negative: float) -> Tensor:
    """`positive` where A >= 0 and `negative` where A < 0, (B, 1), in the dtype of the advantages."""
    return torch.where(advantages_B1 >= 0, torch.full_like(advantages_B1, positive), negative)


def band(
    ratio: Tensor, advantages_B1: Tensor, positive: tuple[float, float], negative: tuple[float, float]
) -> Surrogate:
    """loss = -clip(r, low, high) A, with (low, high) = `positive` where A >= 0 and `negative` where A < 0.

    Outside its interval a ratio has no gradient; on the ends it still has. PPO's pessimistic minimum is the
    special case of a one-sided interval a sign:
    min(r A, clip(r, 1-l, 1+h) A) = clip(r, 0, 1+h) A for A >= 0 and clip(r, 1-l, inf) A for A < 0.
    """
    low, high = (by_sign(advantages_B1, *ends) for ends in zip(positive, negative, strict=True))
    return Surrogate(-ratio.clamp(low, high) * advantages_B1, (ratio < low) | (ratio > high))


def ppo_clip(
    ratio: Tensor, advantages_B1: Tensor, clip_low: float, clip_high: float, dual_clip: float | None
) -> Surrogate:
    """PPO's clip with separate bounds, and the dual clip of Ye et al. 2020 where A < 0.

    min(r A, clip(r, 1-clip_low, 1+clip_high) A), and max(that, dual_clip A) for A < 0.
    Raises ValueError unless 0 <= clip_low <= 1, clip_high >= 0 and dual_clip > 1.
    """
    if not 0 <= clip_low <= 1:
        raise ValueError(f"clip_low={clip_low} is not in [0, 1]: it bounds the ratio below by 1 - clip_low")
    if clip_high < 0:
        raise ValueError(f"clip_high={clip_high} is negative: it bounds the ratio above by 1 + clip_high")
    if dual_clip is not None and dual_clip <= 1:
        raise ValueError(f"dual_clip={dual_clip} is not above 1: it bounds the ratio itself where A < 0")
    top = float("inf") if dual_clip is None else dual_clip
    return band(ratio, advantages_B1, positive=(0.0, 1 + clip_high), negative=(1 - clip_low, top))
