"""What of a recipe a verl run honours, and the grammar of what it is told.

A key of a recipe is `HONOURED` (an override carries it) or `ELSEWHERE` (it decides nothing of a verl run;
where to say it instead). Any other, named in `REFUSED` with a remedy or not, raises unless it has its default.
"""

from __future__ import annotations

import json
import re
from dataclasses import fields, is_dataclass
from typing import Any

from lowbitrl.config import RunConfig
from lowbitrl.quant import Recipe

HONOURED = {
    *("seed", "out", "model.name", "model.dtype", "distributed.cpu_offload"),
    *(f"recipe.{f.name}" for f in fields(Recipe) if f.name != "activation_scale"),
    *(f"rollout.{key}" for key in ("prompts", "samples", "max_tokens", "temperature", "engine", "vllm")),
    *(f"rollout.{key}" for key in ("scheduler", "max_batch", "keep_decoded_experts", "kernels")),
    *(f"objective.{key}" for key in ("name", "module", "parameters", "correction", "level", "cap", "floor")),
    *(f"objective.{key}" for key in ("count_rejected", "aggregate", "max_tokens", "entropy_coef")),
    *(f"objective.{key}" for key in ("kl_coef", "kl_kind", "kl_in", "advantage_scale", "advantage_baseline")),
    *(f"trainer.{key}" for key in ("steps", "mini_batch", "epochs", "micro_batch_tokens", "layout")),
    *("trainer.gradient_checkpointing", "trainer.old_logprobs"),
    *(
        f"optimizer.{key}"
        for key in ("name", "learning_rate", "muon_learning_rate", "betas", "eps", "momentum")
    ),
    *(f"optimizer.{key}" for key in ("weight_decay", "masters", "warmup_steps", "max_grad_norm")),
    *("evaluation.every", "evaluation.samples", "checkpoint.every", "checkpoint.keep"),
    *("sentinel.factor", "sentinel.slack", "sentinel.window"),
    *("tracking.tensorboard", "tracking.wandb", "tracking.project"),
}
ELSEWHERE = {
    "task": "prompts and rewards of a verl run are its own data.* and reward.*",
    "rewards": "verl runs its own rewards, as reward.* says",
    "rollout.most_lost": "verl replaces failed groups by trainer.v1.sampler.sync_refill_failed_groups",
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
    default = _flat(type(config).model_construct(task=config.task))
    for key, value in _flat(config).items():
        told = {key, key.partition(".")[0]} & (HONOURED | ELSEWHERE.keys())
        if not told and value != default[key]:
            remedy = REFUSED.get(key, "no override of verl's carries it")
            raise ValueError(f"{key}={value!r} is not for verl ({remedy}); leave it at {default[key]!r}")
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


def _flat(config: RunConfig) -> dict[str, Any]:
    """Values by dotted name: sections are one level deep."""
    flat: dict[str, Any] = {}
    for name in type(config).model_fields:
        value = getattr(config, name)
        parts = {f: getattr(value, f) for f in getattr(type(value), "model_fields", {})}
        parts |= {f.name: getattr(value, f.name) for f in fields(value)} if is_dataclass(value) else {}
        flat |= {f"{name}.{key}": part for key, part in parts.items()} if parts else {name: value}
    return flat
