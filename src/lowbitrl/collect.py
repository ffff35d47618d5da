"""One step's rollouts: prompts sampled, rewarded, and turned into what the learner trains on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowbitrl.config import RunConfig
from lowbitrl.distributed import ranks
from lowbitrl.faults import Faults, count_not_utf8, settle, sound
from lowbitrl.objectives import group_advantages, soft_overlong_penalty
from lowbitrl.rollout import Completion
from lowbitrl.rollout.embedded import prompt_seed
from lowbitrl.rollout.engine import Sampler
from lowbitrl.tasks import Prompt, Task, completion_text
from lowbitrl.trainer import TrainingBatch


@dataclass(frozen=True)
class Samples:
    """One step's completions with their rewards, (len(completions),) fp32, as the task gave them.

    A prompt's group is those of its completions that are here: what was lost has left it.

    rounds: how often prompts were drawn for them; consumed: prompts drawn since the start of the run.
    """

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    texts: list[str]
    scores: list[dict[str, float]]
    rewards: Tensor
    rounds: int = 1
    consumed: int = 0
    faults: Faults = field(default_factory=Faults)

    def __add__(self, later: Samples) -> Samples:
        """Both, those of a later round after these."""
        moved = [replace(c, prompt_index=c.prompt_index + len(self.prompts)) for c in later.completions]
        return Samples(
            self.prompts + later.prompts,
            self.prompt_ids + later.prompt_ids,
            self.completions + moved,
            self.texts + later.texts,
            self.scores + later.scores,
            torch.cat([self.rewards, later.rewards]),
            self.rounds + later.rounds,
            later.consumed,
            self.faults + later.faults,
        )

    @property
    def groups(self) -> Tensor:
        """(len(completions),) int64: the prompt of each."""
        return torch.tensor([c.prompt_index for c in self.completions], dtype=torch.long)


def sample(
    config: RunConfig, engine: Sampler, task: Task, tokenizer: PreTrainedTokenizerBase, step: int, start: int
) -> Samples:
    """Sample and reward the prompts of `step`; the same step of the same run draws the same numbers.

    Args:
        start: prompts drawn by the steps before. With `rollout.resample` a step draws on until
            enough of its groups have rewards that differ, or its rounds are used up.
    """
    samples = _round(config, engine, task, tokenizer, (step,), start)
    while samples.rounds <= config.rollout.resample and _informative(samples) < config.rollout.prompts:
        samples += _round(config, engine, task, tokenizer, (step, samples.rounds), samples.consumed)
    if not _informative(samples):
        samples.faults.first["reward/zero_variance_groups"] = (
            f"step {step + 1} learns nothing from rewards: in every group they are all equal"
        )
    return samples


def _round(
    config: RunConfig,
    engine: Sampler,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    seed: tuple[int, ...],
    start: int,
) -> Samples:
    count = config.rollout.prompts
    prompts = task.prompts("train", start, count)
    ids = [task.encode(tokenizer, prompt) for prompt in prompts]
    seeds = [prompt_seed(config.seed, *seed, prompt.id) for prompt in prompts]
    sampled = engine.generate(ids, config.rollout.samples, config.rollout.sampling(), seeds)
    faults = Faults()
    names = [prompt.id for prompt in prompts]
    completions = sound(sampled, names, config.rollout.most_lost, faults)
    texts = [completion_text(tokenizer, c.token_ids) for c in completions]
    count_not_utf8(texts, faults)
    pairs = [(prompts[c.prompt_index], text) for c, text in zip(completions, texts, strict=True)]
    scored = ranks.merge(ranks.gather(task.score_all(ranks.share(pairs))))
    settled = settle(scored, task.scorer, config.rewards.on_failure, faults)
    kept = [(*row, s) for *row, s in zip(completions, texts, settled, strict=True) if s is not None]
    completions, texts, scores = (
        (list(column) for column in zip(*kept, strict=True)) if kept else ([], [], [])
    )
    rewards = torch.tensor([score[task.scorer] for score in scores])
    return Samples(prompts, ids, completions, texts, scores, rewards, consumed=start + count, faults=faults)


def _informative(samples: Samples) -> int:
    groups = group_advantages(samples.rewards, samples.groups)
    return groups.num_groups - groups.num_zero_variance


def to_batch(
    config: RunConfig, samples: Samples, kl: Callable[[TrainingBatch], Tensor] | None = None
) -> tuple[TrainingBatch, dict[str, float]]:
    """Penalties on the rewards, advantages within groups, and the batch the learner sees.

    Args:
        kl: KL of each response to the reference, where the objective charges it to the reward.
    """
    objective = config.objective
    penalties, metrics = _penalties(config, samples, kl)
    groups = group_advantages(
        samples.rewards - penalties,
        samples.groups,
        scale=objective.advantage_scale,
        baseline=objective.advantage_baseline,
    )
    # What a group can teach is asked of the task's own rewards: a penalty makes every group differ.
    raw = group_advantages(samples.rewards, samples.groups)
    chosen = list(range(len(samples.completions)))
    if objective.drop_uninformative:
        informative = [i for i in chosen if bool(raw.informative[i])]
        chosen = informative[: config.rollout.prompts * config.rollout.samples]
    trained = len(chosen)
    if objective.overlong_filter:
        # Out of the batch, out of every denominator: the same as out of the mask, for less work.
        chosen = [i for i in chosen if not samples.completions[i].truncated]
    lengths = [len(c.token_ids) for c in samples.completions]
    # Not every scorer applies to every prompt: an answer that is no number has no number scorer.
    names = {name: None for scores in samples.scores for name in scores}
    scored = {name: [s[name] for s in samples.scores if name in s] for name in names}
    return _batch(samples, chosen, groups.advantages), {
        f"reward/{name}": _mean(values) for name, values in scored.items()
    } | metrics | samples.faults.metrics() | {
        "reward/mean": _mean(samples.rewards.tolist()),
        "reward/zero_variance_groups": raw.num_zero_variance / max(raw.num_groups, 1),
        "rollout/tokens_mean": _mean(lengths),
        "rollout/truncated": _mean([c.truncated for c in samples.completions]),
        "rollout/rounds": float(samples.rounds),
        "rollout/batch_filled": trained / (config.rollout.prompts * config.rollout.samples),
        "rollout/overlong_filtered": (trained - len(chosen)) / max(trained, 1),
    }


def _penalties(
    config: RunConfig, samples: Samples, kl: Callable[[TrainingBatch], Tensor] | None
) -> tuple[Tensor, dict[str, float]]:
    """What goes off each reward, (len(completions),), and its metrics."""
    objective, total, metrics = config.objective, torch.zeros_like(samples.rewards), {}
    if objective.overlong_buffer:
        lengths = torch.tensor([len(c.token_ids) for c in samples.completions])
        limits = {"max_length": config.rollout.max_tokens, "buffer": objective.overlong_buffer}
        overlong = -objective.overlong_coef * soft_overlong_penalty(lengths, **limits)
        total, metrics["reward/overlong_penalty"] = total + overlong, float(overlong.mean())
    if kl is not None:
        spent = kl(_batch(samples, list(range(len(samples.completions))), torch.zeros_like(total)))
        total, metrics["reward/kl"] = total + objective.kl_coef * spent, float(spent.mean())
    return total, metrics


def _batch(samples: Samples, chosen: list[int], advantages: Tensor) -> TrainingBatch:
    picked = [samples.completions[i] for i in chosen]
    return TrainingBatch.build(
        [samples.prompt_ids[c.prompt_index] for c in picked],
        [c.token_ids for c in picked],
        [c.rollout_logprobs for c in picked],
        advantages[chosen],
        _routes(picked),
    )


def _routes(completions: list[Completion]) -> list[Tensor] | None:
    routes = [c.routes for c in completions if c.routes is not None]
    return routes if routes and len(routes) == len(completions) else None


def rows(samples: Samples, count: int) -> Iterator[dict[str, Any]]:
    """`count` completions, evenly spread, as lines for the run folder."""
    stride = max(1, len(samples.completions) // max(count, 1))
    for i in range(0, min(len(samples.completions), stride * count), stride):
        completion = samples.completions[i]
        prompt = samples.prompts[completion.prompt_index]
        yield asdict(replace(completion, routes=None)) | {
            "prompt": prompt.id,
            "prompt_token_ids": samples.prompt_ids[completion.prompt_index],
            "text": samples.texts[i],
            "answer": prompt.answer,
            "scores": samples.scores[i],
        }


def _mean(values: list[Any]) -> float:
    return sum(map(float, values)) / max(len(values), 1)
