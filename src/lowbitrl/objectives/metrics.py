"""What to watch, as 0-d fp32 tensors without gradient, under verl's names where verl has one.

`mismatch_metrics` compares the learner with the engine before any update; `weight_metrics` says what a
correction did about it; `clip_metrics` what the surrogate's bound did; `error_token_metrics` counts the
garbage that low-bit sampling leaves in responses (QaRL section 3.2). An empty mask gives zeros, never NaN.
"""

import math

import torch
from torch import Tensor

from lowbitrl.objectives.ratios import at_level, bounded_exp, log_ratio_of, masked_mean, zero_outside
from lowbitrl.objectives.surrogates.band import Surrogate

Metrics = dict[str, Tensor]


def mismatch_metrics(old_logprobs: Tensor, rollout_logprobs: Tensor, mask: Tensor) -> Metrics:
    """How far the learner is from the engine on the tokens that the engine sampled, before any update.

    All inputs (B, T); d = old_logprobs - rollout_logprobs per token, nats, w = exp(d). Under `rollout_corr/`:
    kl mean(-d); k3_kl mean(w - d - 1); chi2_token mean(w^2) - 1; chi2_seq mean_i exp(2 sum_t d) - 1;
    training_ppl and rollout_ppl, mean over responses of exp(-mean_t logprob), with their logs;
    log_ppl_diff mean_i(-mean_t d), its abs, max and min; ppl_ratio mean_i exp(-mean_t d).
    Under `mismatch/`: abs_mean, abs_p99, abs_max of |d|; token_mult_prob_error mean(exp|d|) (alarm in use
    elsewhere: 1.05). Aliases: `train_rollout_logprob_abs_diff` and `token_mult_prob_error`.
    Responses without a valid token are left out. Ratios are cut to exp(+-20).
    """
    old, rollout, mask = old_logprobs.detach(), rollout_logprobs.detach(), mask.bool()
    diff_BT = log_ratio_of(old, rollout, mask)
    diff_B = at_level(diff_BT, mask, "geometric")
    rows_B1 = mask.any(-1, keepdim=True)
    error = masked_mean(bounded_exp(diff_BT.abs()), mask)
    absolute = _spread(diff_BT.abs()[mask])
    corr = {
        "kl": masked_mean(-diff_BT, mask),
        "k3_kl": masked_mean(bounded_exp(diff_BT) - diff_BT - 1, mask),
        "chi2_token": masked_mean(bounded_exp(diff_BT) ** 2, mask) - mask.any().float(),
        "chi2_seq": masked_mean(bounded_exp(at_level(diff_BT, mask, "sequence")) ** 2, rows_B1)
        - mask.any().float(),
        "log_ppl_diff": masked_mean(-diff_B, rows_B1),
        "log_ppl_abs_diff": masked_mean(diff_B.abs(), rows_B1),
        "log_ppl_diff_max": _spread(-diff_B[rows_B1])["max"],
        "log_ppl_diff_min": -_spread(diff_B[rows_B1])["max"],
        "ppl_ratio": masked_mean(bounded_exp(-diff_B), rows_B1),
    }
    corr |= _perplexity("training", old, mask) | _perplexity("rollout", rollout, mask)
    return {f"rollout_corr/{key}": value for key, value in corr.items()} | {
        "mismatch/abs_mean": absolute["mean"],
        "mismatch/abs_p99": absolute["p99"],
        "mismatch/abs_max": absolute["max"],
        "mismatch/token_mult_prob_error": error,
        "token_mult_prob_error": error,
        "train_rollout_logprob_abs_diff": absolute["mean"],
    }


def _perplexity(side: str, logprobs_BT: Tensor, mask_BT: Tensor) -> Metrics:
    rows_B1 = mask_BT.any(-1, keepdim=True)
    log_ppl_B1 = -at_level(zero_outside(logprobs_BT, mask_BT), mask_BT, "geometric")
    return {
        f"{side}_ppl": masked_mean(bounded_exp(log_ppl_B1), rows_B1),
        f"{side}_log_ppl": masked_mean(log_ppl_B1, rows_B1),
    }


def _spread(values_N: Tensor) -> Metrics:
    """Mean, 99th percentile (the smallest value with 99% at or below it) and max; zeros for no values."""
    if values_N.numel() == 0:
        zero = values_N.new_zeros(())
        return {"mean": zero, "p99": zero, "max": zero}
    # kthvalue, not quantile: torch.quantile refuses more than 16M values.
    rank = math.ceil(0.99 * values_N.numel())
    return {"mean": values_N.mean(), "p99": values_N.kthvalue(rank).values, "max": values_N.max()}


def weight_metrics(weights: Tensor, keep: Tensor, mask: Tensor) -> Metrics:
    """What a correction did: moments of its weights over the kept tokens, and the share it rejected.

    All (B, T). `rollout_is_eff_sample_size` is mean(w)^2 / mean(w^2), 1 for equal weights.
    """
    mask = mask.bool()
    kept = mask & keep
    mean, square = masked_mean(weights, kept), masked_mean(weights**2, kept)
    rows, kept_rows = mask.any(-1), kept.any(-1)
    metrics = {
        "rollout_is_mean": mean,
        "rollout_is_std": (square - mean**2).clamp(min=0).sqrt(),
        "rollout_is_min": _lowest(weights, kept),
        "rollout_is_max": -_lowest(-weights, kept),
        "rollout_is_eff_sample_size": mean**2 / torch.where(square > 0, square, 1.0),
        "rollout_rs_masked_fraction": masked_mean((~keep).float(), mask),
        "rollout_rs_seq_masked_fraction": masked_mean((~kept_rows).float(), rows),
    }
    return {f"rollout_corr/{key}": value.detach() for key, value in metrics.items()}


def _lowest(values_BT: Tensor, mask_BT: Tensor) -> Tensor:
    """Minimum over the mask, 0 for an empty one, without a device synchronisation."""
    if values_BT.numel() == 0:
        return values_BT.new_zeros(())
    low = torch.where(mask_BT, values_BT, torch.inf).min()
    return torch.where(low.isinf(), torch.zeros_like(low), low)


def clip_metrics(surrogate: Surrogate, advantages_B1: Tensor, mask_BT: Tensor) -> Metrics:
    """Where the bound acted: share of tokens, of tokens by sign of A, and of responses by sign of A.

    A response is outside the band when the bound acts on all of its tokens: for a sequence-level ratio that
    is the band itself, for a token-level one it is rare.
    """
    if surrogate.clipped is None:
        return {}
    clipped_BT = surrogate.clipped.expand_as(mask_BT)
    outside_B1 = (clipped_BT | ~mask_BT).all(-1, keepdim=True).float()
    rows_B1 = mask_BT.any(-1, keepdim=True)
    metrics = {"actor/pg_clipfrac": masked_mean(clipped_BT.float(), mask_BT)}
    for sign, chosen_B1 in (("positive", advantages_B1 > 0), ("negative", advantages_B1 < 0)):
        metrics[f"actor/pg_clipfrac_{sign}"] = masked_mean(clipped_BT.float(), mask_BT & chosen_B1)
        metrics[f"actor/outside_band_{sign}"] = masked_mean(outside_B1, rows_B1 & chosen_B1)
    return {key: value.detach() for key, value in metrics.items()}


def error_token_metrics(
    logprobs: Tensor,
    advantages: Tensor,
    mask: Tensor,
    *,
    tokens: Tensor | None = None,
    probability_floor: float = 0.02,
    ngram: int = 8,
) -> Metrics:
    """QaRL's error tokens: tokens of low probability, and repetition, by sign of the advantage.

    logprobs and mask (B, T), advantages (B,), tokens (B, T) sampled ids or None (no repetition then).
    `rollout/low_prob_{positive,negative}`: share of the valid tokens of that sign with probability below
    `probability_floor` (0.02: the paper's example of a tail token). `rollout/repetition_{positive,negative}`:
    mean over responses of the share of their `ngram`-grams that occurred earlier in the same response.
    """
    mask, advantages_B1 = mask.bool(), advantages.detach().unsqueeze(-1)
    low_BT = (zero_outside(logprobs.detach(), mask) < math.log(probability_floor)).float()
    rows_B1 = mask.any(-1, keepdim=True)
    repeated_B1 = None if tokens is None else repetition(tokens, mask, ngram=ngram).unsqueeze(-1)
    metrics = {"rollout/low_prob": masked_mean(low_BT, mask)}
    if repeated_B1 is not None:
        metrics["rollout/repetition"] = masked_mean(repeated_B1, rows_B1)
    for sign, chosen_B1 in (("positive", advantages_B1 > 0), ("negative", advantages_B1 < 0)):
        metrics[f"rollout/low_prob_{sign}"] = masked_mean(low_BT, mask & chosen_B1)
        if repeated_B1 is not None:
            metrics[f"rollout/repetition_{sign}"] = masked_mean(repeated_B1, rows_B1 & chosen_B1)
    return metrics


def repetition(tokens: Tensor, mask: Tensor, *, ngram: int = 8) -> Tensor:
    """Share of each response's n-grams that occurred earlier in it, (B,) fp32; 0 where it has none.

    tokens and mask (B, T); the valid tokens of a row are read in order, gaps closed.
    Raises ValueError for ngram below 1.
    """
    if ngram < 1:
        raise ValueError(f"ngram={ngram} must be at least 1")
    rows = zip(tokens, mask.bool(), strict=True)
    shares = [_repeated_share(row[valid].tolist(), ngram) for row, valid in rows]
    return torch.tensor(shares, dtype=torch.float32, device=tokens.device)


def _repeated_share(tokens: list[int], ngram: int) -> float:
    grams = [tuple(tokens[i : i + ngram]) for i in range(len(tokens) - ngram + 1)]
    return 1 - len(set(grams)) / len(grams) if grams else 0.0
