"""`lowbitrl diagnose`: sample once with the low-bit engine, then ask every arithmetic about those tokens.

Numbers first: everything ends in one plain dictionary (diagnosis.json), and figures and report are
drawn from that alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import torch
from pydantic import BaseModel, ConfigDict, Field
from transformers import PreTrainedModel

from lowbitrl.diagnose import amplification, chain, faults, keep, positions, probes, table
from lowbitrl.diagnose.experts import routing_term
from lowbitrl.diagnose.lab import Drawn, Lab, Load, find_scales
from lowbitrl.diagnose.statistics import bootstrap
from lowbitrl.quant import Recipe, attachment, prepare
from lowbitrl.quant.recipe import Kernels
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish

Say = Callable[[str], None]
ROUNDS = 64  # times the prompts are gone through, where they are few


class DiagnoseConfig(BaseModel):
    """How much is measured.

    Attributes:
        tokens: sampled tokens that the chain and the tables score, about.
        max_tokens / temperature / samples: of the sampling; `samples` responses a prompt.
        seed: of sampling and of the embedding noise.
        max_batch: most responses decoded at once.
        amplify_tokens / layer_tokens / keep_tokens: the first so many tokens, for the costlier parts; 0
            leaves a part out.
        keep_steps: layers the greedy search may keep in BF16.
        learner_attention / rollout_attention: two kernels, as two engines have.
        kernels: products of the engine that samples, `rollout.kernels`; those of "low-bit" are in the engine's term.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tokens: int = Field(default=2000, ge=1)
    max_tokens: int = Field(default=128, ge=2)
    temperature: float = Field(default=1.0, gt=0)
    samples: int = Field(default=2, ge=1)
    seed: int = Field(default=0, ge=0)
    max_batch: int = Field(default=32, ge=1)
    amplify_tokens: int = Field(default=300, ge=0)
    layer_tokens: int = Field(default=600, ge=0)
    keep_tokens: int = Field(default=250, ge=0)
    keep_steps: int = Field(default=3, ge=1)
    learner_attention: str = "eager"
    rollout_attention: str = "sdpa"
    kernels: Kernels = "learner"


@dataclass
class Stages:
    """Says what is going on and keeps how long it took."""

    say: Say
    seconds: dict[str, float] = field(default_factory=dict)

    @contextmanager
    def stage(self, name: str) -> Iterator[Say]:
        """Time a stage; the yielded function reports steps inside it."""
        started, count = time.perf_counter(), 0
        self.say(f"{name} ...")

        def tick(step: str) -> None:
            nonlocal count
            count += 1
            self.say(f"  {time.perf_counter() - started:6.1f}s  {step}")

        yield tick
        self.seconds[name] = time.perf_counter() - started
        self.say(f"{name}: {self.seconds[name]:.1f}s")


def diagnose(
    load: Load,
    prompts: Sequence[Sequence[int]],
    recipe: Recipe,
    config: DiagnoseConfig | None = None,
    others: Sequence[Recipe] = (),
    say: Say = lambda _: None,
) -> dict[str, Any]:
    """Measure how far `recipe`'s rollout is from its learner on this model, why, and what would help.

    Args:
        load: see `Lab`. prompts: token ids, used in order until enough tokens are sampled.
        others: more recipes for the recommendation, besides every alignment and residual of `recipe`.

    Returns:
        Plain data: faults, mismatch, terms, grid, candidates, recommendation, amplification, routing,
        layers, channels, keep, positions, seconds. Intervals are [value, low, high].

    Raises:
        ValueError: no prompts; what `Recipe` and plan refuse for this model.
    """
    config = config or DiagnoseConfig()
    stages = Stages(say)
    with stages.stage("sampling"):
        learner, engine = both_sides(load, recipe, config, prompts)
        drawn = draw(engine, prompts, config)
        lab = Lab(load, drawn, config.learner_attention, config.rollout_attention)
        if config.keep_tokens:
            keep.split(drawn, config.keep_tokens)
    with stages.stage("faults"):
        found = faults.inspect(learner, lab.model(recipe, "rollout"), engine, drawn)
    del learner, engine
    with stages.stage("decomposition"):
        terms = {
            "own": chain.decompose(lab, recipe),
            "naive": chain.decompose(lab, replace(recipe, learner="bf16")),
        }
    with stages.stage("tables") as tick:
        grid = table.grid(lab, recipe, tick)
        own = table.variants(recipe, lab.moe)
        candidates = table.measure_all(lab, list(dict.fromkeys([*own, recipe, *others])), tick)
    with stages.stage("amplification") as tick:
        noisy = _amplification(lab, recipe, config, tick)
    with stages.stage("layers and channels"):
        layers, channels = _layers(lab, recipe, config)
        routing = _agreement(lab, recipe)
    chosen = table.recommend(candidates)
    with stages.stage("layers to keep in BF16") as tick:
        kept = (
            keep.search(lab, recipe, config.keep_tokens, config.keep_steps, tick)
            if config.keep_tokens
            else {}
        )
    return {
        "sampled": {
            "tokens": drawn.tokens,
            "responses": len(drawn.completions),
            "config": config.model_dump(),
        },
        "recipe": asdict(recipe),
        "faults": [asdict(f) for f in found],
        "mismatch": {name: chain.describe(parts) for name, parts in terms.items()},
        "floor": table.floor(lab),
        "grid": grid,
        "candidates": [_row(c, own) for c in candidates],
        "recommendation": _recommendation(chosen, candidates, lab, noisy),
        "amplification": noisy,
        "routing": routing,
        "layers": layers,
        "channels": channels,
        "keep": kept,
        "positions": _positions(lab, recipe, terms["own"]["total"]),
        "seconds": stages.seconds,
    }


def both_sides(
    load: Load, recipe: Recipe, config: DiagnoseConfig, prompts: Sequence[Sequence[int]]
) -> tuple[PreTrainedModel, EmbeddedEngine]:
    """A learner and an engine that took its published bytes, as at the start of a run.

    Args:
        prompts: static activation scales are found on the first of them.
    """
    learner, rollout = load(config.rollout_attention, None), load(config.rollout_attention, None)
    plan = prepare(learner, recipe, "learner")
    find_scales(learner, prompts)
    prepare(rollout, plan, "rollout", kernels=config.kernels)
    routed = bool(attachment(rollout).routing.names)
    engine = EmbeddedEngine(rollout, "batch", config.max_batch, record_routing=routed)
    published = publish(learner, 0)
    engine.update(published.stream(), published.manifest)
    return learner, engine


def draw(engine: EmbeddedEngine, prompts: Sequence[Sequence[int]], config: DiagnoseConfig) -> Drawn:
    """Sample prompts in order, a few at a time, and from the first again, until `config.tokens` tokens are there.

    Raises:
        ValueError: no prompts.
    """
    if not prompts:
        raise ValueError("no prompts to sample from; give at least one")
    sampling = Sampling(max_tokens=config.max_tokens, temperature=config.temperature)
    count = max(1, config.max_batch // config.samples)
    completions, tokens = [], 0
    for number, first in enumerate([*range(0, len(prompts), count)] * ROUNDS):
        chosen = prompts[first : first + count]
        # A number of its own for every batch: a prompt that comes again is sampled anew.
        seeds = [config.seed + number * count + i for i in range(len(chosen))]
        fresh = engine.generate(chosen, config.samples, sampling, seeds)
        completions += [replace(c, prompt_index=c.prompt_index + first) for c in fresh]
        tokens += sum(len(c.token_ids) for c in fresh)
        if tokens >= config.tokens:
            break
    return Drawn(prompts, completions, config.temperature).head(config.tokens)


def _amplification(lab: Lab, recipe: Recipe, config: DiagnoseConfig, tick: Say) -> list[dict[str, Any]]:
    if not config.amplify_tokens:
        return []
    repaired = [
        r
        for r in table.variants(recipe, lab.moe)
        if r.learner == "weights" and r.residual in (0.5, 1.0) and (r.residual == 1 or r.scope == "batch")
    ]
    rollouts = [*table.neighbours(recipe), *repaired, recipe]
    return amplification.amplify(lab, rollouts, config.amplify_tokens, seed=config.seed, tick=tick)


def _agreement(lab: Lab, recipe: Recipe) -> dict[str, float]:
    """Share of the engine's experts that the learner's routers choose too, by routing/* name; {} if dense."""
    drawn = lab.drawn
    if not drawn.routed:
        return {}
    learner = lab.model(recipe, "learner")
    found = routing_term(learner, drawn.prompts, drawn.completions, temperature=drawn.temperature)
    return found.agreement


def _layers(lab: Lab, recipe: Recipe, config: DiagnoseConfig) -> tuple[list[dict[str, Any]], dict[str, Any]]:
    if not config.layer_tokens:
        return [], {}
    aligned = [replace(recipe, learner=a, residual_scope="token") for a in table.ALIGNMENTS]
    rows = probes.layer_errors(lab, recipe, aligned, config.layer_tokens)
    return rows, probes.channel_profiles(lab, recipe, config.layer_tokens)


def _row(candidate: table.Candidate, own: Sequence[Recipe]) -> dict[str, Any]:
    recipe = candidate.recipe
    return {
        "name": candidate.name,
        "rollout": recipe.rollout,
        "learner": recipe.learner,
        "residual": recipe.residual,
        "scope": recipe.scope if 0 < recipe.residual < 1 else None,
        "repair": table.repair(recipe) if recipe.compensates else "",
        "own": recipe in own,
        "everywhere": recipe.compensates and table.everywhere(recipe),
        "extra_work": candidate.work,
        "mean": candidate.mean,
        "p99": bootstrap([d.abs() for d in candidate.diffs], "p99"),
    }


def _recommendation(
    chosen: table.Candidate, candidates: Sequence[table.Candidate], lab: Lab, noisy: list[dict[str, Any]]
) -> dict[str, Any]:
    smallest = amplification.moved_at(noisy, min(amplification.NOISES))
    return {
        "name": chosen.name,
        "recipe": {k: v for k, v in asdict(chosen.recipe).items() if v is not None},
        "reasons": table.reasons(chosen, candidates, table.floor(lab), smallest),
    }


def _positions(lab: Lab, recipe: Recipe, total: list[torch.Tensor]) -> dict[str, Any]:
    return {
        "by_position": positions.by_position(total),
        "by_length": positions.by_length(total),
        "onsets": positions.onsets(lab.scores(recipe, "learner"), lab.drawn),
    }
