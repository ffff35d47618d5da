"""The protocol every engine speaks, and nothing of how it does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol

from torch import Tensor

from lowbitrl.quant import Plan
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.sync.manifest import Manifest


class Sampler(Protocol):
    """What samples: an engine, or several that share the prompts."""

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Sample n completions of each prompt, ordered by prompt, then sample.

        Args:
            prompts: token ids; never re-tokenized.
            seeds: one non-negative integer a prompt. Sample j of a prompt draws from the stream
                (seed, j), whatever else is in the batch.
        """
        ...


class Engine(Sampler, Protocol):
    """A sampling policy: token ids in, token ids and log-probabilities out."""

    @property
    def plan(self) -> Plan:
        """What its weights and activations wear."""
        ...

    @property
    def version(self) -> int:
        """Weight version it serves; -1 before the first update."""
        ...

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Log-probability of each token after the first, (len - 1,) fp32, by the engine's arithmetic."""
        ...

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Serve a new weight version, whole or not at all."""
        ...
