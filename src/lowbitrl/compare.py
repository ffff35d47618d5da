"""The same seeds and prompts under several recipes, then one report with the seeds as bands.

On a CPU runs follow each other in this process. On a GPU as many run side by side, each in a
process of its own, as their weights and optimizer states leave room for.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import torch

from lowbitrl.config import RunConfig, load_config
from lowbitrl.diagnose.report import write_report
from lowbitrl.engines import Say, pick_device
from lowbitrl.loop import train
from lowbitrl.models import load_skeleton

# BF16 learner 2, rollout 2, fp32 masters 4, their gradients 4, two Adam moments 8.
BYTES_PER_PARAMETER = 20
BYTES_PER_REFERENCE_PARAMETER = 2
CONTEXT_BYTES = 3 << 30
LOGIT_COPIES = 3  # see trainer.logprobs: fp32 (chunk, vocabulary) matrices alive at once


@dataclass(frozen=True)
class Job:
    """One run: a recipe file with its overrides, and what they come to."""

    recipe: Path
    overrides: tuple[str, ...]
    config: RunConfig

    @property
    def folder(self) -> Path:
        """Where it writes."""
        return Path(self.config.out)

    @property
    def resumes(self) -> bool:
        """Whether its folder holds a run already."""
        return (self.folder / "config.json").is_file()


def run_compare(
    recipes: Sequence[Path],
    out: Path,
    seeds: Sequence[int],
    overrides: Sequence[str] = (),
    jobs: int = 0,
    resume: bool = False,
    say: Say = print,
) -> Path:
    """Run every recipe with every seed into folders of `out`, and report on all of them.

    Args:
        overrides: given to every recipe, as in `train`.
        jobs: runs at a time; 0 takes one on a CPU and what fits on a GPU.
        resume: continue runs that `out` holds; otherwise they are refused.

    Raises:
        ValueError: recipes with equal names or other prompts, no seeds; what `load_config` refuses.
        FileExistsError: a folder holds a run and `resume` is off.
        RuntimeError: a run failed, with its last lines.
    """
    planned = plan_jobs(recipes, out, seeds, overrides)
    for job in planned:
        if job.resumes and not resume:
            raise FileExistsError(f"{job.folder} holds a run already; give --resume or another --out")
    count = jobs or jobs_that_fit(planned)
    say(f"{len(planned)} runs, {count} at a time")
    if count == 1:
        for job in planned:
            say(f"\n== {job.folder.name} ==")
            train(job.config, job.resumes, say=say)
    else:
        with ThreadPoolExecutor(count) as pool:
            list(pool.map(lambda job: run_apart(job, say), planned))
    return write_report([job.folder for job in planned], out)


def plan_jobs(
    recipes: Sequence[Path], out: Path, seeds: Sequence[int], overrides: Sequence[str]
) -> list[Job]:
    """One job a recipe and seed, checked before any runs.

    Raises:
        ValueError: see `run_compare`.
    """
    names = [path.stem for path in recipes]
    if not seeds or len(set(names)) != len(names):
        raise ValueError(
            f"recipes {names}, seeds {list(seeds)}: give at least one seed, and recipes of different names"
        )
    planned = []
    for path in recipes:
        for seed in seeds:
            folder = out / (f"{path.stem}-seed{seed}" if len(seeds) > 1 else path.stem)
            own = (*overrides, "--seed", str(seed), "--out", str(folder))
            planned.append(Job(path, own, load_config(path, own)))
    check_same_prompts(planned)
    return planned


def check_same_prompts(planned: Sequence[Job]) -> None:
    """Refuse jobs of different tasks or prompt counts (ValueError, naming both)."""
    first = planned[0]
    for job in planned[1:]:
        for what, ours, theirs in (
            ("task", first.config.task, job.config.task),
            ("rollout.prompts", first.config.rollout.prompts, job.config.rollout.prompts),
        ):
            if ours != theirs:
                raise ValueError(
                    f"{first.recipe} and {job.recipe} have other {what}: {ours} and {theirs}; a comparison needs the "
                    "same prompts, override it for both"
                )


def jobs_that_fit(planned: Sequence[Job]) -> int:
    """Runs that a GPU's free memory holds side by side, at least 1; 1 on a CPU."""
    device = pick_device(planned[0].config.model.device)
    if device.type != "cuda":
        return 1
    free, _ = torch.cuda.mem_get_info(device)
    return max(1, min(len(planned), free // max(bytes_needed(job.config) for job in planned)))


def bytes_needed(config: RunConfig) -> int:
    """About what a run holds on a GPU: weights, masters, optimizer, logits of a chunk, and a context."""
    model = load_skeleton(config.model.name)
    each = BYTES_PER_PARAMETER + BYTES_PER_REFERENCE_PARAMETER * bool(config.objective.kl_coef)
    logits = LOGIT_COPIES * 4 * config.trainer.logprob_chunk * model.config.get_text_config().vocab_size
    # Activations and key/value cache of a micro-batch, as if every layer kept its inputs in BF16.
    width = model.config.get_text_config().hidden_size * model.config.get_text_config().num_hidden_layers
    activations = 2 * 16 * width * config.trainer.micro_batch_tokens
    return each * sum(p.numel() for p in model.parameters()) + logits + activations + CONTEXT_BYTES


def run_apart(job: Job, say: Say) -> None:
    """One run in a process of its own, its lines prefixed with its name.

    Raises:
        RuntimeError: it failed, with its last lines.
    """
    resume = ["--resume"] if job.resumes else []
    command = [sys.executable, "-m", "lowbitrl", "train", str(job.recipe), *resume, *job.overrides]
    last: list[str] = []
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) as process:
        assert process.stdout is not None
        for line in process.stdout:
            last = [*last, line.rstrip()][-15:]
            say(f"{job.folder.name}: {line.rstrip()}")
    if process.returncode:
        raise RuntimeError(f"{job.folder.name} ended with code {process.returncode}:\n" + "\n".join(last))


def parse_seeds(words: str) -> list[int]:
    """ "0,1,2" or "0-2" to numbers.

    Raises:
        ValueError: anything else.
    """
    if found := re.fullmatch(r"(\d+)-(\d+)", words):
        return list(range(int(found[1]), int(found[2]) + 1))
    if re.fullmatch(r"\d+(,\d+)*", words):
        return [int(word) for word in words.split(",")]
    raise ValueError(f"seeds {words!r}: write 0,1,2 or 0-2")
