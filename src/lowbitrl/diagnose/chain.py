"""The telescoping chain: one change of arithmetic at a time, from BF16 to the engine's own word.

    bf16 -> + the engine's routes -> + quantized weights -> + quantized activations -> + residual -> the engine
    mismatch = sum of the steps between neighbours, exactly, per token

The learner stands on one rung (its alignment), so its mismatch is the sum of the steps from there.
Routes are a rung of a mixture of experts alone: from there on every token goes to the experts it
took in the engine, so what the arithmetic does to the choice of experts is in no other term.

All rungs but the last are computed by the learner's code and kernels: the last step, "engine", is
everything that is no quantization (other kernels, cached decoding, other batches, and faults).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

from lowbitrl.diagnose.lab import Lab, Scores, plain
from lowbitrl.diagnose.mismatch import differences, estimates
from lowbitrl.diagnose.statistics import bootstrap, share_of
from lowbitrl.quant import Recipe
from lowbitrl.quant.apply import Side

ENGINE, ROUTING = "engine", "routing"


@dataclass(frozen=True)
class Rung:
    """One arithmetic of the chain, named after what it adds to the one before."""

    adds: str
    recipe: Recipe
    side: Side


def rungs(recipe: Recipe) -> list[Rung]:
    """The arithmetics between a BF16 learner and `recipe`'s rollout, those without a change left out."""
    bare = plain(recipe)
    chain = [Rung("bf16", replace(bare, learner="bf16"), "learner")]
    if recipe.precision.weight:
        chain.append(Rung("weights", replace(bare, learner="weights"), "learner"))
    if recipe.precision.activation:
        chain.append(Rung("activations", bare, "rollout"))
    if recipe.compensates:
        chain.append(Rung("residual", recipe, "rollout"))
    return chain


def start(recipe: Recipe, chain: Sequence[Rung]) -> int:
    """The rung the learner stands on."""
    if recipe.learner == "bf16":
        return 0
    if recipe.learner == "weights":
        return max((i for i, rung in enumerate(chain) if rung.adds in ("bf16", "weights")), default=0)
    return len(chain) - 1


def decompose(lab: Lab, recipe: Recipe) -> dict[str, Scores]:
    """The terms of `recipe`'s mismatch by name, (T_i,) fp32 a response each, and their sum "total".

    A term above zero means that the step makes the engine's log-probability smaller.
    """
    chain = rungs(recipe)
    first = start(recipe, chain)
    # All rungs under the learner's attention: a change of kernels belongs to the engine's term.
    attention = lab.attention["learner"]
    routed = lab.drawn.routed
    scores = [lab.scores(rung.recipe, rung.side, attention, routed) for rung in chain[first:]]
    names = [rung.adds for rung in chain[first + 1 :]] + [ENGINE]
    if routed:
        scores.insert(0, lab.scores(chain[first].recipe, chain[first].side, attention))
        names.insert(0, ROUTING)
    steps = zip(names, scores, [*scores[1:], lab.drawn.words], strict=True)
    return {name: differences(a, b) for name, a, b in steps} | {
        "total": differences(scores[0], lab.drawn.words)
    }


def describe(terms: dict[str, Scores]) -> dict[str, Any]:
    """The terms in numbers: for each its share of the squared total, mean and mean size with intervals.

    Shares add up to 1 and means to the total's mean; mean sizes need not (terms cancel per token).
    """
    total = terms["total"]
    rows = {
        name: {
            "share": share_of(values, total),
            "mean": bootstrap(values),
            "mean_abs": bootstrap([v.abs() for v in values]),
        }
        for name, values in terms.items()
    }
    return {"terms": rows, "total": estimates(total)}
