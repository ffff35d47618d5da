"""The rollout side of TRL's trainer: an engine that serves the learner's published bytes, and its watch."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.objectives.metrics import Metrics
from lowbitrl.quant import Plan, attachment, prepare
from lowbitrl.rollout import Completion, Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine, prompt_seed
from lowbitrl.sync.publisher import Publication, changed_codes, publish
from lowbitrl.sync.sentinel import Sentinel, SentinelConfig, blame_bytes, blame_layer
from lowbitrl.trainer.logprobs import response_logprobs


class Rollouts:
    """Publishes a learner's weights once per optimizer step and samples from them.

    Args:
        learner: prepared with side="learner". rollout: the same weights, not prepared yet.
        seed: of this process; processes that sample for one batch need different ones.
        watch: when the gap of the watched sequences stops the run. They are the first prompts seen.
    """

    def __init__(
        self,
        learner: PreTrainedModel,
        rollout: PreTrainedModel,
        plan: Plan,
        sampling: Sampling,
        *,
        seed: tuple[int, ...],
        watch: SentinelConfig,
        scheduler: str,
        max_batch: int,
    ) -> None:
        prepare(rollout, plan, "rollout")
        self.learner = learner
        self.engine = EmbeddedEngine(rollout, scheduler, max_batch)  # type: ignore[arg-type]
        self.sampling, self.seed = sampling, seed
        self.calls = 0
        self.published: Publication | None = None
        self.sentinel = Sentinel(watch, plan.recipe, (), self._scores, self._served)

    def generate(
        self, prompts: Sequence[Sequence[int]], samples: int, step: int
    ) -> tuple[list[Completion], dict[str, float]]:
        """A completion a prompt, in order, by the weights after optimizer step `step`; metrics of the publish.

        Args:
            prompts: token ids, equal ones next to each other: runs of `samples` are decoded as one.

        Raises:
            RuntimeError: a completion without a token, which TRL cannot take.
            SentinelError: learner and engine are further apart than the run's floor explains.
        """
        metrics = self._serve(step, prompts) if self.engine.version != step else {}
        shared = samples if _in_groups(prompts, samples) else 1
        seeds = [prompt_seed(*self.seed, step, self.calls, i) for i in range(len(prompts) // shared)]
        self.calls += 1
        completions = self.engine.generate(prompts[::shared], shared, self.sampling, seeds)
        empty = next((c for c in completions if not c.token_ids), None)
        if empty is not None:
            raise RuntimeError(
                f"prompt {empty.prompt_index} got a completion without a token ({empty.finish_reason}) from version "
                f"{empty.version}; TRL's trainer cannot leave one out: lowbitrl train can"
            )
        return completions, metrics

    def _serve(self, step: int, prompts: Sequence[Sequence[int]]) -> dict[str, float]:
        published = publish(self.learner, step)
        changed = changed_codes(self.published, published)
        self.engine.update(published.stream(), published.manifest)
        self.published, self.calls = published, 0
        if not self.sentinel.sequences:
            distinct: dict[Sequence[int], None] = dict.fromkeys(tuple(p) for p in prompts if len(p) > 1)
            self.sentinel.sequences = [*distinct][: self.sentinel.config.sequences]
        gap = self.sentinel.check(step, self._blame)
        return {"quant/changed_codes": changed, "sync/sentinel": gap, "sync/version": float(step)}

    @torch.no_grad()
    def _scores(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        first, rest = [s[:1] for s in sequences], [s[1:] for s in sequences]
        scores, _ = response_logprobs(self.learner, first, rest, temperature=self.sampling.temperature)
        return [row[: len(response)] for row, response in zip(scores, rest, strict=True)]

    def _served(self, sequences: Sequence[Sequence[int]]) -> list[Tensor]:
        return self.engine.score(sequences, self.sampling.temperature)

    def _blame(self) -> str:
        model, ids = self.engine.model, torch.tensor([self.sentinel.sequences[0]])
        assert self.published is not None
        with attachment(self.learner).tokens.real_tokens(None):
            return blame_bytes(self.published.manifest, self.engine.served()) or blame_layer(
                self.learner, model, lambda side: side(input_ids=ids.to(model.device))
            )


def _in_groups(prompts: Sequence[Sequence[int]], samples: int) -> bool:
    """Whether prompts come as runs of `samples` equal ones."""
    if len(prompts) % samples:
        return False
    return all(prompts[i] == prompts[i - i % samples] for i in range(len(prompts)))


def name_real_tokens(
    module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, object]
) -> tuple[tuple[object, ...], dict[str, object]]:
    """Forward pre-hook: padding is named by its mask, and positions start at the first real token, as the engine's.

    The mask is left set, since backward may run a layer again.
    """
    mask = kwargs.get("attention_mask")
    two_dimensional = isinstance(mask, Tensor) and mask.ndim == 2
    attachment(module).tokens.real = mask.bool() if two_dimensional else None  # type: ignore[union-attr]
    if two_dimensional and kwargs.get("position_ids") is None:
        kwargs = kwargs | {"position_ids": (mask.cumsum(1) - 1).clamp(min=0)}  # type: ignore[union-attr]
    return args, kwargs


def scalars(metrics: Metrics) -> dict[str, float]:
    """0-d tensors as numbers."""
    return {name: float(value) for name, value in metrics.items()}
