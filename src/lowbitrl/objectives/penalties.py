"""Terms beside the surrogate: divergence from a reference, and length."""

import torch
from torch import Tensor

from lowbitrl.objectives.ratios import LOG_RATIO_LIMIT, bounded_exp, log_ratio_of, zero_outside

KL_KINDS = ("k1", "k2", "k3")


def kl_estimate(logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, kind: str = "k3") -> Tensor:
    """Per-token estimate of KL(policy || reference) on the policy's own samples, nats, (B, T).

    0 outside the mask. With d = logprobs - ref_logprobs (Schulman 2020, "Approximating KL Divergence"):
    k1 = d, unbiased and signed; k2 = d^2 / 2; k3 = exp(-d) + d - 1, unbiased and never negative (GRPO eq. 4).
    In a loss only k2's gradient is that of the KL in expectation on policy; k1's is zero in expectation. In a
    reward use k1. d is cut to +-20 in k3, where its exponential would overflow.
    Raises ValueError for another kind.
    """
    if kind not in KL_KINDS:
        raise ValueError(f"kl_kind={kind!r} is not one of {', '.join(KL_KINDS)}")
    diff_BT = log_ratio_of(logprobs, ref_logprobs, mask.bool())
    if kind == "k1":
        return diff_BT
    if kind == "k2":
        return diff_BT**2 / 2
    return bounded_exp(-diff_BT) + diff_BT.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT) - 1


def penalize_kl(
    rewards: Tensor, logprobs: Tensor, ref_logprobs: Tensor, mask: Tensor, *, coef: float, kind: str = "k1"
) -> Tensor:
    """Rewards minus coef times the summed KL estimate of each response, (B,), no gradient.

    rewards (B,), the rest (B, T). The KL goes in before the group baseline, as in PPO for language models.
    """
    kl_BT = kl_estimate(logprobs.detach(), ref_logprobs.detach(), mask, kind=kind)
    return rewards - coef * kl_BT.sum(-1)


def soft_overlong_penalty(lengths: Tensor, *, max_length: int, buffer: int) -> Tensor:
    """DAPO eq. 13: 0 up to max_length - buffer, then linear down to -1 at max_length, -1 beyond; (B,) fp32.

    lengths: (B,) response lengths in tokens. Add it to the rewards.
    Raises ValueError unless 0 < buffer <= max_length.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"buffer={buffer} must be in 1..max_length={max_length} tokens")
    return ((max_length - buffer - lengths.float()) / buffer).clamp(-1, 0)


def overlong_filter(mask: Tensor, truncated: Tensor) -> Tensor:
    """The mask without the responses that were cut off, (B, T) bool: DAPO's overlong filtering.

    mask (B, T), truncated (B,) bool. They leave every denominator too, for they leave the mask.
    """
    return mask.bool() & ~truncated.bool().unsqueeze(-1)


def entropy_of(logits: Tensor) -> Tensor:
    """Entropy of softmax(logits) over the last axis, nats, in fp32 with gradient; -inf logits are allowed."""
    logprobs = torch.log_softmax(logits.float(), -1)
    probs = logprobs.exp()
    return -(probs * zero_outside(logprobs, probs > 0)).sum(-1)
