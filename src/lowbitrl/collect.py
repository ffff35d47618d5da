"""One step's rollouts: prompts sampled, rewarded, and turned into what the learner trains on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedTokenizerBase

from lowbitrl.config import RunConfig
from lowbitrl.objectives import group_advantages
from lowbitrl.rollout import Completion
from lowbitrl.rollout.embedded import prompt_seed
from lowbitrl.rollout.engine import Engine
from lowbitrl.tasks import Prompt, Task, completion_text
from lowbitrl.trainer import TrainingBatch


@dataclass(frozen=True)
class Samples:
    """One step's completions with their rewards, (len(completions),) fp32."""

    prompts: list[Prompt]
    prompt_ids: list[list[int]]
    completions: list[Completion]
    texts: list[str]
    scores: list[dict[str, float]]
    rewards: Tensor


def sample(
    config: RunConfig, engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase, step: int
) -> Samples:
    """Sample and reward the prompts of `step`; the same step of the same run draws the same numbers."""
    count = config.rollout.prompts
    prompts = task.prompts("train", step * count, count)
    ids = [task.encode(tokenizer, prompt) for prompt in prompts]
    seeds = [prompt_seed(config.seed, step, prompt.id) for prompt in prompts]
    completions = engine.generate(ids, config.rollout.samples, config.rollout.sampling(), seeds)
    texts = [completion_text(tokenizer, c.token_ids) for c in completions]
    pairs = zip(completions, texts, strict=True)
    scores = [task.scores(prompts[c.prompt_index], text) for c, text in pairs]
    rewards = torch.tensor([score[task.scorer] for score in scores])
    return Samples(prompts, ids, completions, texts, scores, rewards)


def to_batch(config: RunConfig, samples: Samples) -> tuple[TrainingBatch, dict[str, float]]:
    """Advantages within groups, and the batch the learner sees."""
    groups = group_advantages(
        samples.rewards,
        group_size=config.rollout.samples,
        scale=config.objective.advantage_scale,
        baseline=config.objective.advantage_baseline,
    )
    chosen = list(range(len(samples.completions)))
    if config.objective.drop_uninformative:
        chosen = [i for i in chosen if bool(groups.informative[i])]
    picked = [samples.completions[i] for i in chosen]
    batch = TrainingBatch.build(
        [samples.prompt_ids[c.prompt_index] for c in picked],
        [c.token_ids for c in picked],
        [c.rollout_logprobs for c in picked],
        groups.advantages[chosen],
        _routes(picked),
    )
    lengths = [len(c.token_ids) for c in samples.completions]
    # Not every scorer applies to every prompt: an answer that is no number has no number scorer.
    names = {name: None for scores in samples.scores for name in scores}
    scored = {name: [s[name] for s in samples.scores if name in s] for name in names}
    return batch, {f"reward/{name}": _mean(values) for name, values in scored.items()} | {
        "reward/mean": float(samples.rewards.mean()),
        "reward/zero_variance_groups": groups.num_zero_variance / groups.num_groups,
        "rollout/tokens_mean": _mean(lengths),
        "rollout/truncated": _mean([c.truncated for c in samples.completions]),
    }


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
