"""Which layers to keep in BF16: measured one at a time, then greedily, by nats gained per byte.

    gain  = mean |learner - rollout| of the recipe - the same with the layer in BF16 on both sides
    bytes = what the layer takes more in BF16 than in its format

Codes flip and layers carry the flips on, so gains do not add up: the greedy pass measures every
step anew, on top of what is kept already.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.lab import Lab, Scores
from lowbitrl.diagnose.mismatch import differences
from lowbitrl.diagnose.statistics import bootstrap, paired_gain
from lowbitrl.formats import get_format
from lowbitrl.quant import LayerPlan, Plan, Recipe, attachment
from lowbitrl.quant.apply import Side

SHORTLIST = 3


@dataclass
class Search:
    """Both sides of a recipe, and the tokens on which layers are tried.

    Args:
        tokens: about how many sampled tokens are scored.
    """

    lab: Lab
    recipe: Recipe
    tokens: int

    def __post_init__(self) -> None:
        self.learner = self.lab.model(self.recipe, "learner")
        self.rollout = self.lab.model(self.recipe, "rollout")
        self.originals = dict(self.lab.load(self.lab.attention["rollout"], None).named_modules())
        self.drawn = self.lab.drawn.head(self.tokens)
        self.plan = attachment(self.learner).plan
        self.units = units(self.plan)

    def mismatch(self, names: Iterable[str]) -> Scores:
        """Per response learner - rollout with these modules in BF16 on both sides."""
        chosen = list(names)
        if any(self.plan.by_name[name].layout for name in chosen):
            return self._afresh(chosen)
        with kept(self.learner, chosen, self.originals), kept(self.rollout, chosen, self.originals):
            return differences(
                self.lab.score(self.learner, self.drawn), self.lab.score(self.rollout, self.drawn)
            )

    def _afresh(self, names: Sequence[str]) -> Scores:
        """The same by two new models: a stack of experts gives up its parameter for its bytes."""
        recipe = replace(self.recipe, keep=(*default_keeps(self.plan), *names))
        learner, rollout = (
            self.lab.score(self.lab.model(recipe, side), self.drawn) for side in get_args(Side)
        )
        return differences(learner, rollout)


def search(
    lab: Lab, recipe: Recipe, tokens: int, steps: int = 3, tick: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Try every layer alone, then up to `steps` together.

    Returns:
        "alone": a row a layer (gain with interval, bytes); "greedy": a row a step, stopped at the first
        that gains nothing beyond chance; "patterns": `keep` of the recipe with the greedy layers, [] where
        none is worth it.
    """
    bench = Search(lab, recipe, tokens)
    before = bench.mismatch(())
    alone = []
    for unit, names in bench.units.items():
        tick(unit)
        gain = paired_gain(before, bench.mismatch(names))
        alone.append({"layer": unit, "gain": gain, "bytes": extra_bytes(bench.plan, names)})
    order = sorted(alone, key=lambda row: row["gain"].value / row["bytes"], reverse=True)
    greedy = _greedy(bench, before, [row["layer"] for row in order], steps, tick)
    chosen = [row["layer"] for row in greedy]
    return {
        "mean": bootstrap([d.abs() for d in before]),
        "tokens": bench.drawn.tokens,
        "alone": alone,
        "greedy": greedy,
        "patterns": [*default_keeps(bench.plan), *(f"{unit}.*" for unit in chosen)] if chosen else [],
    }


def _greedy(
    bench: Search, before: Scores, order: Sequence[str], steps: int, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    current = before
    for _ in range(min(steps, len(order) - 1)):
        chosen = [row["layer"] for row in taken]
        trials = {}
        for unit in [u for u in order if u not in chosen][:SHORTLIST]:
            tick(f"{' + '.join(chosen)} + {unit}".lstrip(" +"))
            trials[unit] = bench.mismatch(n for u in [*chosen, unit] for n in bench.units[u])
        gains = {unit: paired_gain(current, diffs) for unit, diffs in trials.items()}
        unit = max(gains, key=lambda u: gains[u].value / extra_bytes(bench.plan, bench.units[u]))
        gain = gains[unit]
        if gain.low <= 0:
            break
        current = trials[unit]
        mean = bootstrap([d.abs() for d in current])
        taken.append(
            {"layer": unit, "gain": gain, "mean": mean, "bytes": extra_bytes(bench.plan, bench.units[unit])}
        )
    return taken


def units(plan: Plan) -> dict[str, list[str]]:
    """Quantized modules by the decoder layer they belong to ("model.layers.3"), others by themselves."""
    found: dict[str, list[str]] = {}
    for layer in plan.quantized:
        match = re.match(r".*?\.\d+(?=\.)", layer.name)
        found.setdefault(match.group() if match else layer.name, []).append(layer.name)
    return found


def extra_bytes(plan: Plan, names: Iterable[str]) -> int:
    """Bytes that these modules take more in BF16; at least 1, so that a gain can be divided by it."""
    return max(1, sum(_extra(plan.by_name[name]) for name in names))


def _extra(layer: LayerPlan) -> int:
    if layer.weight is None:
        return 0
    count = 1
    for size in layer.shape:
        count *= size
    return int(count * (16 - get_format(layer.weight).bits_per_element) / 8)


@contextmanager
def kept(model: PreTrainedModel, names: Sequence[str], originals: Mapping[str, nn.Module]) -> Iterator[None]:
    """The named modules are plain BF16 linears inside the block, whatever they wore."""
    modules: dict[str, Any] = dict(model.named_modules())
    worn = {name: (modules[name].__class__, modules[name].weight.data) for name in names}
    try:
        for name in names:
            modules[name].__class__ = nn.Linear
            modules[name].weight.data = originals[name].weight.data  # type: ignore[union-attr]
        yield
    finally:
        for name, (cls, data) in worn.items():
            modules[name].__class__ = cls
            modules[name].weight.data = data


def default_keeps(plan: Plan) -> list[str]:
    """Linears the plan leaves alone: a recipe that names `keep` names them too."""
    return [
        layer.name for layer in plan.layers if not layer.quantized and "is not a linear" not in layer.reason
    ]
