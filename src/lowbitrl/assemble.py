"""A run's parts, built from its config: both sides of the policy, what feeds them, what watches them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbitrl import held_out
from lowbitrl.config import RunConfig
from lowbitrl.distributed import ranks
from lowbitrl.distributed.shipping import ship
from lowbitrl.distributed.split import SplitSampler
from lowbitrl.engines import Engines, Say, make_engine, pick_device, prepare_rollout
from lowbitrl.evaluation import Evaluation
from lowbitrl.models import load_model
from lowbitrl.quant import (
    Plan,
    prepare,
    restore_scales,
    static_scales,
)
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.engine import Sampler
from lowbitrl.rollout.vllm.engine import VllmEngine
from lowbitrl.rollout.vllm.server import VllmServerEngine
from lowbitrl.runs import RunFolder, environment
from lowbitrl.same_run import check_same_run
from lowbitrl.sync.manifest import Manifest
from lowbitrl.sync.publisher import Publication, changed_codes, publish
from lowbitrl.sync.sentinel import Sentinel, blame_bytes, blame_layer
from lowbitrl.tasks import Task, check_lengths, make_task
from lowbitrl.trainer import Trainer, checkpoint
from lowbitrl.trainer.calibration import calibrate_on
from lowbitrl.trainer.logprobs import response_logprobs
from lowbitrl.watch import Watch

UNMOVED_UPDATES = 5


@dataclass
class Parts:
    """The assembled run: both sides of the policy, and what feeds and watches them.

    Attributes:
        sampler: what rollouts are asked of: the engine, or all ranks' engines together.
        drawn: prompts sampled from so far.
    """

    tokenizer: PreTrainedTokenizerBase
    task: Task
    plan: Plan
    trainer: Trainer
    engine: Engines
    sampler: Sampler
    sentinel: Sentinel
    served: Served
    saver: checkpoint.Saver
    drawn: int
    unmoved: int = 0
    watch: Watch = field(default_factory=lambda: Watch(0, Path()))
    known_faults: set[str] = field(default_factory=set)
    news: list[str] = field(default_factory=list)

    def publish(self, version: int) -> dict[str, float]:
        """Encode once, serve the same bytes, compare both sides."""
        with self.watch.over("an update of the engine"):
            self.served, changed = serve(self.trainer.model, self.engine, version, self.served)
            gap = self.sentinel.check(version, lambda: _blame(self))
        self.unmoved = 0 if changed or not self.plan.by_parameter else self.unmoved + 1
        return {"quant/changed_codes": changed, "sync/sentinel": gap, "sync/version": float(version)}

    def restarts(self) -> dict[str, float]:
        """How often the engine was restarted since the last call, as a metric; each is told."""
        losses: list[str] = []
        if isinstance(self.engine, VllmServerEngine):
            losses, self.engine.losses = self.engine.losses, losses
        losses = [loss for of_rank in ranks.gather(losses) for loss in of_rank]
        self.news += [f"engine restarted, its version given to it again: {why}" for why in losses]
        return {"faults/engine_restarts": float(len(losses))}

    def close(self) -> None:
        """End what runs beside the loop for the run's sake."""
        self.saver.close()
        if isinstance(self.engine, VllmServerEngine):
            self.engine.close()

    def notices(self) -> list[str]:
        """What a person should be told once: first faults, and that updates have stopped reaching the rollout."""
        told, self.news = self.news, []
        if self.unmoved != UNMOVED_UPDATES:
            return told
        return [
            *told,
            f"quant/changed_codes was 0 for {UNMOVED_UPDATES} updates: no quantized weight has moved far enough to "
            "change its code, so the rollout samples from the same weights; raise optimizer.learning_rate, or wait "
            "for a warm-up to end",
        ]

    def save(self, step: int, score: float | None) -> Path:
        """Begin to write the checkpoint from which step `step` can start.

        Args:
            score: held-out pass@1 of these weights, where they were evaluated.
        """
        state = {
            "score": score,
            "plan": self.plan.digest,
            "sentinel": self.sentinel.history,
            "drawn": self.drawn,
            "input_amax": [static_scales(model) for model in _static_models(self.trainer)],
        }
        return self.saver.save(step, self.trainer.optimizer, state)


def assemble(config: RunConfig, task: Task, run: RunFolder, resume: bool, say: Say) -> tuple[Parts, int]:
    """Load, prepare and connect everything; returns the parts and the first step to run."""
    if resume:
        check_same_run(config, run)
    if config.evaluation.unquantized and ranks.joined():
        raise ValueError(
            "evaluation.unquantized makes a whole copy of the model in one process, and torchrun shares it out; leave "
            "it off and score a checkpoint: lowbitrl evaluate RECIPE --checkpoint FOLDER --recipe.rollout bf16 ..."
        )
    device = pick_device(config.model.device)
    scheduler = f", scheduler {config.rollout.scheduler}" if config.rollout.engine == "embedded" else ""
    say(
        f"device {device}, compute {config.model.dtype}, engine {config.rollout.engine}{scheduler}{_company()}"
    )
    # A learner that is to be spread out waits on the host: its layers go to the device as shards.
    waits = "cpu" if ranks.joined() else device
    learner, tokenizer = load_model(config.model.name, config.model.dtype, waits)
    check_lengths(task, tokenizer, config.rollout.prompts)
    plan = prepare(learner, config.recipe, "learner")
    engine = make_engine(config, plan, learner, tokenizer, device, say)
    say(plan.summary())
    for reason in plan.batch_dependence:
        say(f"not batch-invariant, a completion depends on what is sampled with it: {reason}")
    trainer = Trainer(
        learner,
        config.trainer,
        config.objective,
        config.optimizer,
        temperature=config.rollout.temperature,
        seed=config.seed,
        distributed=config.distributed,
        device=device,
    )
    saved = _resume_point(run, plan, trainer, say) if resume else None
    start = saved.state["step"] if saved else 0
    run.write_json("config.json", config.model_dump(mode="json"))
    if not saved:
        run.write_json("plan.json", plan.to_dict())
        run.write_json("environment.json", environment(device) | {"split": task.split_report()})
    run.rewind(start if saved else -1)
    if not saved:
        for model in _static_models(trainer):
            _calibrate(config, task, tokenizer, model)
    served, _ = serve(learner, engine, start)
    watched = task.prompts("held_out", 0, min(config.sentinel.sequences, task.held_out_count))
    sentinel = Sentinel(
        config.sentinel,
        plan.recipe,
        [task.encode(tokenizer, prompt) for prompt in watched],
        lambda sequences: ranks.from_first(_learner_scores(trainer, sequences)),
        lambda sequences: ranks.from_first(engine.score(sequences, config.rollout.temperature)),
        saved.state["sentinel"] if saved else (),
    )
    # Runs from before rollout.resample drew the same number of prompts every step.
    drawn = saved.state.get("drawn", start * config.rollout.prompts) if saved else 0
    saver = checkpoint.Saver(run.checkpoints, config.checkpoint.keep)
    sampler = engine if ranks.size() == 1 else SplitSampler(engine)
    watch = Watch(_silence(config), run.path / f"hang-{ranks.rank()}.txt")
    return Parts(
        tokenizer, task, plan, trainer, engine, sampler, sentinel, served, saver, drawn, watch=watch
    ), start


def _silence(config: RunConfig) -> float:
    """Seconds after which this process counts as hung; a server is timed out and restarted by its engine."""
    return 0.0 if config.rollout.engine == "vllm-server" else config.rollout.timeout


@dataclass(frozen=True)
class Served:
    """The version that the engine serves: its manifest, and its tensors unless they were let go on the way."""

    manifest: Manifest
    published: Publication | None = None


def serve(
    learner: PreTrainedModel, engine: Engines, version: int, before: Served | None = None
) -> tuple[Served, float]:
    """Publish the learner's weights to the engine; also the share of quantized codes that differ from `before`."""
    if ranks.joined():
        assert not isinstance(engine, VllmEngine)
        manifest, changed = ship(learner, engine, version)
        return Served(manifest), changed
    published = publish(learner, version)
    changed = changed_codes(before.published if before else None, published)
    engine.update(published.stream(), published.manifest)
    return Served(published.manifest, published), changed


def _company() -> str:
    return f", {ranks.size()} process{'es' * (ranks.size() > 1)}" if ranks.joined() else ""


def _static_models(trainer: Trainer) -> list[PreTrainedModel]:
    """The learner and, where there is one, its frozen reference: each has static scales of its own."""
    return [trainer.model] if trainer.reference is None else [trainer.model, trainer.reference]


def _calibrate(
    config: RunConfig, task: Task, tokenizer: PreTrainedTokenizerBase, model: PreTrainedModel
) -> None:
    """The first static scales, from the prompts of the first step; later ones come from what trains."""
    prompts = [task.encode(tokenizer, p) for p in task.prompts("train", 0, config.rollout.prompts)]
    calibrate_on(model, prompts, config.trainer.micro_batch_tokens)


def _resume_point(run: RunFolder, plan: Plan, trainer: Trainer, say: Say) -> checkpoint.Checkpoint | None:
    saved, damaged = ranks.from_first(checkpoint.latest(run.checkpoints) if ranks.is_first() else (None, []))
    for line in damaged:
        say(line)
    if saved is None:
        say("no whole checkpoint found: starting from the beginning")
        return None
    if saved.state["plan"] != plan.digest:
        raise ValueError(
            f"{saved.path} was trained under plan {saved.state['plan']}, this recipe resolves to {plan.digest}; "
            "resume with the recipe in the run's config.json"
        )
    saved.restore(trainer.optimizer)
    # Checkpoints of before static scales have none, and their plans no site for one.
    models = _static_models(trainer)
    for model, scales in zip(models, saved.state.get("input_amax", [{}] * len(models)), strict=True):
        restore_scales(model, scales)
    say(f"resumed from {saved.path}")
    return saved


def _blame(parts: Parts) -> str:
    engine = parts.engine
    if not isinstance(engine, EmbeddedEngine):
        return "vLLM verified the bytes it took; score the same recipe with rollout.engine='embedded' for the layer"
    ids = torch.tensor([parts.sentinel.sequences[0]])
    return blame_bytes(parts.served.manifest, engine.served()) or blame_layer(
        parts.trainer.model,
        engine.model,
        lambda model: model(input_ids=ids.to(engine.model.device)),
    )


def _learner_scores(trainer: Trainer, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
    with torch.no_grad():
        scores, _ = response_logprobs(
            trainer.model,
            [s[:1] for s in sequences],
            [s[1:] for s in sequences],
            temperature=trainer.temperature,
        )
    return [row[: len(s) - 1] for row, s in zip(scores, sequences, strict=True)]


def evaluate_recipe(config: RunConfig, saved: Path | None, say: Say) -> Evaluation:
    """Held-out figures of the recipe's model, or of a run's checkpoint, under its rollout precision.

    Raises:
        ValueError: the checkpoint is damaged or of another model.
    """
    task = make_task(config.task, config.rewards)
    device = pick_device(config.model.device)
    model, tokenizer = load_model(config.model.name, config.model.dtype, device)
    if saved is not None:
        checkpoint.load_masters(saved, model)
    say(prepare_rollout(config, model, config.recipe, say).summary())
    if saved is not None:
        restore_scales(model, checkpoint.state_of(saved).get("input_amax", [{}])[0])
    else:
        _calibrate(config, task, tokenizer, model)
    engine = EmbeddedEngine(model, config.rollout.scheduler, config.rollout.max_batch)
    return held_out.score(config, engine, task, tokenizer)
