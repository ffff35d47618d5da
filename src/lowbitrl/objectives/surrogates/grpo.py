"""GRPO: PPO's token-level clip with a group baseline (Shao et al. 2024; QUADS eq. 1)."""

from torch import Tensor

from lowbitrl.objectives.ratios import bounded_exp
from lowbitrl.objectives.surrogates.band import Surrogate, ppo_clip


def grpo(
    logprobs_BT: Tensor,
    old_logprobs_BT: Tensor,
    advantages_B1: Tensor,
    mask_BT: Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.27,
    dual_clip: float | None = None,
) -> Surrogate:
    """r_t = exp(logprobs - old_logprobs); maximize min(r_t A, clip(r_t, 1-clip_low, 1+clip_high) A).

    QUADS eq. 1, by default with the asymmetric pair of its section 4.1 (0.27 above, 0.2 below).
    `dual_clip` = c bounds r_t above by c where A < 0 (Ye et al. 2020; QaRL's "dual-clip GRPO").
    """
    return ppo_clip(bounded_exp(logprobs_BT - old_logprobs_BT), advantages_B1, clip_low, clip_high, dual_clip)
