"""Dr.GRPO: GRPO without its two biases (Liu et al. 2025, "Understanding R1-Zero-Like Training")."""

from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, ppo_clip


def dr_grpo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    dual_clip: float | None = None,
) -> Surrogate:
    """GRPO's term summed over tokens and averaged over responses: no 1/|o_i|.

    The other half is in the advantages: `group_advantages(..., scale="none")`. For the paper's code, which
    divides by a constant length, use aggregate="seq-mean-token-sum-norm" with max_tokens.
    """
    return ppo_clip(bounded_exp(logprobs_BT - old_logprobs_BT), advantages_B1, clip_low, clip_high, dual_clip)
