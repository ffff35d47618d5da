"""Probability ratios between two policies on the same sampled tokens, at three levels.

For one response of length L with per-token differences d_t = log pi_a(o_t) - log pi_b(o_t):

    token      r_t = exp(d_t)                    one ratio a token
    sequence   r   = exp(sum_t d_t)              the exact ratio of the response, spread grows with L
    geometric  r   = exp(mean_t d_t)             GSPO eq. 7, QaRL section 3.2: comparable across lengths

The per-response levels have shape (B, 1) and broadcast over tokens. Letters: B responses, T tokens.
"""

import torch
from torch import Tensor

LEVELS = ("token", "sequence", "geometric")

# exp(20) = 4.9e8: far outside any useful ratio, and its square still fits in float32, so that no
# product of ratio, weight and advantage can turn an overflow into inf - inf or 0 * inf.
LOG_RATIO_LIMIT = 20.0


def zero_outside(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """`values_BT` where the mask holds and exactly 0 elsewhere, whatever stands there (NaN, inf).

    The gradient outside the mask is exactly 0 as well, which multiplication by the mask would not give.
    """
    return torch.where(mask_BT, values_BT, torch.zeros_like(values_BT))


def log_ratio_of(numerator_BT: Tensor, denominator_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Per-token log-ratio, nats, (B, T); 0 outside the mask."""
    return zero_outside(numerator_BT, mask_BT) - zero_outside(denominator_BT, mask_BT)


def at_level(log_ratio_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """The log-ratio at "token" (B, T), "sequence" (B, 1: sum) or "geometric" (B, 1: mean over the mask).

    Raises ValueError for another level. A response without a valid token has log-ratio 0.
    """
    if level == "token":
        return log_ratio_BT
    if level not in LEVELS:
        raise ValueError(f"level={level!r} is not one of {', '.join(LEVELS)}")
    total_B1 = zero_outside(log_ratio_BT, mask_BT).sum(-1, keepdim=True)
    return total_B1 if level == "sequence" else total_B1 / mask_BT.sum(-1, keepdim=True).clamp(min=1)


def bounded_exp(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio cut to +-20 nats; beyond the cut the ratio is constant and has no gradient."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def masked_mean(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Mean over the mask, a 0-d tensor; 0 for an empty mask. For metrics: losses go through `aggregate`."""
    return zero_outside(values_BT, mask_BT).sum() / mask_BT.sum().clamp(min=1)
