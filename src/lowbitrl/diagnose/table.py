"""Every alignment against every rollout arithmetic, and which pair to train with.

A cell is the mismatch of one learner and one rollout on the same sampled tokens. Learner and
rollout run different attention kernels, so the corner bf16/bf16 is what two engines differ by
anyway: the floor.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import prod
from typing import Any, get_args

from lowbitrl.diagnose.lab import Lab, Scores, plain, worn
from lowbitrl.diagnose.mismatch import compare, differences
from lowbitrl.diagnose.statistics import Estimate, bootstrap, paired_gain
from lowbitrl.quant import PRECISIONS, Plan, Recipe
from lowbitrl.quant.recipe import FP4_ACTIVATIONS, STATIC, Precision, Site

FRACTIONS = (0.25, 0.5, 0.75, 1.0)
# Choosing channels token by token sorts every row, which is the slowest thing measured here.
TOKEN_FRACTIONS = {"weights": (0.5, 0.75), "full": (0.5, 1.0)}
# A mixture's residual stands at W13 alone unless it is sent elsewhere too.
EVERYWHERE_FRACTIONS = (0.5, 1.0)
ALIGNMENTS = ("bf16", "weights", "full")


@dataclass(frozen=True)
class Candidate:
    """A recipe with its mismatch.

    Attributes:
        mean: mean |learner - rollout| in nats.
        diffs: per response, for paired comparisons.
        work: see `extra_work`.
    """

    recipe: Recipe
    mean: Estimate
    diffs: Scores
    work: float

    @property
    def name(self) -> str:
        """How tables and reasons call it."""
        return label(self.recipe)


def label(recipe: Recipe) -> str:
    """A recipe in a few words: "nvfp4, weights, residual 0.5 per batch"."""
    kept = f", keep {', '.join(recipe.keep[:2])}{' ...' * (len(recipe.keep) > 2)}" if recipe.keep else ""
    residual = f", {repair(recipe)}" if recipe.compensates else ""
    return f"{recipe.rollout}, {recipe.learner}{residual}{kept}"


def repair(recipe: Recipe) -> str:
    """The residual of a recipe that has one, in a few words."""
    sites = recipe.residual_sites or {}
    fractions = {recipe.residual, *sites.values()}
    scope = "" if fractions <= {0.0, 1.0} else f" per {recipe.scope}"
    if everywhere(recipe):
        return f"residual {recipe.residual:g}{scope} at every site"
    return ", ".join([f"residual {recipe.residual:g}{scope}", *(f"{s} {f:g}" for s, f in sites.items())])


def everywhere(recipe: Recipe) -> bool:
    """Whether the residual was sent to every site by name."""
    return recipe.residual_sites == dict.fromkeys(get_args(Site), recipe.residual)


def rollout_label(recipe: Recipe) -> str:
    """The same of what its rollout computes, whatever the learner does."""
    return label(worn(recipe, "rollout")).replace(", weights", "")


def neighbours(recipe: Recipe) -> list[Recipe]:
    """The arithmetics to compare with `recipe`'s rollout: BF16, each half of it alone, itself."""
    own = recipe.precision
    halves = (Precision(own.weight, None), Precision(None, own.activation))
    names = dict.fromkeys(["bf16", *(n for n, p in PRECISIONS.items() if p in halves), recipe.rollout])
    return [_alone(recipe, name) for name in names]


def _alone(recipe: Recipe, rollout: str) -> Recipe:
    """`rollout` with what of the recipe is no residual and has a meaning there."""
    static = PRECISIONS[rollout].activation in STATIC
    return Recipe(
        rollout=rollout,
        keep=recipe.keep if rollout != "bf16" else None,
        activation_scale=recipe.activation_scale if static else "token",
    )


def variants(recipe: Recipe, moe: bool = False) -> list[Recipe]:
    """The recipes of the same rollout precision: each alignment, with each residual and scope it can have.

    Args:
        moe: the model is a mixture of experts, where the residual of every site is tried beside W13's.
    """
    base = plain(recipe)
    found = [replace(base, learner=alignment) for alignment in ALIGNMENTS]
    if base.precision.activation not in FP4_ACTIVATIONS:
        return found
    found += [replace(base, learner=a, residual=f) for a in ("bf16", "weights") for f in FRACTIONS]
    for alignment, fractions in TOKEN_FRACTIONS.items():
        found += [replace(base, learner=alignment, residual=f, residual_scope="token") for f in fractions]
    for f in EVERYWHERE_FRACTIONS if moe else ():
        found.append(
            replace(base, learner="weights", residual=f, residual_sites=dict.fromkeys(get_args(Site), f))
        )
    return found


def measure_all(
    lab: Lab, recipes: Sequence[Recipe], tick: Callable[[str], None] = lambda _: None
) -> list[Candidate]:
    """Score both sides of each recipe on the sampled tokens."""
    measured = []
    for recipe in recipes:
        tick(label(recipe))
        diffs = differences(lab.scores(recipe, "learner"), lab.scores(recipe, "rollout"))
        work = extra_work(lab.plan(recipe), lab.experts_per_token)
        measured.append(Candidate(recipe, bootstrap([d.abs() for d in diffs]), diffs, work))
    return measured


def grid(lab: Lab, recipe: Recipe, tick: Callable[[str], None] = lambda _: None) -> list[dict[str, Any]]:
    """Alignment x rollout precision without a residual, every pair: one row a cell."""
    cells = []
    for alignment in ALIGNMENTS:
        learner = lab.scores(replace(plain(recipe), learner=alignment), "learner")
        for other in neighbours(recipe):
            tick(f"{alignment} / {other.rollout}")
            found = compare(learner, lab.scores(other, "rollout"))
            cells.append({"learner": alignment, "rollout": other.rollout, "mean": found.mean, "k3": found.k3})
    return cells


def floor(lab: Lab) -> Estimate:
    """What two BF16 engines differ by on these tokens."""
    return measure_all(lab, [Recipe(learner="bf16")])[0].mean


def extra_work(plan: Plan, experts_per_token: int = 1) -> float:
    """Products of the second pass as a share of the first's, on hardware that multiplies FP4.

    Every repaired channel is multiplied twice. Channels that each token chooses for itself leave no column out
    for all, so their second product is a whole one. Counted over the inputs that the plan quantizes, 0 where
    there are none; of an expert stack a token uses `experts_per_token`.
    """
    layers = [layer for layer in plan.layers if layer.activation]
    products = [
        prod(layer.shape[-2:]) * (experts_per_token if len(layer.shape) > 2 else 1) for layer in layers
    ]
    shares = [1.0 if layer.residual and plan.recipe.scope == "token" else layer.residual for layer in layers]
    second = sum(share * count for share, count in zip(shares, products, strict=True))
    return second / sum(products) if products else 0.0


def recommend(candidates: Sequence[Candidate]) -> Candidate:
    """The closest pair; among those no further than chance explains, the one with least extra work.

    "Than chance explains": the 95% interval of the paired difference to the closest one includes 0. At equal
    work a full learner comes last: it quantizes in its own forward pass too, and what it gains by that
    depends on how far its kernels are the engine's (see `amplification`).

    Raises:
        ValueError: no candidates.
    """
    if not candidates:
        raise ValueError("no recipes to choose from; give at least one")
    best = min(candidates, key=lambda c: c.mean.value)
    equals = [c for c in candidates if c is best or paired_gain(c.diffs, best.diffs).low <= 0]
    return min(equals, key=lambda c: (c.work, c.recipe.learner == "full", c.mean.value))


def frontier(candidates: Sequence[Candidate]) -> list[Candidate]:
    """The closest recipe of each price that is closer than all cheaper ones, dearest first."""
    found: list[Candidate] = []
    for candidate in sorted(candidates, key=lambda c: (c.work, c.mean.value)):
        if not found or candidate.mean.value < found[-1].mean.value:
            found.append(candidate)
    return found[::-1]


def _price(candidate: Candidate) -> str:
    return f"{candidate.name}, {candidate.mean.value:.4f} nats at {100 * candidate.work:.0f}%"


def reasons(
    chosen: Candidate, candidates: Sequence[Candidate], lowest: Estimate, noise: dict[str, float]
) -> list[str]:
    """Why `chosen`, one sentence a line, each with the numbers it rests on.

    Args:
        lowest: the floor. noise: mean nats that the smallest embedding noise moves each rollout, by `label`
            of the rollout's arithmetic; may be empty.
    """
    ratio = chosen.mean.value / lowest.value if lowest.value else float("inf")
    lines = [
        f"{chosen.name}: {chosen.mean.value:.4f} nats on average, {ratio:.1f}x the floor of two BF16 engines "
        f"({lowest.value:.4f}), at {100 * chosen.work:.0f}% more activation work."
    ]
    lines += [_versus(chosen, c) for c in candidates if _worth_saying(chosen, c)]
    cheaper = [c for c in frontier(candidates) if c.work < chosen.work]
    if cheaper:
        lines.append("For less work: " + "; ".join(_price(c) for c in cheaper) + ".")
    return lines + _amplified(chosen, noise)


def _worth_saying(chosen: Candidate, other: Candidate) -> bool:
    """The naive recipe, and the chosen one under each other alignment."""
    naive = other.recipe.learner == "bf16" and not other.recipe.residual
    same = repair(other.recipe) == repair(chosen.recipe)
    return other is not chosen and (naive or same)


def _versus(chosen: Candidate, other: Candidate) -> str:
    gain = paired_gain(other.diffs, chosen.diffs)
    verdict = "would be worse here" if gain.low > 0 else "is no different here"
    if other.mean.value < chosen.mean.value and gain.high < 0:
        verdict = "would be closer"
    interval = f"{gain.value:+.4f} [{gain.low:+.4f}, {gain.high:+.4f}]"
    return f"{other.name} {verdict}: {other.mean.value:.4f} nats, {interval}."


def _amplified(chosen: Candidate, noise: dict[str, float]) -> list[str]:
    own = rollout_label(chosen.recipe)
    if chosen.recipe.precision.activation is None or own not in noise:
        return []
    worst = max(noise, key=lambda name: noise[name])
    return [
        f"Noise of 1e-7 on the embeddings alone moves {own} by {noise[own]:.3f} nats, {worst} by {noise[worst]:.3f}: "
        "any two engines differ by as much, and it flips activation codes. A full learner removes that only where "
        "both sides are equal to the bit; a rollout that amplifies less removes it everywhere."
    ]
