"""What the overrides tell verl's workers of ours, checked before any work; no verl is imported here."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from lowbitrl.objectives.corrections import LEAVE_DENOMINATOR, REWEIGHTS
from lowbitrl.objectives.registry import get_objective
from lowbitrl.quant import Plan
from lowbitrl.quant.recipe import Kernels
from lowbitrl.rollout.vllm.planned import from_config
from lowbitrl.sync.sentinel import SentinelConfig
from lowbitrl.trainer.config import ObjectiveConfig

PREFIX = "lowbitrl_"
"""Of our objectives among verl's policy losses, some of which bear the same names."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class PlanFile(_Section):
    """A plan that `lowbitrl verl overrides` wrote, and its digest."""

    plan_file: str
    digest: str

    def load(self) -> Plan:
        """The plan; ValueError where the file is not the one that the overrides were printed with."""
        plan = from_config({"plan_file": self.plan_file, "digest": self.digest})
        if any(layer.static for layer in plan.layers):
            raise ValueError("the plan has static activation scales, which verl's rollouts are not fed")
        return plan


class LearnerSettings(PlanFile):
    """`actor.fsdp_config.lowbitrl`.

    Attributes:
        sentinel: when the mismatch of a sampled batch stops the run; None watches nothing.
        decompose_every: batches between two decompositions of the mismatch; 0 turns them off.
        decompose_rows: responses a rank that are decomposed, a pass a part of the chain each.
    """

    sentinel: SentinelConfig | None = SentinelConfig()
    decompose_every: int = Field(default=10, ge=0)
    decompose_rows: int = Field(default=4, ge=1)


class RolloutSettings(PlanFile):
    """`rollout.engine_kwargs.lowbitrl`: the embedded engine as verl's rollout."""

    scheduler: Literal["auto", "batch", "graph", "continuous"] = "auto"
    max_batch: int = Field(default=256, ge=1)
    keep_decoded_experts: bool = False
    kernels: Kernels = "learner"


def objective_of(loss_mode: str, settings: Mapping[str, Any]) -> ObjectiveConfig:
    """The objective behind a verl policy loss of ours, with `actor.policy_loss.lowbitrl`'s settings.

    Raises:
        ValueError: an unknown objective or parameter; a correction that verl's denominators cannot carry.
    """
    given = {key: value for key, value in settings.items() if value is not None}
    objective = ObjectiveConfig(name=loss_mode.removeprefix(PREFIX), **given)
    counts = objective.count_rejected
    leaves = objective.correction in LEAVE_DENOMINATOR if counts is None else not counts
    if leaves and objective.correction != "none":
        raise ValueError(
            f"correction={objective.correction!r} takes rejected tokens out of the denominator, which verl counts "
            "before the loss runs; set count_rejected=true, or reject with algorithm.rollout_correction.rollout_rs, "
            "which edits verl's own mask"
        )
    return objective


def needs_rollout_logprobs(objective: ObjectiveConfig) -> bool:
    """Whether the loss compares learner and sampler."""
    own = get_objective(objective.name)
    weighs = own.mismatch is not None and own.split(objective.parameters)[1].get("tis_cap") is not None
    return weighs or objective.correction != "none"


def reweights(objective: ObjectiveConfig) -> bool:
    """Whether the loss brings a mismatch weight of its own."""
    weighs = needs_rollout_logprobs(objective) and objective.correction == "none"
    return weighs or objective.correction in REWEIGHTS
