"""The RL loop: sample with the low-bit engine, reward, learn, publish the bytes, watch both sides."""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from pathlib import Path

import torch

from lowbitrl import collect, held_out
from lowbitrl.assemble import Parts, assemble
from lowbitrl.config import RunConfig
from lowbitrl.distributed import ranks
from lowbitrl.engines import Say
from lowbitrl.runs import PHASES, RunFolder
from lowbitrl.tasks import make_task
from lowbitrl.tracking import trackers
from lowbitrl.trainer import checkpoint

Metrics = dict[str, float]


def train(config: RunConfig, resume: bool = False, say: Say = print) -> Path:
    """Run `config` from its start, or from the newest whole checkpoint with `resume`.

    Returns:
        The run folder.

    Raises:
        ValueError, OSError: everything a config, task, model or folder can be refused for, before
            any work is done.
        NonFiniteError, SentinelError: the run went wrong; the last good checkpoint is named.
    """
    with ranks.together():
        return _train(config, resume, say if ranks.is_first() else _nothing)


def _train(config: RunConfig, resume: bool, say: Say) -> Path:
    if config.threads:
        torch.set_num_threads(config.threads)
    task = make_task(config.task, config.rewards)
    with (
        closing(task),
        RunFolder(config.out, resume, writes=ranks.is_first()) as run,
        _interruptible(say) as interrupted,
        ExitStack() as stack,
    ):
        parts, start = assemble(config, task, run, resume, say)
        stack.callback(parts.close)
        settings = config.model_dump(mode="json")
        if ranks.is_first():
            run.listeners += stack.enter_context(trackers(config.tracking, run.path, start, settings))
        if start == 0:
            if config.evaluation.every:
                say("evaluating the start on held-out prompts")
            before = _evaluation(config, parts, 0)
            run.log({"step": -1} | before)
            if before:
                say(f"start  {_pass_at_1(before)}")
        began = time.perf_counter()
        for step in range(start, config.trainer.steps):
            with _naming_the_checkpoint(parts, run, step):
                metrics = _step(config, parts, run, step)
            # At most one step is ever logged that no checkpoint holds: a kill loses no more.
            parts.saver.wait()
            run.log({"step": step} | metrics)
            left = (time.perf_counter() - began) / (step + 1 - start) * (config.trainer.steps - step - 1)
            say(f"{_progress(step, config.trainer.steps, metrics)}{_remaining(left)}")
            if step == start:
                say("first step: " + ", ".join(f"{lap} {metrics[f'timing/{lap}']:.1f}s" for lap in PHASES))
            for notice in parts.notices():
                say(notice)
            # Ctrl-C may reach ranks in different steps: what one was asked, all do.
            asked = ranks.any_rank(interrupted())
            if _due(config, step + 1) or asked:
                saved = parts.save(step + 1, metrics.get("eval/pass@1"))
                if asked:
                    parts.saver.wait()
                    say(f"interrupted after step {step + 1}; saved {saved}: continue with --resume")
                    break
        parts.saver.wait()
        return run.path


def _nothing(line: str) -> None:
    """What ranks other than the first say."""


def _step(config: RunConfig, parts: Parts, run: RunFolder, step: int) -> Metrics:
    """One turn: sample, reward, update, publish, watch."""
    clock = _Clock()
    in_reward = config.objective.kl_coef > 0 and config.objective.kl_in == "reward"
    with parts.watch.over("sampling"):
        samples = collect.sample(config, parts.sampler, parts.task, parts.tokenizer, step, parts.drawn)
    parts.drawn = samples.consumed
    clock.lap("gen")
    parts.news += samples.faults.news(parts.known_faults)
    batch, metrics = collect.to_batch(config, samples, parts.trainer.reference_kl if in_reward else None)
    if len(batch):
        metrics |= parts.trainer.update(batch, step)
    clock.lap("update")
    metrics |= parts.publish(step + 1)
    clock.lap("publish")
    metrics |= _evaluation(config, parts, step + 1) | parts.restarts()
    clock.lap("eval")
    run.log_rollouts(step, collect.rows(samples, config.rollout.keep))
    tokens = sum(len(c.token_ids) for c in samples.completions)
    return metrics | clock.laps | {"timing/tokens_per_s": tokens / max(clock.laps["timing/gen"], 1e-9)}


def _due(config: RunConfig, done: int) -> bool:
    if done == config.trainer.steps:
        return config.checkpoint.final
    return bool(config.checkpoint.every) and done % config.checkpoint.every == 0


def _evaluation(config: RunConfig, parts: Parts, done: int) -> Metrics:
    """Held-out metrics at the start, every `evaluation.every` steps and at the end."""
    every = config.evaluation.every
    if not every or (done % every and done != config.trainer.steps):
        return {}
    with parts.watch.over("an evaluation"):
        metrics = held_out.score(config, parts.sampler, parts.task, parts.tokenizer).metrics()
    if config.evaluation.unquantized and done in (0, config.trainer.steps):
        # Not watched: it loads a model first, which gives no sign of life.
        plain = held_out.score_unquantized(config, parts.trainer.model, parts.task, parts.tokenizer)
        metrics |= plain.metrics("eval_unquantized")
    return metrics


def _progress(step: int, steps: int, metrics: Metrics) -> str:
    parts = [f"step {step + 1}/{steps}", f"reward {metrics['reward/mean']:.3f}"]
    if "mismatch/abs_mean" in metrics:
        parts += [f"mismatch {metrics['mismatch/abs_mean']:.4f}", f"grad {metrics['actor/grad_norm']:.2f}"]
    if "eval/pass@1" in metrics:
        parts.append(_pass_at_1(metrics))
    seconds = sum(metrics[f"timing/{lap}"] for lap in PHASES)
    return "  ".join([*parts, f"{seconds:.1f}s"])


def _pass_at_1(metrics: Metrics) -> str:
    return f"pass@1 {metrics['eval/pass@1']:.3f} +- {metrics['eval/pass@1_error']:.3f} (standard error)"


def _remaining(seconds: float) -> str:
    """Time left, from the mean of this call's steps; evaluations and saves are in it as they came."""
    if seconds <= 0:
        return ""
    return f"  about {seconds:.0f}s left" if seconds < 120 else f"  about {seconds / 60:.0f} min left"


class _Clock:
    """Seconds between laps, as timing/* metrics."""

    def __init__(self) -> None:
        self.laps: Metrics = {}
        self._last = time.perf_counter()

    def lap(self, name: str) -> None:
        now = time.perf_counter()
        self.laps[f"timing/{name}"], self._last = now - self._last, now


@contextmanager
def _naming_the_checkpoint(parts: Parts, run: RunFolder, step: int) -> Iterator[None]:
    """A run that stops says where it stands: the step, and what can be resumed."""
    try:
        yield
    except RuntimeError as error:
        with suppress(OSError):
            parts.saver.wait()
        good, _ = checkpoint.latest(run.checkpoints)
        where = f"last good checkpoint: {good.path}" if good else "no checkpoint was written before it"
        error.add_note(f"step {step + 1} stopped the run and wrote nothing; {where}")
        raise


@contextmanager
def _interruptible(say: Say) -> Iterator[Callable[[], bool]]:
    """The first Ctrl-C lets the step finish and saves; the second one stops at once."""
    asked = False

    def handler(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        say("interrupt: finishing this step, then saving; once more to stop at once")

    try:
        previous = signal.signal(signal.SIGINT, handler)
    except ValueError:  # not the main thread: signals belong to whoever runs it
        yield lambda: False
        return
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, previous)
