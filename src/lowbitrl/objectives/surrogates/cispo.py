"""CISPO: clip the weight, never the gradient (MiniMax-M1, Chen et al. 2025, eq. 4, 5)."""

from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate


def cispo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 1.0,
    clip_high: float = 4.0,
) -> Surrogate:
    """Maximize sg[clip(r_t, 1-clip_low, 1+clip_high)] A log pi_t: every token keeps a gradient.

    clip_low = 1 is no lower bound, as in the paper; it tunes the upper one without printing it, and 1 + 4 is
    the middle of the range 4 to 8 that ScaleRL reports as flat. `clipped` marks truncated weights.
    Raises ValueError unless 0 <= clip_low <= 1 and clip_high >= 0.
    """
    if not 0 <= clip_low <= 1 or clip_high < 0:
        raise ValueError(f"clip_low={clip_low} must be in [0, 1] and clip_high={clip_high} not negative")
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT).detach()
    weight_BT = ratio_BT.clamp(1 - clip_low, 1 + clip_high)
    return Surrogate(-weight_BT * advantages_B1 * logprobs_BT, weight_BT != ratio_BT)
