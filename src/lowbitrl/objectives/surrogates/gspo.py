"""GSPO: the response as the unit of the ratio and of the clip (Zheng et al. 2025)."""

from torch import Tensor

from lowbitrl.objectives.ratios import at_level, bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, ppo_clip


def gspo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 3e-4,
    clip_high: float = 4e-4,
    dual_clip: float | None = None,
    token_gradient: bool = False,
) -> Surrogate:
    """s = exp(mean_t(logprobs - old_logprobs)); maximize min(s A, clip(s, 1-clip_low, 1+clip_high) A).

    Eq. 5 and 7, with the bounds of the paper's section 5.1. `token_gradient` is GSPO-token (eq. 13, 14):
    s_t = sg[s] pi_t / sg[pi_t], the same value, each token's gradient through its own probability. A response
    has one advantage here, so both have one gradient until a correction weighs single tokens.
    `dual_clip` adds TBPO's upper bound for A < 0 as a baseline; the paper has none.
    """
    log_ratio_BT = logprobs_BT - old_logprobs_BT
    sequence = at_level(log_ratio_BT, mask_BT, "geometric")
    if token_gradient:
        sequence = sequence.detach() + (logprobs_BT - logprobs_BT.detach())
    return ppo_clip(bounded_exp(sequence), advantages_B1, clip_low, clip_high, dual_clip)
