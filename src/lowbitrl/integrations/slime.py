"""Functions for slime by dotted path: the loss of a batch, and the weight of its mismatch.

    --loss-type custom_loss --custom-loss-function-path lowbitrl.integrations.slime.loss
    --use-tis --custom-tis-function-path lowbitrl.integrations.slime.tis
    --custom-config-path lowbitrl.yaml          # lowbitrl: {objective: {name: tbpo}, tis: {correction: tis, cap: 2.0}}

Signatures as in slime/backends/megatron_utils/loss.py of THUDM/slime at commit 624b824 (2026-08-21), where
`loss_function` calls the one and `policy_loss_function` the other. Tested around that module
from source; never in a run of slime's.
"""

from __future__ import annotations

from argparse import Namespace
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from lowbitrl.integrations.shared import OWNED, flat, make_objective, one_a_response, padded
from lowbitrl.objectives import mismatch_metrics, policy_loss
from lowbitrl.objectives.corrections import correct

Reducer = Callable[[Tensor], Tensor]

OWNED_BY_SLIME = OWNED | {
    "aggregate": "--calculate-per-token-loss averages over tokens, otherwise over responses",
    "max_tokens": "it divides by token counts",
    "entropy_coef": "--entropy-coef",
}


def loss(
    args: Namespace, batch: Mapping[str, Any], logits: Tensor, sum_of_sample_mean: Reducer
) -> tuple[Tensor, dict[str, Tensor]]:
    """The objective of `args.lowbitrl["objective"]` (default TBPO) on a micro-batch; slime divides.

    Args:
        batch: lists of a tensor a response: "advantages", "loss_masks", "unconcat_tokens", "rollout_log_probs",
            and, where the actor scored it before the step, "log_probs"; "total_lengths", "response_lengths".
        logits: (1, tokens, vocabulary) fp32 of the packed micro-batch.
        sum_of_sample_mean: sums a flat tensor a token as slime averages.

    Returns:
        The loss, and 0-d metrics reduced the same way.

    Raises:
        ValueError: settings that slime decides; sampling with top-p; advantages that differ within a response;
            context parallelism; rollout log-probabilities that are read and did not come.
    """
    from slime.backends.megatron_utils.loss import get_log_probs_and_entropy  # type: ignore[import-not-found]

    objective = make_objective(_settings(args, "objective", "tbpo"), "slime", OWNED_BY_SLIME)
    _check_arguments(args)
    lengths = batch["response_lengths"]
    _, scored = get_log_probs_and_entropy(
        logits,
        args=args,
        unconcat_tokens=batch["unconcat_tokens"],
        total_lengths=batch["total_lengths"],
        response_lengths=lengths,
        with_entropy=True,
    )
    logprobs = padded(scored["log_probs"], lengths, "log_probs")
    mask = padded(batch["loss_masks"], lengths, "loss_masks").bool()
    rollout = batch.get("rollout_log_probs")
    sampled = padded(rollout, lengths, "rollout_log_probs") if rollout else None
    before = batch.get("rollout_log_probs" if args.use_rollout_logprobs else "log_probs")
    old = padded(before, lengths, "log_probs") if before else logprobs.detach()
    out = policy_loss(
        objective.name,
        logprobs=logprobs,
        old_logprobs=old,
        rollout_logprobs=sampled,
        advantages=one_a_response(padded(batch["advantages"], lengths, "advantages"), mask),
        mask=mask,
        entropy=padded(scored["entropy"], lengths, "entropy"),
        entropy_coef=args.entropy_coef,
        # Only per_token is used: any mode without further settings will do.
        aggregate="token-mean",
        **{k: v for k, v in objective.correction_options().items() if k not in ("aggregate", "max_tokens")},
        **objective.parameters,
    )
    per_token = flat(out.per_token, lengths)
    # A rank without a token still takes part in backward.
    total = sum_of_sample_mean(per_token) if per_token.numel() else 0 * logits.sum()
    metrics = out.metrics | (mismatch_metrics(old, sampled, mask) if sampled is not None else {})
    metrics.pop("actor/tokens")  # no mean
    whole = torch.ones_like(per_token)
    # Sums of shares: slime divides what it logs as it divides the loss.
    shares = {name: sum_of_sample_mean(whole * value) for name, value in metrics.items()}
    return total, {"loss": total.detach().clone()} | shares


def tis(
    args: Namespace,
    *,
    pg_loss: Tensor,
    train_log_probs: list[Tensor],
    rollout_log_probs: list[Tensor],
    loss_masks: list[Tensor],
    **_: Any,
) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:
    """The correction of `args.lowbitrl["tis"]` (default: truncated importance sampling by token) on slime's own loss.

    Args:
        pg_loss: (tokens,) of the micro-batch's responses, one after the other. The lists hold a tensor a response.

    Returns:
        The weighted loss, masks without the rejected tokens (slime keeps their share of the denominator), and
        metrics a token: "tis" the weight, "tis_abs" its distance from 1, "tis_rejected".

    Raises:
        ValueError: an unknown correction or option; context parallelism.
    """
    options = dict(_settings(args, "tis", {"correction": "tis"}))
    lengths = [mask.numel() for mask in loss_masks]
    mask = padded(loss_masks, lengths, "loss_masks").bool()
    weights, keep = correct(
        options.pop("correction", "tis"),
        old_logprobs=padded(train_log_probs, lengths, "train_log_probs").detach(),
        rollout_logprobs=padded(rollout_log_probs, lengths, "rollout_log_probs"),
        mask=mask,
        **options,
    )
    weight, kept = flat(weights, lengths), flat(keep, lengths)
    masks = [m * k.to(m.dtype) for m, k in zip(loss_masks, kept.split(lengths), strict=True)]
    metrics = {"tis": weight, "tis_abs": (weight - 1).abs(), "tis_rejected": (~kept).float()}
    return pg_loss * weight * kept, masks, metrics


def _settings(args: Namespace, section: str, default: Any) -> Any:
    """A section of `lowbitrl` in the YAML of --custom-config-path."""
    given = getattr(args, "lowbitrl", {})
    unknown = set(given) - {"objective", "tis"}
    if unknown:
        raise ValueError(
            f"lowbitrl.{min(unknown)} is unknown in slime's custom config; sections: objective, tis"
        )
    return given.get(section, default)


def _check_arguments(args: Namespace) -> None:
    if args.use_kl_loss:
        raise ValueError("--use-kl-loss is not part of this loss; charge the KL to the reward (--kl-coef)")
    if args.rollout_top_p != 1.0:
        raise ValueError(
            f"--rollout-top-p {args.rollout_top_p} truncates what the engine samples from; use 1.0, so that both sides "
            "score one distribution"
        )
