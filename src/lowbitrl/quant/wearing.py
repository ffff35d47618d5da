"""A prepared learner under another arithmetic for a few passes: its own weights, another recipe."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import nn

from lowbitrl.quant.apply import Attachment, Side, attachment
from lowbitrl.quant.experts import Projection, StackWeights, WornExperts, select_dispatch
from lowbitrl.quant.groups import WeightGroup
from lowbitrl.quant.linear import LearnerLinear
from lowbitrl.quant.plan import LayerPlan, resolve
from lowbitrl.quant.recipe import Recipe
from lowbitrl.quant.sites import ActivationSite
from lowbitrl.quant.stacks import STACKS, layout_of


@contextmanager
def wearing(model: nn.Module, recipe: Recipe, side: Side) -> Iterator[None]:
    """Let the passes inside the block, without gradients, use `side`'s arithmetic of `recipe`.

    Weights are encoded anew for the block, also those of shards, which are whole inside a pass. What the
    model wore is put back, whatever happens.

    Raises:
        ValueError: everything `resolve` refuses; static activation scales; a model without a plan.
    """
    attached, plan = attachment(model), resolve(recipe, model)
    if any(layer.static for layer in plan.layers):
        raise ValueError(
            "activation_scale='static' needs calibrated scales, which another recipe does not bring"
        )
    modules = dict(model.named_modules())
    with ExitStack() as stack:
        for layers in plan.groups.values():
            members = [modules[layer.name] for layer in layers]
            group = WeightGroup(layers, members) if _weight(layers[0], side) else None  # type: ignore[arg-type]
            site = _site(layers[0], side, attached, recipe, len(layers))
            for layer, module in zip(layers, members, strict=True):
                stack.enter_context(_swapped(module, LearnerLinear, plan=layer, site=site, group=group))
        for owner in plan.stacks:
            names = [f"{owner}.{leaf}".lstrip(".") for leaf in STACKS]
            # Both of a module's stacks, also where a pattern keeps one in BF16.
            rows = tuple(plan.by_name[name] for name in names if name in plan.by_name)
            worn = _experts(model, modules[owner], rows, side, attached, recipe)
            stack.enter_context(_swapped(modules[owner], None, lowbitrl_experts=worn))
            stack.enter_context(_dispatched(modules[owner]))
        yield


def compute_in(model: nn.Module, dtype: torch.dtype) -> None:
    """Decode in `dtype` from now on: a learner that was prepared in the dtype of its masters."""
    attached = attachment(model)
    attached.dtype = dtype
    for group in attached.groups:
        group.dtype = dtype
    for module in model.modules():
        worn = module.__dict__.get("lowbitrl_experts")
        if worn is not None:
            worn.w13.weights.dtype = worn.w2.weights.dtype = dtype


def _weight(layer: LayerPlan, side: Side) -> str | None:
    return layer.weight if side == "rollout" else layer.learner_weight


def _site(
    layer: LayerPlan, side: Side, attached: Attachment, recipe: Recipe, members: int
) -> ActivationSite | None:
    name = layer.activation if side == "rollout" else layer.learner_activation
    if name is None:
        return None
    return ActivationSite(name, layer.residual, recipe.scope, attached.tokens, members)


def _experts(
    model: nn.Module,
    module: nn.Module,
    rows: tuple[LayerPlan, ...],
    side: Side,
    attached: Attachment,
    recipe: Recipe,
) -> WornExperts:
    kind = getattr(getattr(model, "config", None), "model_type", None)
    projections = []
    for row in rows:
        weights = StackWeights(row, layout_of(module, row.name, kind), module, frozen=False)
        weights.dtype = attached.dtype
        site = _site(row, side, attached, recipe, 1)
        projections.append(Projection(weights, bool(_weight(row, side)), site))
    return WornExperts(*projections)


@contextmanager
def _swapped(module: nn.Module, cls: type[nn.Module] | None, **attributes: object) -> Iterator[None]:
    before, kept = module.__class__, {k: module.__dict__[k] for k in attributes if k in module.__dict__}
    module.__class__ = cls or before
    module.__dict__.update(attributes)
    try:
        yield
    finally:
        module.__class__ = before
        for name in attributes:
            del module.__dict__[name]
        module.__dict__.update(kept)


@contextmanager
def _dispatched(module: Any) -> Iterator[None]:
    before = module.config._experts_implementation
    select_dispatch([module])
    try:
        yield
    finally:
        module.config._experts_implementation = before
