"""What may change when a run goes on, and what may not."""

from __future__ import annotations

from typing import Any

from lowbitrl.config import RunConfig, validate
from lowbitrl.runs import RunFolder
from lowbitrl.tasks import RewardsConfig

# What may change when a run goes on: how long, how often it looks and saves, where it writes.
FREE_TO_CHANGE = frozenset(
    {"out", "threads", "distributed", "evaluation", "checkpoint", "sentinel", "trainer.steps"}
    | {"rollout.most_lost"}
    | {f"rewards.{name}" for name in RewardsConfig.model_fields if name != "on_failure"}
)


def check_same_run(config: RunConfig, run: RunFolder) -> None:
    """Refuse to go on with another run's settings: the metrics would be of two runs."""
    # Through the configs: a setting that is newer than the run has its default in it.
    started = validate(run.read_json("config.json"))
    before, now = (_flat(c.model_dump(mode="json")) for c in (started, config))
    differing = [
        f"{name} is {now.get(name)!r} now and was {before.get(name)!r}"
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name) and not {name, name.partition(".")[0]} & FREE_TO_CHANGE
    ]
    if differing:
        raise ValueError(
            f"{'; '.join(differing)} when {run.path} started; resume with its own settings (give the folder in "
            "place of the recipe: lowbitrl train FOLDER --resume), or set out to another folder"
        )


def _flat(config: dict[str, Any]) -> dict[str, Any]:
    """Settings by dotted name: sections are one level deep."""
    flat: dict[str, Any] = {}
    for name, value in config.items():
        flat |= {f"{name}.{key}": v for key, v in value.items()} if isinstance(value, dict) else {name: value}
    return flat
