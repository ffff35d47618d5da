"""A loss function for NeMo-RL.

NeMo-RL builds its loss in `setup` and has no setting for another, so the launcher hands this one on in its place
(examples/run_grpo.py, between `setup(...)` and the trainer): `loss_fn = PolicyLossFn("tbpo")`.

Protocol `LossFunction` as in nemo_rl/algorithms/loss/interfaces.py of NVIDIA-NeMo/RL at commit 7ea279a (2026-08-22),
called as `ClippedPGLossFn` is. Tested within wrapper.py from source; never in a run of NeMo-RL's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor

from lowbitrl.integrations.shared import OWNED, make_objective, one_a_response
from lowbitrl.objectives import get_objective, mismatch_metrics, policy_loss

OWNED_BY_NEMO_RL = OWNED | {"entropy_coef": "entropies do not reach the loss"}
KEYS = ("prev_logprobs", "generation_logprobs", "advantages", "token_mask", "sample_mask")


class PolicyLossFn:
    """An objective of `lowbitrl.objectives` as NeMo-RL's loss.

    Divides by NeMo-RL's global counts: tokens where the objective averages over tokens, else sequences.

    Args:
        objective: its name; settings: the others of `ObjectiveConfig`.

    Attributes:
        loss_type / input_type / metric_normalizations: what NeMo-RL's workers ask a loss.

    Raises:
        ValueError: settings that NeMo-RL decides.
    """

    def __init__(self, objective: str = "tbpo", **settings: Any) -> None:
        from nemo_rl.algorithms.loss.interfaces import (  # type: ignore[import-not-found]
            LossInputType,
            LossType,
            MetricNormalizer,
        )

        self.objective = make_objective(settings | {"name": objective}, "NeMo-RL", OWNED_BY_NEMO_RL)
        self.aggregate = self.objective.aggregate or get_objective(objective).aggregate
        by_token = self.aggregate == "token-mean"
        self.loss_type = LossType.TOKEN_LEVEL if by_token else LossType.SEQUENCE_LEVEL
        self.input_type = LossInputType.LOGPROB
        self._tokens, self._plain = MetricNormalizer.TOKENS, MetricNormalizer.NONE
        own = MetricNormalizer.TOKENS if by_token else MetricNormalizer.SEQUENCES
        self.metric_normalizations = {"loss": own, "num_valid_samples": self._plain}

    def __call__(
        self,
        next_token_logprobs: Tensor,
        data: Mapping[str, Any],
        global_valid_seqs: Tensor,
        global_valid_toks: Tensor,
    ) -> tuple[Tensor, dict[str, float]]:
        """(loss, metrics) of a micro-batch.

        Args:
            next_token_logprobs: (B, S - 1), of tokens 1 to S - 1.
            data: (B, S) prev_logprobs, generation_logprobs, advantages, token_mask; (B,) sample_mask.
            global_valid_seqs / global_valid_toks: counts of the whole batch, over all ranks.

        Returns:
            The loss, and metrics as shares of the whole batch's: NeMo-RL sums them over micro-batches.

        Raises:
            ValueError: a tensor that the batch does not bring; advantages that differ within a sequence.
        """
        missing = [key for key in KEYS if key not in data]
        if missing:
            raise ValueError(
                f"{missing[0]!r} is not in the batch; set loss_fn.force_on_policy_ratio=false to have it scored"
            )
        logprobs = next_token_logprobs.float()
        old, sampled = (data[key][:, 1:].float() for key in KEYS[:2])
        mask = (data["token_mask"][:, 1:] * data["sample_mask"].unsqueeze(-1)).bool()
        by_token = self.aggregate == "token-mean"
        out = policy_loss(
            self.objective.name,
            logprobs=logprobs,
            old_logprobs=old,
            rollout_logprobs=sampled,
            advantages=one_a_response(data["advantages"][:, 1:], mask),
            mask=mask,
            denominator=global_valid_toks
            if by_token
            else global_valid_seqs * (self.objective.max_tokens or 1),
            **self.objective.correction_options(),
            **self.objective.parameters,
        )
        share = float(mask.sum() / global_valid_toks)
        means = out.metrics | mismatch_metrics(old, sampled, mask)
        means.pop("actor/tokens")
        shares = {name: float(value) * share for name, value in means.items()}
        self.metric_normalizations |= dict.fromkeys(shares, self._tokens)
        counts = {"loss": out.loss.item(), "num_valid_samples": float(data["sample_mask"].sum())}
        return out.loss, shares | counts
