"""DAPO: clip-higher and the token-level mean (Yu et al. 2025, eq. 8)."""

from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, ppo_clip


def dapo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.28,
    dual_clip: float | None = None,
) -> Surrogate:
    """GRPO's term with the paper's 0.2 / 0.28, averaged over all tokens of the batch (its aggregate).

    Its other parts live elsewhere: dynamic sampling drops the groups that `group_advantages` calls
    uninformative, and the length penalty is `soft_overlong_penalty`.
    """
    return ppo_clip(bounded_exp(logprobs_BT - old_logprobs_BT), advantages_B1, clip_low, clip_high, dual_clip)
