"""What of a recipe a verl run honours, and the grammar of what it is told.

Every key of a recipe is in exactly one of three places: an override of `overrides`, `ELSEWHERE` (it decides
nothing of a verl run, with where to say it instead), or `REFUSED` (its default is what verl does, another
value raises). A test holds the three against the config.
"""

from __future__ import annotations

import json
import re
from typing import Any

from lowbitrl.config import RunConfig

ELSEWHERE = {
    "task": "prompts and rewards of a verl run are its own data.* and reward.*",
    "model.device": "verl places its workers",
    "threads": "as OMP_NUM_THREADS in the environment of the workers",
    "rollout.keep": "trainer.rollout_data_dir of verl keeps completions",
    "evaluation.k": "verl reports its own pass@k and best@k",
    "evaluation.count": "data.val_max_samples of verl",
    "checkpoint.final": "verl saves by trainer.save_freq",
    "trainer.logprob_chunk": "verl scores as actor.entropy_from_logits_with_chunking says",
    "sentinel.sequences": "verl's sentinel watches every sampled token; 0 turns it off",
    "tracking.mode": "WANDB_MODE in the environment",
}
REFUSED = {
    "rollout.record_routing": "its FSDP engine replays no routes",
    "rollout.resample": "fill batches up with verl's own algorithm.filter_groups.*",
    "objective.drop_uninformative": "leave such groups out with verl's own algorithm.filter_groups.*",
    "objective.overlong_filter": "use a reward manager of verl's that masks truncated responses",
    "objective.overlong_buffer": "use verl's reward.reward_manager.name=dapo and its overlong_buffer_cfg",
    "objective.overlong_coef": "use verl's reward.reward_manager.name=dapo and its overlong_buffer_cfg",
    "trainer.routing_replay": "its FSDP engine replays no routes",
    "recipe.activation_scale": "static scales are not fed to its rollouts; use 'token'",
}


def refuse(config: RunConfig) -> None:
    """Raise for a setting whose value verl cannot honour; ValueError."""
    default = type(config).model_construct(task=config.task)
    for key, remedy in REFUSED.items():
        value, usual = (_at(c, key) for c in (config, default))
        if value != usual:
            raise ValueError(f"{key}={value!r} is not for verl ({remedy}); leave it at {usual!r}")
    per_prompt, mini = config.rollout.samples, config.trainer.mini_batch
    if mini % per_prompt:
        raise ValueError(
            f"trainer.mini_batch={mini} responses is no whole number of prompts of rollout.samples={per_prompt}, "
            f"in which verl counts; use {max(mini // per_prompt, 1) * per_prompt}"
        )
    own, scale = config.objective.advantage_baseline, config.objective.advantage_scale
    if own == "leave-one-out" and scale == "std":
        raise ValueError(
            "objective.advantage_baseline='leave-one-out' is verl's rloo, which divides by no standard deviation; "
            "set objective.advantage_scale='none'"
        )


def hydra(value: Any) -> str:
    """A value in the grammar of Hydra's overrides, without spaces, so that a shell passes it whole.

    Example: hydra({"eps": 1e-15, "at": "a b"}) -> "{eps:1e-15,at:'a b'}" (strings are quoted where they must be).
    """
    if value is None or isinstance(value, bool):
        return json.dumps(value)
    if isinstance(value, dict):
        return "{" + ",".join(f"{key}:{hydra(v)}" for key, v in value.items()) + "}"
    if isinstance(value, list | tuple):
        return "[" + ",".join(hydra(v) for v in value) + "]"
    if isinstance(value, int | float):
        return repr(value)
    text = str(value)
    if re.fullmatch(r"[A-Za-z_/][\w./-]*", text) and text.lower() not in (
        "true",
        "false",
        "null",
        "nan",
        "inf",
    ):
        return text
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return f"'{escaped}'"


def _at(config: Any, key: str) -> Any:
    for part in key.split("."):
        config = getattr(config, part)
    return config
