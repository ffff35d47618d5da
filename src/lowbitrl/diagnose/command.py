"""The `diagnose` command: which model, whose prompts, which recipes; then measure, write, summarize."""

from __future__ import annotations

import copy
import json
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase
from transformers.utils import logging

from lowbitrl.config import RunConfig, load_config
from lowbitrl.diagnose.engines import engine_chain, write_chain
from lowbitrl.diagnose.lab import Load
from lowbitrl.diagnose.report_diagnosis import lines, write_diagnosis
from lowbitrl.diagnose.run import DiagnoseConfig, Say, diagnose
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe
from lowbitrl.runs import environment
from lowbitrl.tasks import Prompt, TaskConfig, make_task
from lowbitrl.tasks.file import read_rows
from lowbitrl.tasks.task import encode_prompt

ENGINES = ("embedded", "vllm")
# Sums in words: every instruct model writes a few dozen tokens about them.
DEFAULT_TASK = TaskConfig(name="chain_sum", options={"min_terms": 2, "max_terms": 3})
PROMPTS = 256
MAX_PROMPT_TOKENS = 512


@dataclass(frozen=True, kw_only=True)
class Request:
    """What was asked for on the command line.

    Attributes:
        recipe: diagnosed where `recipes` is empty.
        recipes: TOML files; the first is diagnosed, by its rollout.kernels, all are candidates. Without
            `prompts` and `task`, the first one's task gives the prompts.
        prompts: .jsonl, .parquet or .txt (one prompt a line). task: a reasoning-gym name.
    """

    model: str
    out: Path
    recipe: Recipe = field(default_factory=lambda: Recipe(rollout="nvfp4"))
    recipes: tuple[Path, ...] = ()
    prompts: Path | None = None
    task: str | None = None
    engine: str = "embedded"
    dtype: str = "bfloat16"


def run_diagnose(request: Request, config: DiagnoseConfig, device: torch.device, say: Say) -> Path:
    """Measure, write the report folder, print the short form.

    Returns:
        report.html; with engine="vllm", which scores the same tokens everywhere instead, engines.json.

    Raises:
        ValueError: an engine that is not there, two sources of prompts, no prompts; what `diagnose` refuses.
        OSError: a model, recipe or file that cannot be read.
    """
    check_engine(request.engine)
    started = time.perf_counter()
    # A model is loaded for every arithmetic; a bar for each would bury what is said here.
    logging.disable_progress_bar()
    runs = [load_config(path) for path in request.recipes]
    load, tokenizer = loader(request, device)
    ids = prompt_ids(request, runs, tokenizer)
    recipe = runs[0].recipe if runs else request.recipe
    if request.engine == "vllm":
        found = engine_chain(request.model, recipe, ids, config, request.dtype, device, say)
        return write_chain(found, request.out, say)
    if runs:
        config = config.model_copy(update={"kernels": runs[0].rollout.kernels})
    found = diagnose(load, ids, recipe, config, [run.recipe for run in runs[1:]], say)
    found["setup"] = {
        "model": request.model,
        "prompts": _source(request, runs),
        "dtype": request.dtype,
        "device": str(device),
        "config": config.model_dump(),
        "environment": environment(device),
        "seconds in all": time.perf_counter() - started,
    }
    report = write_diagnosis(json.loads(json.dumps(found)), request.out)
    for line in lines(found):
        say(line)
    say(f"{time.perf_counter() - started:.0f} seconds in all; report {report}")
    return report


def loader(request: Request, device: torch.device) -> tuple[Load, PreTrainedTokenizerBase]:
    """What gives fresh models to a `Lab`, and the tokenizer; the compute dtype's is read once and copied."""
    kept, tokenizer = load_model(request.model, request.dtype)

    def load(attention: str, dtype: torch.dtype | None) -> PreTrainedModel:
        if dtype not in (None, kept.dtype):
            return load_model(request.model, dtype, device, attn_implementation=attention)[0]
        model = copy.deepcopy(kept).to(device)  # type: ignore[arg-type]
        model.set_attn_implementation(attention)
        return model

    return load, tokenizer


def check_engine(name: str) -> None:
    """Raise ValueError for an engine that `diagnose` cannot sample with."""
    if name not in ENGINES:
        raise ValueError(
            f"engine={name!r} is not available to diagnose in this version, which samples with "
            f"{' or '.join(ENGINES)}; leave --engine out. For completions of another engine score them with "
            "lowbitrl.diagnose.measure(learner, prompts, completions)"
        )


def recipe_files(named: Sequence[Path], rest: Sequence[str]) -> tuple[Path, ...]:
    """The files of `--recipes a.toml b.toml`: `named` by the option, the others left over on the line.

    Raises:
        ValueError: something left over that is no recipe file.
    """
    odd = [word for word in rest if word.startswith("-") or Path(word).suffix != ".toml"]
    if odd or (rest and not named):
        raise ValueError(
            f"cannot read {' '.join(odd or rest)!r}; write diagnose MODEL --recipes a.toml b.toml"
        )
    return (*named, *map(Path, rest))


def prompt_ids(
    request: Request, runs: Sequence[RunConfig], tokenizer: PreTrainedTokenizerBase
) -> list[list[int]]:
    """Token ids of the prompts to sample from.

    Raises:
        ValueError: both `prompts` and `task`, or a file without prompts.
    """
    if request.prompts is not None and request.task is not None:
        raise ValueError("prompts and task both name where prompts come from; give one")
    if request.prompts is not None:
        return [encode_prompt(tokenizer, p, MAX_PROMPT_TOKENS) for p in _read(request.prompts)]
    task = make_task(_task_config(request, runs))
    return [task.encode(tokenizer, prompt) for prompt in task.prompts("train", 0, PROMPTS)]


def _task_config(request: Request, runs: Sequence[RunConfig]) -> TaskConfig:
    if request.task is not None:
        return TaskConfig(name=request.task)
    return runs[0].task if runs else DEFAULT_TASK


def _source(request: Request, runs: Sequence[RunConfig]) -> str:
    if request.prompts is not None:
        return str(request.prompts)
    return _task_config(request, runs).model_dump_json(exclude_defaults=True)


def _read(path: Path) -> list[Prompt]:
    if path.suffix == ".txt":
        texts = [line for line in path.read_text().splitlines() if line.strip()]
        rows = [{"prompt": text} for text in texts]
    else:
        # Nothing is rewarded here; a task of a file must name a scorer all the same.
        rows = read_rows(TaskConfig(path=str(path), scorer="last-number"))
    if not rows:
        raise ValueError(f"{path} holds no prompts; give at least one")
    return [_prompt(path, number, row) for number, row in enumerate(rows)]


def _prompt(path: Path, number: int, row: dict) -> Prompt:
    content = row.get("messages") or row.get("prompt")
    if not content:
        raise ValueError(f"{path}, row {number} has neither prompt nor messages; it has {sorted(row)}")
    messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
    return Prompt(id=f"{path.name}/{number}", messages=tuple(messages))
