"""prepare: a plan put on a model, in place."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

import torch
from torch import Tensor, nn

from lowbitrl.formats import Calibrator
from lowbitrl.quant.experts import Projection, StackWeights, WornExperts, select_dispatch
from lowbitrl.quant.groups import WeightGroup
from lowbitrl.quant.linear import LearnerLinear, RolloutLinear
from lowbitrl.quant.plan import LayerPlan, Plan, resolve
from lowbitrl.quant.products import refuse_low_bit
from lowbitrl.quant.recipe import Kernels, Recipe
from lowbitrl.quant.routing import RoutingContext, wear_routers
from lowbitrl.quant.sites import ActivationSite, TokenContext
from lowbitrl.quant.stacks import STACKS, layout_of

Side = Literal["learner", "rollout"]


@dataclass
class Attachment:
    """What `prepare` leaves on a model, under `model.lowbitrl`.

    Attributes:
        kernels: rollout side: what its products were asked to run.
        groups: learner side: what encodes its weights. stacks: rollout side: what holds the bytes
            of its expert stacks, by name. routing: what its routers ask, empty in a dense model.
        sites: what quantizes inputs, by fused group. scales: static scales of inputs, by fused group.
        dtype: the compute dtype. device: where a learner spread over processes computes; None: it is whole.
    """

    plan: Plan
    side: Side
    tokens: TokenContext
    dtype: torch.dtype
    device: torch.device | None = None
    kernels: Kernels = "learner"
    routing: RoutingContext = field(default_factory=lambda: RoutingContext(()))
    groups: list[WeightGroup | StackWeights] = field(default_factory=list)
    stacks: dict[str, StackWeights] = field(default_factory=dict)
    sites: dict[str, ActivationSite] = field(default_factory=dict)
    scales: dict[str, Calibrator] = field(default_factory=dict)

    def spread(self, device: torch.device, keep_bytes: bool = True) -> None:
        """Note that the learner's parameters are shards from now on, gathered on `device`.

        Args:
            keep_bytes: see `WeightGroup.keeps`.
        """
        self.device = device
        for group in self.groups:
            group.device, group.keeps = device, keep_bytes

    def changes(self, layer: LayerPlan) -> bool:
        """Whether a row's module is ours on this side: its arithmetic leaves BF16, or its input is observed."""
        if self.side == "rollout":
            return layer.quantized
        return layer.learner_weight is not None or layer.learner_activation is not None or layer.static


def prepare(
    model: nn.Module,
    recipe: Recipe | Plan,
    side: Side = "learner",
    *,
    keep_decoded_experts: bool = False,
    kernels: Kernels = "learner",
) -> Plan:
    """Put a recipe on a model in place, before any sharding; names of parameters are unchanged.

    side="learner": weights stay trainable; forward uses the bytes of their current values as far
    as `recipe.learner` says. side="rollout": the weights the model holds are encoded once and
    frozen; `update_rollout` replaces them.

    Args:
        model: a transformers causal LM or any module of linears, BF16 or FP32.
        recipe: a `Recipe`, or a `Plan` resolved before (its modules must be this model's).
        keep_decoded_experts: rollout side: decode experts once per update and keep them at BF16's
            memory, in place of decoding those that have tokens in every forward pass.
        kernels: rollout side: "learner" multiplies by decoded weights as the learner does, the same
            bits on the same input; "low-bit" reads bytes in kernels where they can
            (`describe_products` says where), apart from the learner by bounded rounding.

    Returns:
        The plan, also found at `attachment(model).plan`.

    Raises:
        ValueError: everything `plan.resolve` refuses; a model prepared before; a plan whose
            decisions are not this model's; low-bit kernels that nothing here can run.
    """
    if side not in ("learner", "rollout"):
        raise ValueError(f"side={side!r} is unknown; choose 'learner' or 'rollout'")
    if hasattr(model, "lowbitrl"):
        raise ValueError("this model is prepared already; prepare a freshly loaded one")
    plan = resolve(recipe.recipe if isinstance(recipe, Plan) else recipe, model)
    if isinstance(recipe, Plan) and recipe.diff(plan):
        raise ValueError(f"the plan is not this model's:\n{recipe.diff(plan)}")
    if kernels == "low-bit":
        refuse_low_bit(plan, model, side, keep_decoded_experts)
    attached = Attachment(plan, side, TokenContext(), next(model.parameters()).dtype, kernels=kernels)
    modules = dict(model.named_modules())
    for layers in plan.groups.values():
        _swap_group(attached, layers, [modules[layer.name] for layer in layers])
    _wear_experts(attached, model, modules, keep_decoded_experts)
    attached.routing = wear_routers(model)
    if side == "rollout":
        model.requires_grad_(False)
        model.eval()
    model.__dict__["lowbitrl"] = attached
    return plan


def attachment(model: nn.Module) -> Attachment:
    """What `prepare` left on `model`.

    Raises:
        ValueError: the model was never prepared.
    """
    attached = model.__dict__.get("lowbitrl")
    if attached is None:
        raise ValueError("this model wears no plan; call lowbitrl.quant.prepare(model, recipe, side) first")
    return attached


def forget_bytes(model: nn.Module) -> None:
    """Encode a learner's weights anew when they are next asked for: a sharded one's have no version counter."""
    for group in attachment(model).groups:
        group.invalidate()


def real_tokens(model: nn.Module, mask: Tensor | None) -> AbstractContextManager[None]:
    """Name the real tokens, (batch, length) bool, of the forward passes inside the `with` block.

    A model without a plan has nothing to tell, and is left alone.
    """
    attached = model.__dict__.get("lowbitrl")
    return nullcontext() if attached is None else attached.tokens.real_tokens(mask)


def observing(model: nn.Module) -> AbstractContextManager[None]:
    """Let static sites note the maxima of the forward passes inside the `with` block, for the next publish."""
    return attachment(model).tokens.observation()


def calibrate(model: nn.Module, run: Callable[[], object]) -> None:
    """Find the first static scales of `model`: `run` makes forward passes in which static sites quantize nothing.

    Raises:
        RuntimeError: a site that `run` did not reach.
        ValueError: NaN or Inf at a site, or a model without a plan.
    """
    attached = attachment(model)
    with torch.no_grad(), attached.tokens.observation(open=True):
        run()
    for scale in attached.scales.values():
        scale.refresh()


def static_scales(model: nn.Module) -> dict[str, float]:
    """The frozen maximum of every static site by fused group, exact: what a checkpoint keeps."""
    return {name: float(scale.amax) for name, scale in attachment(model).scales.items()}


def restore_scales(model: nn.Module, saved: Mapping[str, float]) -> None:
    """Put back what `static_scales` gave.

    Raises:
        ValueError: it is of another plan.
    """
    scales, device = attachment(model).scales, next(model.parameters()).device
    if scales.keys() != saved.keys():
        odd = next(iter(scales.keys() ^ saved.keys()))
        raise ValueError(f"static scales of another plan: {odd} is on one side only")
    for name, value in saved.items():
        scales[name].amax = torch.tensor(value, device=device)


def _swap_group(attached: Attachment, layers: tuple[LayerPlan, ...], modules: list[nn.Module]) -> None:
    group = WeightGroup(layers, modules) if layers[0].weight else None  # type: ignore[arg-type]
    if group is not None and attached.side == "learner":
        attached.groups.append(group)
    site = _site(attached, layers)
    bytes_ = group.encoded() if group is not None and attached.side == "rollout" else {}
    for layer, module in zip(layers, modules, strict=True):
        if attached.side == "rollout":
            low_bit = attached.kernels == "low-bit"
            _wear(module, RolloutLinear, plan=layer, site=site, encoded=None, low_bit=low_bit)
            if layer.name in bytes_:
                module.adopt(bytes_[layer.name])  # type: ignore[operator]
        elif layer.learner_weight or site is not None:
            _wear(module, LearnerLinear, plan=layer, site=site, group=group if layer.learner_weight else None)


def _wear_experts(
    attached: Attachment, model: nn.Module, modules: dict[str, nn.Module], keep_decoded: bool
) -> None:
    worn = []
    for owner, rows in attached.plan.stacks.items():
        names = [f"{owner}.{leaf}".lstrip(".") for leaf in STACKS]
        both = [attached.plan.by_name[name] for name in names if name in attached.plan.by_name]
        w13, w2 = (_projection(attached, model, modules[owner], row, keep_decoded) for row in both)
        if any(attached.changes(row) for row in rows):
            low_bit = attached.kernels == "low-bit"
            modules[owner].__dict__["lowbitrl_experts"] = WornExperts(w13, w2, low_bit)
            worn.append(modules[owner])
    if worn:
        select_dispatch(worn)


def _projection(
    attached: Attachment, model: nn.Module, module: nn.Module, row: LayerPlan, keep_decoded: bool
) -> Projection:
    rollout = attached.side == "rollout"
    aligned = bool(row.weight if rollout else row.learner_weight)
    model_type = getattr(getattr(model, "config", None), "model_type", None)
    weights = StackWeights(
        row, layout_of(module, row.name, model_type), module, rollout and aligned, keep_decoded
    )
    if rollout and aligned:
        weights.freeze()
        attached.stacks[row.name] = weights
    elif row.weight:
        attached.groups.append(weights)
    return Projection(weights, aligned, _site(attached, (row,)))


def _wear(module: nn.Module, cls: type[nn.Module], **attributes: object) -> None:
    module.__class__ = cls
    # Past nn.Module.__setattr__: plans, groups and sites are no submodules, buffers or parameters.
    module.__dict__.update(attributes)


def _site(attached: Attachment, layers: tuple[LayerPlan, ...]) -> ActivationSite | None:
    layer = layers[0]
    name = layer.activation if attached.side == "rollout" else layer.learner_activation
    seen = layer.activation if layer.static else name
    if seen is None:
        return None
    site = ActivationSite(
        seen,
        layer.residual,
        attached.plan.recipe.scope,
        attached.tokens,
        len(layers),
        scale=Calibrator(layer.group) if layer.static else None,
        quantizes=name is not None,
    )
    if site.quantizes:
        attached.sites[layer.group] = site
    if site.scale is not None:
        attached.scales[layer.group] = site.scale
    return site
