"""Our settings where verl's own configs are frozen dataclasses: the `_target_`s of the overrides."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from verl.workers.config import FSDPEngineConfig, PolicyLossConfig

from lowbitrl.integrations.verl.losses import register
from lowbitrl.integrations.verl.settings import LearnerSettings, objective_of
from lowbitrl.trainer.config import ObjectiveConfig


@dataclass
class LowbitEngineConfig(FSDPEngineConfig):
    """verl's FSDP engine config with `lowbitrl`, a `LearnerSettings` as data."""

    lowbitrl: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        super().__post_init__()
        _ = self.settings

    @property
    def settings(self) -> LearnerSettings:
        """The settings, checked."""
        return LearnerSettings.model_validate(_plain(self.lowbitrl))


@dataclass
class LowbitPolicyLoss(PolicyLossConfig):
    """verl's policy loss config with `lowbitrl`: parameters of the objective, correction, module."""

    lowbitrl: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        objective = self.objective
        # A module of the user's may have registered it a moment ago, in this process alone.
        register(objective.name)

    @property
    def objective(self) -> ObjectiveConfig:
        """The objective, checked."""
        return objective_of(self.loss_mode, _plain(self.lowbitrl))


def _plain(value: Any) -> Any:
    """Hydra's containers as Python's."""
    if hasattr(value, "items"):
        return {str(k): _plain(v) for k, v in value.items()}
    return (
        [_plain(v) for v in value] if isinstance(value, list | tuple) or hasattr(value, "_content") else value
    )
