"""A run as a TOML file: every section is the frozen config of the part it configures.

seed = 0
out = "runs/quads"
[model]
name = "demo"
[recipe]
rollout = "nvfp4"
learner = "weights"
residual = 0.5
"""

from __future__ import annotations

import difflib
import json
import tomllib
from collections.abc import Sequence
from dataclasses import is_dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from lowbitrl.distributed.sharding import DistributedConfig
from lowbitrl.quant.recipe import Kernels, Recipe
from lowbitrl.rollout.types import LOWEST_TEMPERATURE, Sampling
from lowbitrl.sync.sentinel import SentinelConfig
from lowbitrl.tasks import RewardsConfig, TaskConfig
from lowbitrl.tracking import TrackingConfig
from lowbitrl.trainer.config import ObjectiveConfig, TrainerConfig
from lowbitrl.trainer.optim import OptimizerConfig

COMMAND_OPTIONS = (
    "resume",
    "restarts",
    "recipe",
    "checkpoint",
    "out",
    "layout",
    "calibration",
    "seeds",
    "jobs",
    "size",
    "ranks",
    "prompt-tokens",
)
"""Of the commands that take overrides: what a mistyped option may have meant."""


class ConfigError(ValueError):
    """A run that cannot be meant as written: what was given, the rule, the remedy."""


class _Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)


class ModelConfig(_Section):
    """Which policy is trained.

    Attributes:
        name: local checkpoint folder, hub id, or "demo" (SmolLM2-135M-Instruct).
        dtype: compute dtype of both sides; masters are fp32 unless optimizer.masters says otherwise.
        device: "auto" takes CUDA where there is one.
    """

    name: str = "demo"
    dtype: Literal["bfloat16", "float32"] = "bfloat16"
    device: str = Field(default="auto", pattern=r"^(auto|cpu|cuda(:\d+)?)$")


class RolloutConfig(_Section):
    """How many samples a step, and how they are drawn.

    Attributes:
        prompts / samples: prompts a step, completions of each (the papers' N).
        resample: most further rounds of `prompts` prompts that a step may sample until that many
            groups have rewards that differ (DAPO's dynamic sampling); what is over is not trained
            on. Needs objective.drop_uninformative. 0 trains on what one round gives.
        max_tokens / temperature: see `Sampling`.
        scheduler / max_batch / record_routing: of the embedded engine. "auto" records by "batch".
        keep_decoded_experts: hold a mixture's experts in the compute dtype beside their bytes, in
            place of decoding those that have tokens in every forward pass: faster, at BF16's memory.
        kernels: "learner": linears and experts multiply decoded weights as the learner does, the same
            bits on the same input. "low-bit": kernels read the bytes (4-bit weights, BF16 compute,
            CUDA): experts always, linears for as few tokens a pass as it was measured to be faster for;
            their rounding is one more difference between the sides, part of the engine's drift.
        keep: completions written to the run folder each step.
        most_lost: share of a step's completions that may be lost (logits not finite, given up by the engine, without
            a token; they leave their groups and are counted under `faults/`); more stop the run.
        engine: "embedded", "vllm" in this process, or "vllm-server" in a process of its own (docs/vllm.md); the
            settings of the embedded engine above then have no say.
        vllm: further arguments of vLLM's LLM, or flags of its server, such as {max_model_len = 2048}.
        vllm_devices: CUDA_VISIBLE_DEVICES of a server; unset shares those of this process. Under torchrun every process
            has a server: on its own GPU, or on its part of those that are named here.
        timeout: seconds of silence after which an engine counts as hung; 0 waits for ever. A server that keeps a
            request for longer is restarted; an engine in this process that moves no token for longer ends the
            process with code 3, to be resumed (`train --restarts`).
        restarts: of a server, in one call; the next loss stops the run.
    """

    prompts: int = Field(default=16, ge=1)
    samples: int = Field(default=16, ge=1)
    resample: int = Field(default=0, ge=0, le=1000)
    max_tokens: int = Field(default=128, ge=1)
    temperature: float = Field(default=1.0, ge=LOWEST_TEMPERATURE)
    scheduler: Literal["auto", "batch", "graph", "continuous"] = "auto"
    max_batch: int = Field(default=256, ge=1)
    record_routing: bool = False
    keep_decoded_experts: bool = False
    kernels: Kernels = "learner"
    keep: int = Field(default=8, ge=0)
    most_lost: float = Field(default=0.5, ge=0, le=1)
    engine: Literal["embedded", "vllm", "vllm-server"] = "embedded"
    vllm: dict[str, Any] = Field(default_factory=dict)
    vllm_devices: str | None = Field(default=None, pattern=r"^\d+(,\d+)*$")
    timeout: float = Field(default=600.0, ge=0)
    restarts: int = Field(default=3, ge=0)

    @model_validator(mode="after")
    def _engine_can(self) -> RolloutConfig:
        if self.vllm and self.engine == "embedded":
            raise ValueError(f"vllm={self.vllm} is for engine='vllm', but engine is {self.engine!r}")
        if self.vllm_devices is not None and self.engine != "vllm-server":
            raise ValueError(
                f"vllm_devices={self.vllm_devices!r} is for engine='vllm-server', but engine is {self.engine!r}"
            )
        if self.record_routing and self.engine != "embedded":
            raise ValueError("record_routing=true: vLLM hands out no routes here; use engine='embedded'")
        if self.kernels == "low-bit" and self.engine == "vllm":
            raise ValueError("kernels='low-bit' is the embedded engine's; vLLM has kernels of its own")
        if self.kernels == "low-bit" and self.keep_decoded_experts:
            raise ValueError(
                "kernels='low-bit' reads experts' bytes, keep_decoded_experts=true holds decoded copies to multiply "
                "by; set one of them"
            )
        return self

    def sampling(self) -> Sampling:
        """The engine's sampling parameters."""
        return Sampling(max_tokens=self.max_tokens, temperature=self.temperature)


class EvaluationConfig(_Section):
    """Held-out evaluation with the rollout engine.

    Attributes:
        every: training steps between evaluations; 0 turns them off. The start and the end count.
        count: held-out prompts; 0 takes all. samples: completions of each. k: of pass@k.
        unquantized: at the start and the end, score the trained weights served in `model.dtype` too
            (`eval_unquantized/...`): what of a low-bit score is lost in serving, not in learning.
    """

    every: int = Field(default=0, ge=0)
    count: int = Field(default=0, ge=0)
    samples: int = Field(default=4, ge=1)
    k: int = Field(default=4, ge=1)
    unquantized: bool = False

    @model_validator(mode="after")
    def _k_of_n(self) -> EvaluationConfig:
        if self.k > self.samples:
            raise ValueError(f"k={self.k} of pass@k is more than samples={self.samples}; raise samples")
        if self.unquantized and not self.every:
            raise ValueError(
                "unquantized=true adds to held-out scores, and every=0 turns those off; set every"
            )
        return self


class CheckpointConfig(_Section):
    """When to save.

    Attributes:
        every: steps between checkpoints; 0 saves only at the end and on interruption.
        keep: newest checkpoints kept, beside the one whose held-out pass@1 is highest.
        final: whether to save at the end.
    """

    every: int = Field(default=0, ge=0)
    keep: int = Field(default=2, ge=1)
    final: bool = True


class RunConfig(_Section):
    """Everything that decides a run."""

    seed: int = Field(default=0, ge=0, lt=2**31)
    """Of sampling; the order of prompts has task.seed."""
    out: str = Field(default="runs/run", min_length=1)
    """The run folder."""
    threads: int = Field(default=0, ge=0, le=1024)
    """CPU threads for torch; 0 leaves torch's choice."""
    model: ModelConfig = ModelConfig()
    task: TaskConfig
    rewards: RewardsConfig = RewardsConfig()
    recipe: Recipe = Recipe()
    rollout: RolloutConfig = RolloutConfig()
    objective: ObjectiveConfig = ObjectiveConfig()
    trainer: TrainerConfig = TrainerConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    distributed: DistributedConfig = DistributedConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()
    sentinel: SentinelConfig = SentinelConfig()
    tracking: TrackingConfig = TrackingConfig()

    @model_validator(mode="after")
    def _combinations(self) -> RunConfig:
        size = self.rollout.prompts * self.rollout.samples
        if self.trainer.mini_batch and size % self.trainer.mini_batch:
            raise ValueError(
                f"trainer.mini_batch={self.trainer.mini_batch} does not divide the batch of {size} responses "
                f"(rollout.prompts * rollout.samples); the last optimizer step of a batch would be smaller: set it "
                f"to {_nearest_divisor(size, self.trainer.mini_batch)}, or to 0 for one step a batch"
            )
        if self.evaluation.every and self.task.held_out < max(self.evaluation.count, 1):
            raise ValueError(
                f"evaluation.every={self.evaluation.every} evaluates "
                f"{self.evaluation.count or 'all'} held-out prompts, "
                f"task.held_out={self.task.held_out} keeps fewer; raise task.held_out, or set evaluation.every=0"
            )
        if self.rollout.resample and not self.objective.drop_uninformative:
            raise ValueError(
                f"rollout.resample={self.rollout.resample} fills up what objective.drop_uninformative leaves out, "
                "which is off; set objective.drop_uninformative=true, or rollout.resample=0"
            )
        if self.objective.overlong_buffer > self.rollout.max_tokens:
            raise ValueError(
                f"objective.overlong_buffer={self.objective.overlong_buffer} is more than "
                f"rollout.max_tokens={self.rollout.max_tokens}: every response would be punished; lower it"
            )
        if self.rollout.samples == 1:
            raise ValueError("rollout.samples=1 makes every group's advantage 0; give at least 2")
        if self.trainer.routing_replay == "R3" and not self.rollout.record_routing:
            raise ValueError(
                "trainer.routing_replay='R3' replays the rollout's experts, which are not recorded; "
                "set rollout.record_routing=true"
            )
        if (
            self.rollout.scheduler == "continuous"
            and self.recipe.compensates
            and self.recipe.scope == "batch"
        ):
            raise ValueError(
                "rollout.scheduler='continuous' mixes prefill and decode rows of changing requests, so a batch-wide "
                "residual would not be reproducible; use scheduler='batch' or recipe.residual_scope='token'"
            )
        return self


_SECTIONS: dict[str, Any] = {
    name: field.annotation
    for name, field in RunConfig.model_fields.items()
    if isinstance(field.annotation, type)
    and (hasattr(field.annotation, "model_fields") or is_dataclass(field.annotation))
}


def _nearest_divisor(size: int, wanted: int) -> int:
    return min((d for d in range(1, size + 1) if size % d == 0), key=lambda d: abs(d - wanted))


def load_config(path: Path | str, overrides: Sequence[str] = ()) -> RunConfig:
    """Read a TOML recipe and apply dotted overrides ("--trainer.steps", "50").

    A run folder stands for the settings that it was started with, and for itself as `out`.

    Raises:
        ConfigError: the file is missing or no TOML; an unknown key (the nearest known one is
            named); a value or combination that is refused, with the remedy.
    """
    path = Path(path)
    try:
        data = _run_settings(path) if path.is_dir() else tomllib.loads(path.read_text(encoding="utf-8-sig"))
    except FileNotFoundError as error:
        raise ConfigError(_nothing_there(path)) from error
    except (OSError, ValueError) as error:
        kind = "a run's settings" if path.is_dir() else "TOML"
        raise ConfigError(f"{path} cannot be read as {kind}: {error}") from error
    if not data:
        raise ConfigError(
            f"{path} sets nothing; a recipe needs at least a [task]: start from one of recipes/*.toml"
        )
    return _overridden(data, overrides)


def unnamed_run(overrides: Sequence[str] = ()) -> RunConfig:
    """The settings of a run that no recipe names: defaults and dotted overrides, on a task that is never asked.

    Raises:
        ConfigError: as `load_config`, for an override.
    """
    return _overridden({"task": {"name": "chain_sum"}}, overrides)


def _overridden(data: dict[str, Any], overrides: Sequence[str]) -> RunConfig:
    for key, value in parse_overrides(overrides):
        _assign(data, key.split("."), value)
    return validate(data)


def _nothing_there(path: Path) -> str:
    if not path.is_dir():
        return f"{path} does not exist; recipes ship in recipes/*.toml"
    inside = ", ".join(sorted(file.name for file in path.glob("*.toml"))[:8])
    hint = f"it has {inside}" if inside else "recipes ship in recipes/*.toml"
    return f"{path} is a folder without config.json, so it holds no run; give one recipe file: {hint}"


def _run_settings(folder: Path) -> dict[str, Any]:
    return json.loads((folder / "config.json").read_text()) | {"out": str(folder)}


def validate(data: dict[str, Any]) -> RunConfig:
    """`RunConfig` from plain data; errors as `ConfigError`."""
    try:
        return RunConfig.model_validate(data)
    except ValidationError as error:
        raise ConfigError("\n".join(_explain(e) for e in error.errors())) from error


def parse_overrides(arguments: Sequence[str]) -> list[tuple[str, Any]]:
    """("--a.b", "3") or ("--a.b=3") to [("a.b", 3)]. Values are TOML; what is no TOML is a string.

    Raises:
        ConfigError: an argument that is no option, or an option without a value.
    """
    pairs, rest = [], list(arguments)
    while rest:
        argument = rest.pop(0)
        if not argument.startswith("--"):
            raise ConfigError(f"{argument!r} is not an option; overrides look like --trainer.steps 50")
        key, equals, value = argument[2:].partition("=")
        _check_option(key)
        if not equals:
            if not rest or (rest[0].startswith("--") and len(rest[0]) > 2):
                raise ConfigError(f"--{key} needs a value, as in --{key} 50")
            value = rest.pop(0)
        pairs.append((key, _toml_value(value)))
    return pairs


def _check_option(key: str) -> None:
    """Refuse a name that is neither a setting nor of a command's own options."""
    first, dot, _ = key.partition(".")
    if dot or first in RunConfig.model_fields:
        return
    dotted = {f"{name}.{k}" for name, kind in _SECTIONS.items() for k in _fields_of(kind)}
    leaf = [name for name in sorted(dotted) if name.partition(".")[2] == first]
    near = leaf or difflib.get_close_matches(key, [*COMMAND_OPTIONS, *RunConfig.model_fields, *dotted], n=1)
    hint = f"did you mean {' or '.join(f'--{name}' for name in near)}?" if near else "see --help"
    raise ConfigError(f"--{key} is not an option; {hint} Settings have a section: --trainer.steps 50")


def _toml_value(text: str) -> Any:
    try:
        return tomllib.loads(f"value = {text}")["value"]
    except tomllib.TOMLDecodeError:
        return text


def _assign(data: dict[str, Any], path: list[str], value: Any) -> None:
    for part in path[:-1]:
        child = data.setdefault(part, {})
        if not isinstance(child, dict):
            raise ConfigError(f"{'.'.join(path)}: {part} is a value, not a section")
        data = child
    if len(path) == 1 and path[0] in _SECTIONS and not isinstance(value, dict):
        keys = sorted(_fields_of(_SECTIONS[path[0]]))
        raise ConfigError(
            f"--{path[0]} {value!r}: {path[0]} is a section, not a value; set one of its keys, as in "
            f"--{path[0]}.{keys[0]}; it has {', '.join(keys)}"
        )
    data[path[-1]] = value


def _explain(error: Any) -> str:
    path = ".".join(str(part) for part in error["loc"])
    if error["type"] in ("extra_forbidden", "unexpected_keyword_argument"):
        known = _known_keys(error["loc"][:-1])
        near = difflib.get_close_matches(str(error["loc"][-1]), known, n=1)
        hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(sorted(known))}"
        return f"{path} is not a known key; {hint}"
    if error["loc"] == ("task",) and error["type"] == "missing":
        return "task is missing; a recipe needs a [task] with a name or a path: see docs/settings.md"
    message = error["msg"].removeprefix("Value error, ")
    if error["type"] == "value_error":
        return f"{path}: {message}" if path else message
    if error["type"] == "string_type":
        message += f"; quote it twice on a command line, as in --{path} '\"{error['input']}\"'"
    return f"{path} = {error['input']!r}: {message}"


def _known_keys(path: Sequence[Any]) -> list[str]:
    fields: Any = RunConfig
    for part in path:
        fields = fields.model_fields[part].annotation
    return _fields_of(fields)


def _fields_of(section: Any) -> list[str]:
    return list(getattr(section, "model_fields", None) or section.__dataclass_fields__)
