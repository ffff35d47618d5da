"""Our objectives as verl's policy losses, and the one thing that verl does not hand to them.

verl's `ppo_loss` calls a policy loss with old_log_prob, log_prob, advantages and response_mask; the
sampler's log-probabilities are in the batch and are left there. `with_rollout_logprobs` wraps the whole
loss, puts them in reach and calls verl's, which goes on to add its entropy and KL terms. The learner's
engine does so (`engine`); with another engine, a trainer class of one's own sets the whole loss:

    actor_rollout_wg.set_loss_fn(with_rollout_logprobs(partial(ppo_loss, config=actor_config)))

Where neither is done, an objective that reads them raises: TBPO would lose its mismatch weight, and verl's
`rollout_is="sequence"`, exp(sum_t d_t), is not it: TBPO's is exp(mean_t d_t).
"""

from __future__ import annotations

from collections.abc import Callable
from contextvars import ContextVar
from functools import partial
from typing import Any

import torch
from torch import Tensor
from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY, agg_loss, register_policy_loss

from lowbitrl.integrations.verl.settings import PREFIX, needs_rollout_logprobs, objective_of, reweights
from lowbitrl.objectives import objective_names, policy_loss
from lowbitrl.trainer.config import ObjectiveConfig

_ROLLOUT_LOGPROBS: ContextVar[Tensor | None] = ContextVar("rollout_logprobs", default=None)


def register(*names: str) -> None:
    """Register objectives as `lowbitrl_<name>`, and as `<name>` where verl has no loss of that name."""
    for name in names or objective_names():
        for alias in (f"{PREFIX}{name}", name):
            if alias not in POLICY_LOSS_REGISTRY:
                register_policy_loss(alias)(partial(lowbit_policy_loss, name))


def with_rollout_logprobs(loss_function: Callable[..., Any]) -> Callable[..., Any]:
    """verl's whole loss (model_output, data, dp_group) with the batch's rollout log-probabilities in reach."""

    def whole(model_output: Any, data: Any, dp_group: Any = None) -> Any:
        token = _ROLLOUT_LOGPROBS.set(padded(data, "rollout_log_probs"))
        try:
            return loss_function(model_output=model_output, data=data, dp_group=dp_group)
        finally:
            _ROLLOUT_LOGPROBS.reset(token)

    return whole


def padded(data: Any, field: str) -> Tensor | None:
    """A field of responses, (B, T) fp32 padded as verl pads its own; None where the batch has none."""
    if field not in data:
        return None
    return data.select(field).to_padded_tensor()[field].float()


def lowbit_policy_loss(
    name: str,
    old_log_prob: Tensor,
    log_prob: Tensor,
    advantages: Tensor,
    response_mask: Tensor,
    loss_agg_mode: str = "token-mean",
    config: Any = None,
    rollout_is_weights: Tensor | None = None,
) -> tuple[Tensor, dict[str, Any]]:
    """verl's signature over `policy_loss(name, ...)`: all (B, T); verl divides.

    Raises:
        ValueError: rollout log-probabilities are read and did not come; two mismatch weights at once;
            advantages that differ within a response.
    """
    objective = _objective(name, config)
    rollout = _ROLLOUT_LOGPROBS.get()
    if rollout is None and needs_rollout_logprobs(objective):
        raise ValueError(
            f"{name!r} compares learner and sampler, but the sampler's log-probabilities did not reach it: run the "
            "engine of VERL_ENGINE_VENDOR=lowbitrl with rollout.calculate_log_probs=true, set the whole loss in your "
            "trainer (lowbitrl.integrations.verl.losses.with_rollout_logprobs), or switch it off "
            "(actor.policy_loss.lowbitrl={parameters:{tis_cap:null}}). verl's rollout_is='sequence' is no substitute: "
            "it weighs by the summed log-ratio, not by its mean"
        )
    if rollout_is_weights is not None and reweights(objective):
        raise ValueError(
            f"algorithm.rollout_correction.rollout_is weighs a mismatch that {name!r} already weighs; set it to null"
        )
    out = policy_loss(
        name,
        logprobs=log_prob.float(),
        old_logprobs=old_log_prob.float(),
        rollout_logprobs=rollout if needs_rollout_logprobs(objective) else None,
        advantages=_one_a_response(advantages, response_mask),
        mask=response_mask,
        # Only per_token is used: any mode without further settings will do.
        aggregate="token-mean",
        **{k: v for k, v in objective.correction_options().items() if k not in ("aggregate", "max_tokens")},
        **objective.parameters,
    )
    per_token = out.per_token if rollout_is_weights is None else out.per_token * rollout_is_weights
    shared = {} if config is None else config.global_batch_info
    loss = agg_loss(per_token, response_mask.float(), loss_agg_mode, **shared)
    return loss, {key: value.item() for key, value in out.metrics.items()}


def _objective(name: str, config: Any) -> ObjectiveConfig:
    own = getattr(getattr(config, "policy_loss", None), "objective", None)
    return own if own is not None else objective_of(name, {})


def _one_a_response(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B,) of verl's (B, T)."""
    mask = mask.bool()
    lowest = torch.where(mask, advantages, torch.inf).amin(-1)
    highest = torch.where(mask, advantages, -torch.inf).amax(-1)
    if bool((highest - lowest > 1e-5).any()):
        raise ValueError(
            "advantages differ within a response; these objectives take one a response: use "
            "algorithm.adv_estimator=grpo, rloo or another outcome estimator"
        )
    return torch.where(mask.any(-1), highest, 0.0).float()
