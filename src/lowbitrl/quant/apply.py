"""prepare: a plan put on a model, in place. export: the bytes a plan ships, streaming."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Literal

from torch import Tensor, nn

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.quant.linear import (
    ActivationSite,
    LearnerLinear,
    RolloutLinear,
    TokenContext,
    WeightGroup,
    encode_group,
)
from lowbitrl.quant.plan import LayerPlan, Plan, resolve
from lowbitrl.quant.recipe import Recipe

Side = Literal["learner", "rollout"]


@dataclass
class Attachment:
    """What `prepare` leaves on a model, under `model.lowbitrl`."""

    plan: Plan
    side: Side
    tokens: TokenContext
    groups: list[WeightGroup] = field(default_factory=list)
    sites: dict[str, ActivationSite] = field(default_factory=dict)


def prepare(model: nn.Module, recipe: Recipe | Plan, side: Side = "learner") -> Plan:
    """Put a recipe on a model in place, before any sharding; names of parameters are unchanged.

    side="learner": weights stay trainable; forward uses the bytes of their current values as far
    as `recipe.learner` says. side="rollout": the weights the model holds are encoded once and
    frozen; `update_rollout` replaces them.

    Args:
        model: a transformers causal LM or any module of linears, BF16 or FP32.
        recipe: a `Recipe`, or a `Plan` resolved before (its modules must be this model's).

    Returns:
        The plan, also found at `attachment(model).plan`.

    Raises:
        ValueError: everything `plan.resolve` refuses; a model prepared before; a plan whose
            decisions are not this model's.
    """
    if side not in ("learner", "rollout"):
        raise ValueError(f"side={side!r} is unknown; choose 'learner' or 'rollout'")
    if hasattr(model, "lowbitrl"):
        raise ValueError("this model is prepared already; prepare a freshly loaded one")
    plan = resolve(recipe.recipe if isinstance(recipe, Plan) else recipe, model)
    if isinstance(recipe, Plan) and recipe.diff(plan):
        raise ValueError(f"the plan is not this model's:\n{recipe.diff(plan)}")
    attached = Attachment(plan, side, TokenContext())
    modules = dict(model.named_modules())
    for layers in plan.groups.values():
        _swap_group(attached, layers, [modules[layer.name] for layer in layers])
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


def real_tokens(model: nn.Module, mask: Tensor | None) -> AbstractContextManager[None]:
    """Name the real tokens, (batch, length) bool, of the forward passes inside the `with` block.

    A model without a plan has nothing to tell, and is left alone.
    """
    attached = model.__dict__.get("lowbitrl")
    return nullcontext() if attached is None else attached.tokens.real_tokens(mask)


def _swap_group(attached: Attachment, layers: tuple[LayerPlan, ...], modules: list[nn.Module]) -> None:
    group = WeightGroup(layers, modules) if layers[0].weight else None  # type: ignore[arg-type]
    if group is not None and attached.side == "learner":
        attached.groups.append(group)
    site = _site(attached, layers)
    bytes_ = group.encoded() if group is not None and attached.side == "rollout" else {}
    for layer, module in zip(layers, modules, strict=True):
        if attached.side == "rollout":
            _wear(module, RolloutLinear, plan=layer, site=site, encoded=None)
            if layer.name in bytes_:
                module.adopt(bytes_[layer.name])  # type: ignore[operator]
        elif layer.learner_weight or site is not None:
            _wear(module, LearnerLinear, plan=layer, site=site, group=group if layer.learner_weight else None)


def _wear(module: nn.Module, cls: type[nn.Module], **attributes: object) -> None:
    module.__class__ = cls
    # Past nn.Module.__setattr__: plans, groups and sites are no submodules, buffers or parameters.
    module.__dict__.update(attributes)


def _site(attached: Attachment, layers: tuple[LayerPlan, ...]) -> ActivationSite | None:
    layer = layers[0]
    name = layer.activation if attached.side == "rollout" else layer.learner_activation
    if name is None:
        return None
    site = ActivationSite(name, layer.residual, attached.plan.recipe.scope, attached.tokens, len(layers))
    attached.sites[layer.group] = site
    return site


def export(named_full_tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors to ship for a version, encoded by `plan`, one fused group at a time.

    A quantized weight "m.weight" becomes "m.qdata", "m.scale" and, where the format has one,
    "m.global_scale"; everything else passes as it is. Give weights in the compute dtype: bytes
    of the fp32 master differ from those of its BF16 value (field experience: 25 times the KL).

    Args:
        named_full_tensors: (name, full tensor); members of a group may come in any order.

    Raises:
        ValueError: a member of a fused group never comes; NaN or Inf in a weight.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in named_full_tensors:
        layer = plan.by_name.get(name.removesuffix(".weight"))
        if layer is None or layer.weight is None or not name.endswith(".weight"):
            yield name, tensor
            continue
        members = waiting.setdefault(layer.group, {})
        members[layer.name] = tensor.detach()
        if len(members) == len(plan.groups[layer.group]):
            ordered = {peer.name: members[peer.name] for peer in plan.groups[layer.group]}
            yield from wire(encode_group(ordered, get_format(layer.weight)))
            del waiting[layer.group]
    if waiting:
        group, members = next(iter(waiting.items()))
        missing = [peer.name for peer in plan.groups[group] if peer.name not in members]
        raise ValueError(f"{missing[0]}.weight never came: its global scale is shared with {group}")


def wire(encoded: dict[str, QuantizedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Flatten encoded weights to named tensors: "m.qdata", "m.scale", "m.global_scale"."""
    for name, quantized in encoded.items():
        for part, tensor in quantized.tensors().items():
            yield f"{name}.{part}", tensor
