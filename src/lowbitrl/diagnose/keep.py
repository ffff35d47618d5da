"""Which layers to keep in BF16: measured one at a time, then greedily, by nats gained per byte.

    gain  = mean |learner - rollout| of the recipe - the same with the layer in BF16 on both sides
    bytes = what the layer takes more in BF16 than in its format

Codes flip and layers carry the flips on, so gains do not add up: the greedy pass measures every
step anew, on top of what is kept already. The largest of many noisy gains is too good to be true, so
a step counts only with the gain it shows on other responses than those it was chosen on.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, get_args

from torch import nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.lab import Drawn, Lab, Scores
from lowbitrl.diagnose.mismatch import differences
from lowbitrl.diagnose.statistics import bootstrap, paired_gain
from lowbitrl.formats import get_format
from lowbitrl.quant import LayerPlan, Plan, Recipe, attachment
from lowbitrl.quant.apply import Side
from lowbitrl.quant.topology import quantizable

SHORTLIST = 3


@dataclass
class Search:
    """Both sides of a recipe, on which layers are tried."""

    lab: Lab
    recipe: Recipe

    def __post_init__(self) -> None:
        self.learner = self.lab.model(self.recipe, "learner")
        self.rollout = self.lab.model(self.recipe, "rollout")
        self.originals = dict(self.lab.load(self.lab.attention["rollout"], None).named_modules())
        self.plan = attachment(self.learner).plan
        self.units = units(self.plan)

    def mismatch(self, chosen: Iterable[str], drawn: Drawn) -> Scores:
        """Per response learner - rollout with these units in BF16 on both sides."""
        names = [name for unit in chosen for name in self.units[unit]]
        if any(self.plan.by_name[name].layout for name in names):
            return self._afresh(names, drawn)
        with kept(self.learner, names, self.originals), kept(self.rollout, names, self.originals):
            return differences(self.lab.score(self.learner, drawn), self.lab.score(self.rollout, drawn))

    def _afresh(self, names: Sequence[str], drawn: Drawn) -> Scores:
        """The same by two new models: a stack of experts gives up its parameter for its bytes."""
        recipe = replace(self.recipe, keep=(*default_keeps(self.plan, quantizable(self.learner)), *names))
        learner, rollout = (self.lab.score(self.lab.model(recipe, side), drawn) for side in get_args(Side))
        return differences(learner, rollout)

    def bytes_of(self, unit: str) -> int:
        """What a unit takes more in BF16."""
        return extra_bytes(self.plan, self.units[unit])


def split(drawn: Drawn, tokens: int) -> tuple[Drawn, Drawn]:
    """Responses to choose layers on, and as many tokens of others to confirm them on.

    Raises:
        ValueError: too few tokens to have others.
    """
    chosen_on, rest = drawn.cut(tokens)
    if not rest.completions:
        raise ValueError(
            f"{drawn.tokens} tokens sampled, {tokens} to choose layers on leave none to confirm on: sample more"
        )
    return chosen_on, rest.head(tokens)


def search(
    lab: Lab, recipe: Recipe, tokens: int, steps: int = 3, tick: Callable[[str], None] = lambda _: None
) -> dict[str, Any]:
    """Try every layer alone on the first `tokens` tokens, then up to `steps` together, confirmed on as many others.

    Returns:
        "alone": a row a layer (gain with interval, bytes); "greedy": a row a step that was confirmed;
        "patterns": `keep` of the recipe with the greedy layers, [] where none is worth it; "mean" before, on
        the tokens that confirm.

    Raises:
        ValueError: see `split`.
    """
    chosen_on, confirmed_on = split(lab.drawn, tokens)
    bench = Search(lab, recipe)
    before = bench.mismatch((), chosen_on)
    alone = []
    for unit in bench.units:
        tick(unit)
        gain = paired_gain(before, bench.mismatch([unit], chosen_on))
        alone.append({"layer": unit, "gain": gain, "bytes": bench.bytes_of(unit)})
    order = sorted(alone, key=lambda row: row["gain"].value / row["bytes"], reverse=True)
    greedy = _greedy(bench, (chosen_on, confirmed_on), [row["layer"] for row in order], steps, tick)
    left = default_keeps(bench.plan, quantizable(bench.learner))
    return {
        "mean": bootstrap([d.abs() for d in bench.mismatch((), confirmed_on)]),
        "tokens": [chosen_on.tokens, confirmed_on.tokens],
        "alone": alone,
        "greedy": greedy,
        "patterns": [*left, *(f"{row['layer']}.*" for row in greedy)] if greedy else [],
    }


def _greedy(
    bench: Search, parts: tuple[Drawn, Drawn], order: Sequence[str], steps: int, tick: Callable[[str], None]
) -> list[dict[str, Any]]:
    taken: list[dict[str, Any]] = []
    choose, confirm = (bench.mismatch((), part) for part in parts)
    for _ in range(min(steps, len(order) - 1)):
        kept_now = [row["layer"] for row in taken]
        trials = {}
        for unit in [u for u in order if u not in kept_now][:SHORTLIST]:
            tick(" + ".join([*kept_now, unit]))
            trials[unit] = bench.mismatch([*kept_now, unit], parts[0])
        gains = {
            unit: paired_gain(choose, diffs).value / bench.bytes_of(unit) for unit, diffs in trials.items()
        }
        unit = max(gains, key=lambda u: gains[u])
        after = bench.mismatch([*kept_now, unit], parts[1])
        gain = paired_gain(confirm, after)
        if gain.low <= 0:
            break
        choose, confirm = trials[unit], after
        mean = bootstrap([d.abs() for d in after])
        taken.append({"layer": unit, "gain": gain, "mean": mean, "bytes": bench.bytes_of(unit)})
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


def default_keeps(plan: Plan, linears: Iterable[str]) -> list[str]:
    """Linears the plan leaves alone: a recipe that names `keep` names them too."""
    return [name for name in linears if not plan.by_name[name].quantized]
