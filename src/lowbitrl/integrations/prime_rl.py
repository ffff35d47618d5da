"""A loss for prime-rl by import path.

    [trainer.loss]
    type = "custom"
    import_path = "lowbitrl.integrations.prime_rl.loss"
    kwargs = { objective = "tbpo", parameters = { tis_cap = 2.0 } }

Signature as in src/prime_rl/trainer/rl/loss.py of PrimeIntellect-ai/prime-rl at commit 559b447 (2026-08-21): one
sequence a call, its loss a sum over tokens, which prime-rl divides by the batch's tokens. Tested
around that module from source; never in a run of prime-rl's.
"""

from __future__ import annotations

from typing import Any, Literal

from torch import Tensor

from lowbitrl.integrations.shared import OWNED, make_objective, one_a_response
from lowbitrl.objectives import mismatch_metrics, policy_loss

OWNED_BY_PRIME_RL = OWNED | {
    "aggregate": "it sums over tokens and divides by the batch's",
    "max_tokens": "it divides by tokens",
    "entropy_coef": "entropies do not reach the loss",
}


def loss(
    inputs: Any, *, objective: str = "tbpo", old: Literal["trainer", "inference"] = "trainer", **settings: Any
) -> Any:
    """LossInputs -> LossOutputs of one sequence.

    prime-rl brings the trainer's log-probabilities and the inference engine's, none of a policy between them, so
    one of the two stands in for the old one.

    Args:
        inputs: trainer_logprobs, inference_logprobs, advantages, loss_mask, each (tokens,); loss_weights or None.
        objective: a name of `lowbitrl.objectives`; settings: the others of `ObjectiveConfig`.
        old: "trainer": the ratio starts at 1, as in a step whose batch is new, and corrections weigh all of
            trainer / inference, staleness with it. "inference": the ratio is trainer / inference, which the
            objective's clip or band bounds, and mismatch weights are 1.

    Raises:
        ValueError: settings that prime-rl decides; advantages that differ within the sequence; a correction with
            old="inference".
    """
    from prime_rl.trainer.rl.loss import LossOutputs  # type: ignore[import-not-found]

    chosen = make_objective(settings | {"name": objective}, "prime-rl", OWNED_BY_PRIME_RL)
    if old not in ("trainer", "inference"):
        raise ValueError(f"old={old!r} is neither 'trainer' nor 'inference'")
    if old == "inference" and chosen.correction != "none":
        raise ValueError(
            f"correction={chosen.correction!r} weighs old against inference log-probabilities, which old='inference' "
            "makes equal; use old='trainer', or correction='none'"
        )
    row = lambda tensor: tensor.unsqueeze(0)  # noqa: E731
    logprobs, sampled = row(inputs.trainer_logprobs.float()), row(inputs.inference_logprobs.float())
    mask = row(inputs.loss_mask)
    out = policy_loss(
        chosen.name,
        logprobs=logprobs,
        old_logprobs=sampled if old == "inference" else logprobs.detach(),
        rollout_logprobs=sampled,
        advantages=one_a_response(row(inputs.advantages), mask),
        mask=mask,
        aggregate="token-mean",  # only per_token is used
        **{k: v for k, v in chosen.correction_options().items() if k not in ("aggregate", "max_tokens")},
        **chosen.parameters,
    )
    per_token: Tensor = out.per_token.squeeze(0)
    if inputs.loss_weights is not None:
        per_token = per_token * inputs.loss_weights
    return LossOutputs(loss=per_token.sum(), metrics=out.metrics | mismatch_metrics(logprobs, sampled, mask))
