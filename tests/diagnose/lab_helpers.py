"""A tiny model's bench: both sides, an engine that took published bytes, and what it sampled."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
from transformers import PreTrainedModel

from lowbitrl.diagnose.lab import Drawn, Lab
from lowbitrl.diagnose.run import DiagnoseConfig, both_sides
from lowbitrl.quant import Recipe
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from tests.conftest import tiny_llama

PROMPTS = [[3 + (i * j) % 120 for j in range(1, 4 + i % 5)] for i in range(8)]


def load(attention: str, dtype: torch.dtype | None) -> PreTrainedModel:
    """Fresh weights, always the same."""
    model = tiny_llama(dtype or torch.bfloat16, max_position_embeddings=128)
    model.set_attn_implementation(attention)
    return model


@dataclass
class Bench:
    """What `faults.inspect` takes, with the lab."""

    learner: PreTrainedModel
    reference: PreTrainedModel
    engine: EmbeddedEngine
    recipe: Recipe
    temperature: float
    max_tokens: int

    def sample(self) -> Drawn:
        """Tokens by the engine as it is now."""
        sampling = Sampling(max_tokens=self.max_tokens, temperature=self.temperature)
        return Drawn(PROMPTS, self.engine.generate(PROMPTS, 4, sampling), self.temperature)

    def lab(self) -> Lab:
        """A lab on fresh samples."""
        return Lab(load, self.sample())


def bench(recipe: Recipe, temperature: float = 1.0, max_tokens: int = 24, loading=load) -> Bench:
    """Both sides of `recipe` on the tiny model."""
    learner, engine = both_sides(loading, recipe, DiagnoseConfig(learner_attention="sdpa"), PROMPTS)
    reference = Lab(loading, _one()).model(recipe, "rollout")
    return Bench(learner, reference, engine, recipe, temperature, max_tokens)


def _one() -> Drawn:
    from lowbitrl.rollout import Completion

    return Drawn([[1]], [Completion(0, 0, (2,), (-1.0,), "stop", 0)])


def other_words(drawn: Drawn, words: list[torch.Tensor]) -> Drawn:
    """The same tokens with other log-probabilities in the engine's mouth."""
    pairs = zip(drawn.completions, words, strict=True)
    return replace(drawn, completions=[replace(c, rollout_logprobs=tuple(w.tolist())) for c, w in pairs])
