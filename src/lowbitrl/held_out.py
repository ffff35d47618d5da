"""Held-out scores of a run: of its rollout engine, and of the same weights served unquantized.

The engine's scores hold two things: what was learned, and what its precision costs at inference. The second is not
paid where the trained weights are served in BF16; the second score tells them apart.
"""

from __future__ import annotations

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbitrl.config import RunConfig
from lowbitrl.distributed.sharding import device_of
from lowbitrl.evaluation import Evaluation, evaluate
from lowbitrl.evaluation.evaluate import Engine
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.tasks import Task


def score(config: RunConfig, engine: Engine, task: Task, tokenizer: PreTrainedTokenizerBase) -> Evaluation:
    """Held-out figures of `engine` as `config.evaluation` asks for them; the seeds are the run's."""
    asked = config.evaluation
    return evaluate(
        engine,
        task,
        tokenizer,
        count=asked.count or None,
        n=asked.samples,
        sampling=config.rollout.sampling(),
        k=asked.k,
        seed=config.seed,
    )


def score_unquantized(
    config: RunConfig, learner: PreTrainedModel, task: Task, tokenizer: PreTrainedTokenizerBase
) -> Evaluation:
    """The same figures of the learner's weights as they are, by a copy of the model that is made for it and let go."""
    model, _ = load_model(config.model.name, config.model.dtype, device_of(learner))
    prepare(model, Recipe(rollout="bf16", learner="bf16"), "rollout")
    _copy_weights(learner, model)
    engine = EmbeddedEngine(model, config.rollout.scheduler, config.rollout.max_batch)
    return score(config, engine, task, tokenizer)


@torch.no_grad()
def _copy_weights(source: PreTrainedModel, to: PreTrainedModel) -> None:
    weights = dict(source.named_parameters())
    for name, parameter in to.named_parameters():
        parameter.copy_(weights[name])
