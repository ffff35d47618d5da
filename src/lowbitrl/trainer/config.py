"""What a person sets of the learner: the objective, and how a batch becomes optimizer steps."""

from __future__ import annotations

from typing import Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field, model_validator

from lowbitrl.imports import import_from_here
from lowbitrl.objectives import get_objective, policy_loss
from lowbitrl.trainer.batch import Layout


class ObjectiveConfig(BaseModel):
    """Which surrogate, which correction, which average, which penalties; see docs/objectives.md.

    Attributes:
        name: of `lowbitrl.objectives`.
        parameters: the objective's own (tbpo: eps_high, delta_low, ...).
        module: Python module that is imported first and registers an objective of your own
            ("package.module", installed or in the working folder).
        correction, level, cap, floor, count_rejected: mismatch correction; unset means the
            correction's default.
        aggregate: how the loss is averaged; unset means the objective's own.
        max_tokens: the constant that aggregate "seq-mean-token-sum-norm" divides by; of no other.
        kl_coef: weight of the KL to the policy that the run started from, which is kept frozen beside
            the learner: one more copy of its weights in the compute dtype. 0 keeps none.
        kl_kind: estimator of that KL, see `kl_estimate`. Unset: "k3" in the loss, "k1" in the reward.
        kl_in: add the KL to the "loss", token by token, or take a response's sum off its "reward",
            before the group's baseline (one more pass of the learner over the batch).
        entropy_coef: weight of the entropy bonus in the loss, nats; 0 gives entropies no gradient.
        advantage_scale / advantage_baseline: see `group_advantages`.
        drop_uninformative: leave out groups whose rewards, before penalties, are all equal (DAPO's
            filter; `rollout.resample` fills the batch up again).
        overlong_filter: responses cut off at `rollout.max_tokens` do not train (DAPO); they still
            count in their group's baseline.
        overlong_buffer: tokens below `rollout.max_tokens` over which the reward falls by up to
            `overlong_coef` (DAPO eq. 13); 0 turns the penalty off.
        overlong_coef: the penalty of a response that is cut off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: str = "tbpo"
    module: str | None = None
    parameters: dict[str, Any] = {}
    correction: str = "none"
    level: str | None = None
    cap: float | None = Field(default=None, gt=0, allow_inf_nan=True)
    floor: float | None = Field(default=None, ge=0)
    count_rejected: bool | None = None
    aggregate: str | None = None
    max_tokens: int | None = Field(default=None, ge=1)
    kl_coef: float = Field(default=0.0, ge=0)
    kl_kind: Literal["k1", "k2", "k3"] | None = None
    kl_in: Literal["loss", "reward"] = "loss"
    entropy_coef: float = Field(default=0.0, ge=0)
    advantage_scale: Literal["std", "none"] = "std"
    advantage_baseline: Literal["mean", "leave-one-out"] = "mean"
    drop_uninformative: bool = False
    overlong_filter: bool = False
    overlong_buffer: int = Field(default=0, ge=0)
    overlong_coef: float = Field(default=1.0, gt=0)

    @model_validator(mode="after")
    def _known(self) -> ObjectiveConfig:
        if self.module is not None:
            self._import(self.module)
        get_objective(self.name).split(self.parameters)
        self._try()
        return self

    def _import(self, module: str) -> None:
        try:
            import_from_here(module, "module")
        # pydantic reports a ValueError by the setting's name, and lets others through as tracebacks.
        except ImportError as error:
            raise ValueError(str(error)) from error

    @property
    def kl_estimator(self) -> str:
        """`kl_kind` with its default filled in."""
        return self.kl_kind or ("k1" if self.kl_in == "reward" else "k3")

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
        names = ("correction", "level", "cap", "floor", "count_rejected", "aggregate", "max_tokens")
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
        old_logprobs: what the ratio starts from. "learner": its own log-probabilities at the version
            that sampled. "rollout": the engine's (bypass): one pass less with several optimizer steps
            a batch, and the ratio then corrects the mismatch as well, within the clip range;
            corrections of the mismatch have nothing left to do and are refused. mismatch/* then
            compares each response with the pass it trained in.
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
    old_logprobs: Literal["learner", "rollout"] = "learner"
    routing_replay: Literal["none", "R2", "R3"] = "none"
