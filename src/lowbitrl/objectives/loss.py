"""`policy_loss`: one surrogate, its weights, masks, penalties and average, in the order written."""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lowbitrl.objectives.aggregate import aggregate_loss, denominator_of
from lowbitrl.objectives.corrections import LEAVE_DENOMINATOR, REWEIGHTS, Correction, correct
from lowbitrl.objectives.metrics import Metrics, clip_metrics, weight_metrics
from lowbitrl.objectives.penalties import kl_estimate
from lowbitrl.objectives.ratios import at_level, bounded_exp, log_ratio_of, masked_mean, zero_outside
from lowbitrl.objectives.registry import Objective, get_objective
from lowbitrl.objectives.surrogates.band import Surrogate


@dataclass(frozen=True)
class PolicyLoss:
    """What `policy_loss` returns. `aggregate_loss(per_token, mask & keep, ...)` gives `loss` again."""

    loss: Tensor
    """0-d, with gradient: minimize it."""
    metrics: Metrics
    """0-d tensors without gradient: `actor/*` and `rollout_corr/*`. Means over this micro-batch."""
    per_token: Tensor
    """(B, T), weights and penalties in it, 0 where masked or rejected; not yet divided."""
    weights: Tensor
    """(B, T) importance weights, already in `per_token`; no gradient."""
    keep: Tensor
    """(B, T) bool: False where a correction rejected a token."""


def policy_loss(
    name: str,
    *,
    logprobs: Tensor,
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None = None,
    advantages: Tensor,
    mask: Tensor,
    denominator: Tensor | float | None = None,
    ref_logprobs: Tensor | None = None,
    entropy: Tensor | None = None,
    aggregate: str | None = None,
    max_tokens: int | None = None,
    correction: str = "none",
    level: str | None = None,
    cap: float | None = None,
    floor: float | None = None,
    count_rejected: bool | None = None,
    kl_coef: float = 0.0,
    kl_kind: str = "k3",
    entropy_coef: float = 0.0,
    **parameters: Any,
) -> PolicyLoss:
    """The loss of one micro-batch under the objective `name`.

        loss = sum_{mask & keep} (weight surrogate + kl_coef KL - entropy_coef entropy) / denominator

    logprobs, old_logprobs, rollout_logprobs, ref_logprobs, entropy: (B, T) fp32 (fp64 for tests);
    log-probabilities in nats of the sampled tokens under the learner now, the learner when it sampled, the
    engine, a reference; only logprobs and entropy get a gradient. advantages: (B,). mask: (B, T), nonzero
    where a token is the response's; elsewhere every tensor may hold anything, NaN and inf included, and the
    gradient is exactly 0.

    aggregate, max_tokens: see `aggregate`; None is the objective's own.
    denominator: the whole batch's, for micro-batches and ranks (`batch_denominator`, summed over them; where
    ranks' gradients are averaged, divide it by their number).
    correction, level, cap, floor: see `corrections`; None is the correction's own default.
    count_rejected: whether rejected tokens still count in the denominator; None is the correction's own.
    Otherwise they are gone: no penalty, no share in a sequence-level ratio, no gradient.
    parameters: the objective's, see `get_objective(name).parameters`.

    `rollout_logprobs` may be None where nothing reads it. "tbpo" reads it unless tis_cap=None, and carries
    its weight itself, so "tis", "mis" and "icepop" need tis_cap=None there.
    Raises ValueError for an unknown name, parameter or option (naming the nearest), tensors whose shape or
    dtype is not the above, or a tensor that is missing for what was asked.

    Example: policy_loss("gspo", ..., correction="mis", level="geometric", cap=1.05).loss.backward()
    """
    objective = get_objective(name)
    surrogate_parameters, mismatch_parameters = objective.split(parameters)
    _check_tensors(
        advantages=advantages,
        mask=mask,
        logprobs=logprobs,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        ref_logprobs=ref_logprobs,
        entropy=entropy,
    )
    _check_penalties(kl_coef, ref_logprobs, entropy_coef, entropy)
    mask = mask.bool()
    options = {"correction": correction, "level": level, "cap": cap, "floor": floor}
    weights, keep = _correction_of(
        objective, mismatch_parameters, old_logprobs, rollout_logprobs, mask, options
    )

    # Rejected tokens leave before anything is computed: a sequence-level ratio never sees them either.
    kept = mask & keep
    new_BT, old_BT = zero_outside(logprobs, kept), zero_outside(old_logprobs.detach(), kept)
    advantages_B1 = advantages.detach().to(logprobs.dtype).unsqueeze(-1)
    surrogate = objective.surrogate(new_BT, old_BT, advantages_B1, kept, **surrogate_parameters)
    surrogate = surrogate if isinstance(surrogate, Surrogate) else Surrogate(surrogate)
    per_token = zero_outside(weights * surrogate.loss, kept)
    metrics = {
        "actor/tokens": mask.sum().float(),
        "actor/pg_loss_mean": masked_mean(per_token.detach(), kept),
    }
    metrics |= _ratio_metrics(new_BT, old_BT, kept) | clip_metrics(surrogate, advantages_B1, kept)
    if correction != "none" or objective.mismatch is not None:
        metrics |= weight_metrics(weights, keep, mask)

    if ref_logprobs is not None:
        kl_BT = kl_estimate(logprobs, ref_logprobs.detach(), kept, kind=kl_kind)
        metrics["actor/kl_loss"] = masked_mean(kl_BT.detach(), kept)
        per_token = per_token + kl_coef * kl_BT
    if entropy is not None:
        metrics["actor/entropy"] = masked_mean(entropy.detach(), kept)
        per_token = per_token - entropy_coef * zero_outside(entropy, kept)

    loss = aggregate_loss(
        per_token,
        kept,
        aggregate or objective.aggregate,
        counted_BT=_counted(mask, keep, correction, count_rejected),
        denominator=denominator,
        max_tokens=max_tokens,
    )
    return PolicyLoss(loss, metrics, per_token, weights, keep)


def batch_denominator(
    name: str,
    *,
    mask: Tensor,
    old_logprobs: Tensor | None = None,
    rollout_logprobs: Tensor | None = None,
    aggregate: str | None = None,
    max_tokens: int | None = None,
    correction: str = "none",
    level: str | None = None,
    cap: float | None = None,
    floor: float | None = None,
    count_rejected: bool | None = None,
) -> Tensor:
    """The denominator that `policy_loss` with the same options divides by, 0-d fp32.

    Additive: sum it over micro-batches and ranks, then hand the sum to each as `denominator=`.
    old_logprobs and rollout_logprobs are read only where rejected tokens leave the denominator.
    """
    mask, mode = mask.bool(), aggregate or get_objective(name).aggregate
    keep = torch.ones_like(mask)
    if not _counts_rejected(correction, count_rejected):
        if old_logprobs is None:
            raise ValueError(f"correction={correction!r} rejects by old_logprobs, which is None")
        sides = {"old_logprobs": old_logprobs, "rollout_logprobs": rollout_logprobs}
        keep = correct(correction, **sides, mask=mask, level=level, cap=cap, floor=floor).keep
    return denominator_of(_counted(mask, keep, correction, count_rejected), mode, max_tokens=max_tokens)


def _correction_of(
    objective: Objective,
    parameters: dict[str, Any],
    old_logprobs: Tensor,
    rollout_logprobs: Tensor | None,
    mask: Tensor,
    options: dict[str, Any],
) -> Correction:
    """The chosen correction times the weight that belongs to the objective, if it has one."""
    chosen = options["correction"]
    weights, keep = correct(
        chosen,
        old_logprobs=old_logprobs,
        rollout_logprobs=rollout_logprobs,
        mask=mask,
        **{key: value for key, value in options.items() if key != "correction"},
    )
    own = objective.mismatch and objective.mismatch(old_logprobs, rollout_logprobs, mask, **parameters)
    if own is None:
        return Correction(weights, keep)
    if chosen in REWEIGHTS:
        off = ", ".join(f"{key}=None" for key in parameters)
        raise ValueError(f"{objective.name!r} already weighs by the mismatch; {off} hands that to {chosen!r}")
    return Correction(weights * own.weights, keep & own.keep)


def _counts_rejected(correction: str, count_rejected: bool | None) -> bool:
    return correction not in LEAVE_DENOMINATOR if count_rejected is None else count_rejected


def _counted(mask: Tensor, keep: Tensor, correction: str, count_rejected: bool | None) -> Tensor:
    return mask if _counts_rejected(correction, count_rejected) else mask & keep


def _ratio_metrics(new_BT: Tensor, old_BT: Tensor, mask_BT: Tensor) -> Metrics:
    log_ratio_BT = log_ratio_of(new_BT.detach(), old_BT, mask_BT)
    ratio_B1 = bounded_exp(at_level(log_ratio_BT, mask_BT, "geometric"))
    return {
        "actor/ppo_kl": masked_mean(-log_ratio_BT, mask_BT),
        "actor/ratio_mean": masked_mean(bounded_exp(log_ratio_BT), mask_BT),
        "actor/ratio_geometric_mean": masked_mean(ratio_B1, mask_BT.any(-1, keepdim=True)),
    }


def _check_tensors(*, advantages: Tensor, mask: Tensor, logprobs: Tensor, **others: Tensor | None) -> None:
    """Wrong shapes broadcast to a plausible number and half precision rounds to a wrong one: both raise."""
    if logprobs.dim() != 2 or advantages.shape != logprobs.shape[:1]:
        shapes = f"{tuple(logprobs.shape)} and {tuple(advantages.shape)}"
        raise ValueError(f"logprobs and advantages must have shapes (B, T) and (B,), got {shapes}")
    for key, tensor in {"mask": mask, "logprobs": logprobs, **others}.items():
        if tensor is not None and tensor.shape != logprobs.shape:
            raise ValueError(f"{key} has shape {tuple(tensor.shape)}, logprobs {tuple(logprobs.shape)}")
        if tensor is not None and key != "mask" and tensor.dtype not in (torch.float32, torch.float64):
            raise ValueError(f"{key} is {tensor.dtype}; log-probabilities and entropies are float32 here")


def _check_penalties(
    kl_coef: float, ref_logprobs: Tensor | None, entropy_coef: float, entropy: Tensor | None
) -> None:
    if kl_coef and ref_logprobs is None:
        raise ValueError(f"kl_coef={kl_coef} needs ref_logprobs")
    if entropy_coef and entropy is None:
        raise ValueError(f"entropy_coef={entropy_coef} needs entropy")
