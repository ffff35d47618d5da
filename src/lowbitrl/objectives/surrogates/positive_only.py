"""Positive-only GRPO: learn from what went well, ignore the rest (a baseline of QaRL's figure 8)."""

from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, ppo_clip


def positive_only(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
) -> Surrogate:
    """GRPO's term with max(A, 0). Negative responses have no gradient but stay in the denominator,

    so that the step size does not grow when few responses succeed. The paper does not say which it did.
    """
    ratio_BT = bounded_exp(logprobs_BT - old_logprobs_BT)
    return ppo_clip(ratio_BT, advantages_B1.clamp(min=0), clip_low, clip_high, None)
