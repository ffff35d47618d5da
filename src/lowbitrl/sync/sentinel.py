"""A watch over every update: the same few sequences scored on both sides after each publish.

The two sides are never equal bit for bit, so the run is its own yardstick: a value far over the
median of the run so far means that an update went wrong, and the layer to blame is looked for.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Callable, Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from lowbitrl.quant.recipe import Recipe
from lowbitrl.quant.stacks import is_expert_module
from lowbitrl.sync.manifest import Manifest, entries_of


class SentinelConfig(BaseModel):
    """When a mismatch counts as a fault.

    Attributes:
        sequences: how many held-out prompts are scored; 0 turns the sentinel off.
        factor: how many times the median of the last `window` values is too much.
        window: values of the running median.
        slack: nats that are never a fault, whatever the floor (floors near 0 would alarm on noise);
            by default 0.1, and 0.3 where the rollout rounds activations: there one other code in an early
            layer ends as far (0.126 nats on SmolLM2-135M in NVFP4, in a run whose floor was 0).
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    sequences: int = Field(default=4, ge=0)
    factor: float = Field(default=4.0, gt=1)
    slack: float | None = Field(default=None, ge=0)
    window: int = Field(default=16, ge=1)

    def allowance(self, recipe: Recipe) -> float:
        """`slack`, or its default under this recipe, in nats."""
        if self.slack is not None:
            return self.slack
        return 0.1 if recipe.precision.activation is None else 0.3


class SentinelError(RuntimeError):
    """Learner and engine are further apart than this run's own floor explains."""


class Sentinel:
    """Keeps the run's floor and raises when an update jumps over it.

    Args:
        recipe: what the rollout rounds, which `config.slack` goes by.
        sequences: token ids; those of a single token have nothing to score and are left out.
        learner_scores / engine_scores: sequences -> log-probabilities, (len - 1,) each.
        history: values of earlier steps, when a run is resumed.
    """

    def __init__(
        self,
        config: SentinelConfig,
        recipe: Recipe,
        sequences: Sequence[Sequence[int]],
        learner_scores: Callable[[Sequence[Sequence[int]]], list[Tensor]],
        engine_scores: Callable[[Sequence[Sequence[int]]], list[Tensor]],
        history: Sequence[float] = (),
    ) -> None:
        self.config, self.slack = config, config.allowance(recipe)
        self.sequences = [sequence for sequence in sequences if len(sequence) > 1]
        self.learner_scores = learner_scores
        self.engine_scores = engine_scores
        self.history = list(history)

    def check(self, version: int, blame: Callable[[], str]) -> float:
        """Mean absolute mismatch on the watched sequences, in nats.

        Raises:
            SentinelError: over the floor, or NaN or Inf at any step; `blame` is asked for the layer.
        """
        if not self.sequences:
            return 0.0
        pairs = zip(self.learner_scores(self.sequences), self.engine_scores(self.sequences), strict=True)
        return self.judge(
            float(torch.cat([(a.cpu() - b.cpu()).abs() for a, b in pairs]).mean()), version, blame
        )

    def judge(self, value: float, version: int, blame: Callable[[], str]) -> float:
        """`value` nats against the floor, of which it becomes a part; raises as `check`."""
        # Before there is a floor anything finite is within it.
        floor = statistics.median(self.history) if self.history else math.inf
        if not math.isfinite(value) or value > max(floor * self.config.factor, self.slack):
            raise SentinelError(
                f"version {version}: learner and engine differ by {value:.3f} nats on the watched sequences, the "
                f"run's floor is {floor:.3f}. {blame()}"
            )
        self.history = [*self.history, value][-self.config.window :]
        return value


def blame_bytes(manifest: Manifest, served: dict[str, Tensor]) -> str | None:
    """The first tensor that the engine serves otherwise than it was published."""
    for name, entry in manifest.entries.items():
        if name in served and entries_of({name: served[name]})[name] != entry:
            return f"{name} is served with other bytes than were published"
    return None


@torch.no_grad()
def blame_layer(learner: nn.Module, rollout: nn.Module, run: Callable[[nn.Module], object]) -> str:
    """The plan's module whose outputs part most on the two sides beyond what its inputs already differ.

    Args:
        run: feeds the watched sequences to a model.
    """
    ours, theirs = _traces(learner, run), _traces(rollout, run)
    growth = {
        name: _distance(ours[name][1], theirs[name][1]) - _distance(ours[name][0], theirs[name][0])
        for name in ours
    }
    worst = max(growth, key=lambda name: growth[name])
    return f"{worst} adds most of the difference ({growth[worst]:.2f} of its output's norm); its bytes agree"


def _traces(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, tuple[Tensor, Tensor]]:
    traces: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str) -> Callable[[nn.Module, tuple[Tensor, ...], Tensor], None]:
        return lambda module, inputs, output: traces.__setitem__(name, (inputs[0].float(), output.float()))

    watched = [(n, m) for n, m in model.named_modules() if isinstance(m, nn.Linear) or is_expert_module(m)]
    handles = [module.register_forward_hook(record(name)) for name, module in watched]
    try:
        run(model)
    finally:
        for handle in handles:
            handle.remove()
    return traces


def _distance(ours: Tensor, theirs: Tensor) -> float:
    return float((ours - theirs).norm() / ours.norm().clamp(min=1e-12))
