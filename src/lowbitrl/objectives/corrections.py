"""Corrections for a sampler that is not the learner: weights and a keep-mask, apart.

Every correction reads w = exp(old_logprobs - rollout_logprobs) at one level (`ratios`) and returns what to
multiply a token's loss by, and which tokens stay. A rejected token leaves the mask, its weight stays finite;
whether it still counts in the denominator is `count_rejected` of `policy_loss`, with the default below.

    name            weight        keep                    levels (first: default)     rejected count
    tis             min(w, cap)   all                     token, sequence, geometric  -
    mis             w             floor <= w <= cap       sequence, token, geometric  yes
    icepop          w             floor <= w <= cap       token                       yes
    rejection       1             floor <= w <= cap       geometric, token, sequence  no
    sequence-error  1             mean_t e^|d_t| <= cap   -                           no

tis: Yao et al. 2025 (FlashRL), cap 2. mis: Liu et al. 2025, weights masked out of bounds; the expectation
stays over all samples, hence "yes". icepop: Ling team 2025, a two-sided token mask, bounds 0.5 and 5.
rejection: the sequence masks of verl's rollout correction, which edits the response mask, hence "no".
sequence-error: NeMo-RL's sequence log-probability error mask. The bounds of the last two are ours.

Adaptive importance sampling (AIS, arXiv 2605.13907) is absent: its abstract names three diagnostics and a
mixing coefficient without a formula for any of them, and a guess should not carry its name.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from lowbitrl.objectives.names import check_parameters, find, keyword_defaults
from lowbitrl.objectives.ratios import at_level, bounded_exp, log_ratio_of, zero_outside


class Correction(NamedTuple):
    """`weights` (B, T) fp32 without gradient, `keep` (B, T) bool; both defined, and finite, everywhere."""

    weights: Tensor
    keep: Tensor


def no_correction(mask_BT: Tensor, dtype: torch.dtype = torch.float32) -> Correction:
    """Weight 1 and keep everything."""
    return Correction(torch.ones(mask_BT.shape, dtype=dtype, device=mask_BT.device), torch.ones_like(mask_BT))


def mismatch_ratio(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, level: str) -> Tensor:
    """w = exp(old_logprobs - rollout_logprobs) at `level`, (B, T), no gradient; 1 outside the mask."""
    log_ratio_BT = log_ratio_of(old_BT.detach(), rollout_BT.detach(), mask_BT)
    return bounded_exp(at_level(log_ratio_BT, mask_BT, level)).expand_as(mask_BT)


def tis(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, level: str = "token", cap: float = 2.0
) -> Correction:
    """Truncated importance sampling: weight min(w, cap); `cap=inf` is the plain weight of decoupled PPO."""
    ratio_BT = mismatch_ratio(old_BT, rollout_BT, mask_BT, level)
    return Correction(ratio_BT.clamp(max=cap), torch.ones_like(mask_BT))


def mis(
    old_BT: Tensor,
    rollout_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: str = "sequence",
    cap: float = 2.0,
    floor: float = 0.0,
) -> Correction:
    """Masked importance sampling: weight w where floor <= w <= cap, rejected elsewhere."""
    ratio_BT = mismatch_ratio(old_BT, rollout_BT, mask_BT, level)
    return Correction(ratio_BT, (ratio_BT >= floor) & (ratio_BT <= cap))


def icepop(
    old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, cap: float = 5.0, floor: float = 0.5
) -> Correction:
    """IcePop: token weight w where floor <= w <= cap, token rejected elsewhere."""
    return mis(old_BT, rollout_BT, mask_BT, level="token", cap=cap, floor=floor)


def rejection(
    old_BT: Tensor,
    rollout_BT: Tensor,
    mask_BT: Tensor,
    *,
    level: str = "geometric",
    cap: float = 1.1,
    floor: float = 0.9,
) -> Correction:
    """Keep what floor <= w <= cap allows, with weight 1: selection without reweighting."""
    ratio_BT = mismatch_ratio(old_BT, rollout_BT, mask_BT, level)
    return Correction(torch.ones_like(ratio_BT), (ratio_BT >= floor) & (ratio_BT <= cap))


def sequence_error(old_BT: Tensor, rollout_BT: Tensor, mask_BT: Tensor, *, cap: float = 2.0) -> Correction:
    """Keep responses whose mean multiplicative error, mean_t exp(|old - rollout|), is at most `cap`."""
    error_BT = bounded_exp(log_ratio_of(old_BT.detach(), rollout_BT.detach(), mask_BT).abs())
    lengths_B1 = mask_BT.sum(-1, keepdim=True).clamp(min=1)
    mean_B1 = zero_outside(error_BT, mask_BT).sum(-1, keepdim=True) / lengths_B1
    return Correction(torch.ones_like(error_BT), (mean_B1 <= cap).expand_as(mask_BT))


CORRECTIONS = {
    "tis": tis,
    "mis": mis,
    "icepop": icepop,
    "rejection": rejection,
    "sequence-error": sequence_error,
}
REWEIGHTS = ("tis", "mis", "icepop")
LEAVE_DENOMINATOR = ("rejection", "sequence-error")


def correct(
    name: str,
    *,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    level: str | None = None,
    cap: float | None = None,
    floor: float | None = None,
) -> Correction:
    """Run the correction `name` ("none" included); a None among level, cap, floor means its own default.

    Raises ValueError for an unknown name, an option that the correction does not have, or missing
    `rollout_logprobs`.
    """
    given = {"level": level, "cap": cap, "floor": floor}
    options = {key: value for key, value in given.items() if value is not None}
    if name == "none":
        if cap is not None or floor is not None:
            raise ValueError(f"correction='none' reads no cap or floor; there are {', '.join(CORRECTIONS)}")
        return no_correction(mask, old_logprobs.dtype)
    correction = find("correction", name, CORRECTIONS)
    if rollout_logprobs is None:
        raise ValueError(f"correction={name!r} compares old_logprobs with rollout_logprobs, which is None")
    check_parameters(f"correction {name!r}", options, keyword_defaults(correction))
    return correction(old_logprobs, rollout_logprobs, mask, **options)
