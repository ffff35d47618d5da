"""Rollouts shared out: every rank's engine samples some of the prompts, and all get all completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lowbitrl.distributed import ranks
from lowbitrl.rollout.engine import Sampler
from lowbitrl.rollout.types import Completion, Sampling


class SplitSampler:
    """A sampler over all ranks. A request keeps its seed, so it draws the numbers it would draw in one process.

    Its tokens are those of one process as far as the engine's arithmetic does not depend on the batch.
    """

    def __init__(self, engine: Sampler) -> None:
        self.engine = engine

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """As `Engine.generate`; called with the same arguments on every rank."""
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        # By length, as the engine batches them: every rank gets short and long ones.
        order = sorted(range(len(prompts)), key=lambda i: (len(prompts[i]), i))
        mine = ranks.share(order)
        sampled = (
            self.engine.generate([prompts[i] for i in mine], n, sampling, [seeds[i] for i in mine])
            if mine
            else []
        )
        placed = [replace(c, prompt_index=mine[c.prompt_index]) for c in sampled]
        everyone = [completion for part in ranks.gather(placed) for completion in part]
        return sorted(everyone, key=lambda c: (c.prompt_index, c.sample_index))
