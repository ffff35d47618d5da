"""What a person sets of the learner: the objective, and how a batch becomes optimizer steps."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowbitrl.objectives import get_objective, policy_loss
from lowbitrl.trainer.batch import Layout


class ObjectiveConfig(BaseModel):
    """Which surrogate, which correction, which average; see docs/objectives.md.

    Attributes:
        name: of `lowbitrl.objectives`; `parameters` are its own (tbpo: eps_high, delta_low, ...).
        correction, level, cap, floor: mismatch correction; unset means the correction's default.
        aggregate: how the loss is averaged; unset means the objective's own.
        kl_coef: weight of the KL to the frozen initial policy; 0 keeps no reference model.
        advantage_scale / advantage_baseline: see `group_advantages`.
        drop_uninformative: leave out groups whose rewards are all equal (DAPO's filter).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "tbpo"
    parameters: dict[str, Any] = {}
    correction: str = "none"
    level: str | None = None
    cap: float | None = Field(default=None, gt=0, allow_inf_nan=True)
    floor: float | None = Field(default=None, ge=0)
    count_rejected: bool | None = None
    aggregate: str | None = None
    kl_coef: float = Field(default=0.0, ge=0)
    kl_kind: Literal["k1", "k2", "k3"] = "k3"
    entropy_coef: float = 0.0
    advantage_scale: Literal["std", "none"] = "std"
    advantage_baseline: Literal["mean", "leave-one-out"] = "mean"
    drop_uninformative: bool = False

    @model_validator(mode="after")
    def _known(self) -> ObjectiveConfig:
        get_objective(self.name).split(self.parameters)
        if self.entropy_coef:
            raise ValueError(
                f"entropy_coef={self.entropy_coef}: the learner's entropies carry no gradient (they are "
                "reduced chunk by chunk), so an entropy bonus would do nothing; set entropy_coef=0"
            )
        self._try()
        return self

    def _try(self) -> None:
        """Refuse what the objective itself would refuse, on one token, before a batch has been sampled."""
        one = torch.full((1, 1), -1.0)
        try:
            out = policy_loss(
                self.name,
                logprobs=one,
                old_logprobs=one,
                rollout_logprobs=one,
                advantages=torch.ones(1),
                mask=one.bool(),
                **self.correction_options(),
                **self.parameters,
            )
        except TypeError as error:
            raise ValueError(
                f"parameters={self.parameters}: a value of another type is needed ({error})"
            ) from error
        if not torch.isfinite(out.loss) or not bool(out.keep):
            raise ValueError(
                f"parameters={self.parameters}, cap={self.cap}, floor={self.floor}: on a token that both sides agree "
                f"on the loss is {out.loss.item():g}, and the token {'kept' if out.keep else 'rejected'}; give finite "
                "values, floor at most 1 and cap at least 1"
            )

    def correction_options(self) -> dict[str, Any]:
        """Keyword arguments that `policy_loss` and `batch_denominator` share."""
        names = ("correction", "level", "cap", "floor", "count_rejected", "aggregate")
        return {name: getattr(self, name) for name in names}


class TrainerConfig(BaseModel):
    """How a batch becomes optimizer steps.

    Attributes:
        steps: training steps, one batch of rollouts each.
        mini_batch: responses per optimizer step; 0 means the whole batch (on-policy).
        epochs: passes over a batch (PPO epochs).
        micro_batch_tokens: most tokens in one forward pass, padding included.
        layout: "padded" rows, or "packed" into one row with restarting positions.
        logprob_chunk: hidden states scored at once by the output head.
        gradient_checkpointing: recompute layers in backward instead of keeping activations.
        routing_replay: experts of the learner's passes in a mixture of experts. "none": its routers
            choose. "R3": those that the rollout took (it must record them), in every pass. "R2":
            those that the learner chose when it first scored the batch, in the passes after it; a
            batch of one optimizer step has no such passes.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    steps: int = Field(default=100, ge=1)
    mini_batch: int = Field(default=0, ge=0)
    epochs: int = Field(default=1, ge=1)
    micro_batch_tokens: int = Field(default=8192, ge=1)
    layout: Layout = "padded"
    logprob_chunk: int = Field(default=1024, ge=1)
    gradient_checkpointing: bool = False
    routing_replay: Literal["none", "R2", "R3"] = "none"
