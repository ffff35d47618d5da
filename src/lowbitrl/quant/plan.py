"""A recipe resolved on one model: one row per module with parameters, each with a decision and reason.

Learner, publisher and engine read the same plan; its digest travels with every published
version, so that two sides with different ideas of what is quantized cannot meet.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import cached_property
from typing import Any

import torch
from torch import nn

from lowbitrl.formats import get_format
from lowbitrl.formats.fp8 import TILE
from lowbitrl.quant import topology
from lowbitrl.quant.recipe import STATIC, Precision, Recipe
from lowbitrl.quant.stacks import StackLayout, layout_of

SMALLER_INT4_GROUPS = (128, 64, 32, 16)
W4A8 = ":w4a8"


@dataclass(frozen=True)
class LayerPlan:
    """The decision for one module.

    Attributes:
        name: whole module name, "model.layers.0.mlp.gate_proj"; for a stack of experts, which is no
            module, the parameter's, "model.layers.0.mlp.experts.down_proj".
        shape: shape of its weight, input dimension last: (N, K), or (E, N, K) for a stack.
        weight / activation: formats on the rollout side, None for BF16.
        learner_weight / learner_activation: formats in the learner's forward pass.
        residual: fraction of channels repaired at this module's input, rollout side.
        group: first name of the fused group that shares global scale and activation site.
        reason: why it is left alone; empty where it is quantized.
        layout: of a stack of experts; None for a linear.

    Example:
        LayerPlan("model.layers.0.mlp.up_proj", (1536, 576), "nvfp4", "nvfp4-token", "nvfp4", None,
                  0.5, "model.layers.0.mlp.gate_proj", "")
    """

    name: str
    shape: tuple[int, ...]
    weight: str | None = None
    activation: str | None = None
    learner_weight: str | None = None
    learner_activation: str | None = None
    residual: float = 0.0
    group: str = ""
    reason: str = ""
    layout: StackLayout | None = None

    @property
    def parameter(self) -> str:
        """Name of the parameter that holds the weight."""
        return self.name if self.layout is not None else f"{self.name}.weight"

    @property
    def quantized(self) -> bool:
        """Whether either side of this module leaves BF16."""
        return self.weight is not None or self.activation is not None

    @property
    def static(self) -> bool:
        """Whether its input has a calibrated scale, which ships with the weights."""
        return self.activation in STATIC.values()


@dataclass(frozen=True)
class Plan:
    """Every module of a model with its decision; equal digests mean equal decisions."""

    recipe: Recipe
    layers: tuple[LayerPlan, ...]

    @cached_property
    def by_name(self) -> dict[str, LayerPlan]:
        """Rows by module name."""
        return {layer.name: layer for layer in self.layers}

    @cached_property
    def by_parameter(self) -> dict[str, LayerPlan]:
        """Rows whose weights ship as bytes, by the name of the parameter that the bytes replace."""
        return {layer.parameter: layer for layer in self.layers if layer.weight}

    @cached_property
    def exported(self) -> dict[str, LayerPlan]:
        """Rows whose weights ship as bytes, by the names that `export` gives them: stacks one expert a row."""
        rows: dict[str, LayerPlan] = {}
        for layer in self.by_parameter.values():
            if layer.layout is None:
                rows[layer.name] = layer
                continue
            count, height, width = layer.shape
            shape = (height // len(layer.layout.names), width)
            for name in (n.format(expert) for expert in range(count) for n in layer.layout.names):
                rows[name] = dataclasses.replace(layer, name=name, shape=shape, layout=None)
        return rows

    @cached_property
    def quantized(self) -> tuple[LayerPlan, ...]:
        """Rows that leave BF16 on the rollout side."""
        return tuple(layer for layer in self.layers if layer.quantized)

    @cached_property
    def groups(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Fused groups of quantized linears by their first name."""
        groups: dict[str, tuple[LayerPlan, ...]] = {}
        for layer in self.quantized:
            if layer.layout is None:
                groups[layer.group] = (*groups.get(layer.group, ()), layer)
        return groups

    @cached_property
    def stacks(self) -> dict[str, tuple[LayerPlan, ...]]:
        """Quantized stacks of experts by the name of their experts module."""
        stacks: dict[str, tuple[LayerPlan, ...]] = {}
        for layer in self.quantized:
            if layer.layout is not None:
                owner = layer.name.rpartition(".")[0]
                stacks[owner] = (*stacks.get(owner, ()), layer)
        return stacks

    @cached_property
    def digest(self) -> str:
        """Sixteen hex digits over every decision, independent of how the recipe was spelt."""
        rows = json.dumps([dataclasses.astuple(layer) for layer in self.layers], sort_keys=True)
        text = f"{self.recipe.scope}|{rows}"
        return hashlib.sha256(text.encode()).hexdigest()[:16]

    def diff(self, other: Plan) -> str:
        """Two lines that show the first module the plans disagree on; empty where they agree."""
        if self.digest == other.digest:
            return ""
        for name in [*self.by_name, *(n for n in other.by_name if n not in self.by_name)]:
            mine, theirs = self.by_name.get(name), other.by_name.get(name)
            if mine != theirs:
                return f"- {_describe(mine, name)}\n+ {_describe(theirs, name)}"
        return f"- residual scope {self.recipe.scope}\n+ residual scope {other.recipe.scope}"

    def table(self) -> str:
        """One line a module, as fixed-width text: formats on both sides, or why it is left alone."""
        header = ("module", "weight shape", "rollout W", "rollout A", "learner W", "learner A", "note")
        rows = [header, *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[i]) for row in rows) for i in range(len(header))]
        lines = [
            "  ".join(cell.ljust(w) for cell, w in zip(row, widths, strict=True)).rstrip() for row in rows
        ]
        notes = [f"not batch-invariant: {reason}" for reason in self.batch_dependence]
        return "\n".join([lines[0], "-" * len(lines[0]), *lines[1:], "", self.summary(), *notes])

    @cached_property
    def batch_dependence(self) -> tuple[str, ...]:
        """Why a completion's arithmetic depends on what shares its batch; empty where it does not."""
        reasons = []
        if self.recipe.scope == "batch" and any(layer.residual for layer in self.quantized):
            reasons.append(
                "residual channels are chosen over the whole batch (recipe.residual_scope='token' chooses them a row)"
            )
        dynamic = {layer.activation for layer in self.quantized if layer.activation and not layer.static}
        for name in sorted(name for name in dynamic if not get_format(name).is_batch_invariant):
            reasons.append(
                f"{name} activations share one dynamic scale (recipe.activation_scale='token' does not)"
            )
        return tuple(reasons)

    def summary(self) -> str:
        """Counts, share of weights quantized, digest: the line printed at start."""
        # A head tied to the embedding is a row of its own, but no weights of its own.
        total = sum(_numel(layer) for layer in self.layers if layer.reason != topology.TIED)
        low = sum(_numel(layer) for layer in self.layers if layer.weight)
        return (
            f"plan {self.digest}: {len(self.quantized)} of {len(self.layers)} modules quantized, "
            f"{low / max(total, 1):.1%} of {total / 1e6:.1f}M weights; rollout {self.recipe.rollout}, "
            f"learner {self.recipe.learner}, residual {self.recipe.residual:g} per {self.recipe.scope}"
            + (", static activation scales" if any(layer.static for layer in self.quantized) else "")
        )

    def to_dict(self) -> dict[str, Any]:
        """Plain data for plan.json."""
        return {
            "digest": self.digest,
            "recipe": dataclasses.asdict(self.recipe),
            "layers": [dataclasses.asdict(layer) for layer in self.layers],
        }


def resolve(recipe: Recipe, model: nn.Module) -> Plan:
    """Decide for every module of `model` what `recipe` means; nothing is changed. Works on meta.

    Raises:
        ValueError: no module would be quantized though the recipe asks for it; a keep pattern
            matches nothing; a width does not fit a format; tied weights would be quantized; weights
            of experts would stay in BF16 unnoticed; the parameters are not BF16 or FP32.
    """
    _check_dtypes(model)
    linears, stacks = topology.quantizable(model), topology.expert_stacks(model)
    kept = _kept(recipe, model, [*linears, *stacks], _check_stacks(recipe, model))
    group_of = _group_names([name for name in linears if name not in kept])
    layers: list[LayerPlan] = []
    for name, module in model.named_modules():
        own = [f"{name}.{leaf}".lstrip(".") for leaf, _ in module.named_parameters(recurse=False)]
        if any(parameter in stacks for parameter in own):
            layers += [_decide_stack(recipe, n, module, model, kept) for n in own if n in stacks]
        elif own:
            layers.append(_decide(recipe, name, module, linears, kept, group_of, moe=bool(stacks)))
    plan = Plan(recipe, tuple(_one_format_a_group(layers)))
    if recipe.rollout != "bf16" and not plan.quantized:
        raise ValueError(
            f"rollout={recipe.rollout!r} quantizes no module: keep={recipe.keep} covers every linear"
        )
    _check_ties(plan, model, linears)
    return plan


def _check_stacks(recipe: Recipe, model: nn.Module) -> list[str]:
    """Names of the weights that cannot be quantized and must be kept by a pattern."""
    unsupported = topology.unsupported_stacks(model)
    for name, shape in unsupported.items():
        named = any(fnmatchcase(name, pattern) for pattern in recipe.keep or ())
        if recipe.rollout != "bf16" and not named:
            raise ValueError(
                f"{name} has shape {shape}: these expert stacks are not supported, and leaving them "
                f"unquantized would go unnoticed; add {name!r} to keep, or use another model"
            )
    return list(unsupported)


def _kept(recipe: Recipe, model: nn.Module, names: list[str], unsupported: list[str]) -> dict[str, str]:
    if recipe.keep is None:
        return topology.kept_by_default(model, names)
    matched = topology.match_all(recipe.keep, [*names, *unsupported])
    return {name: f"kept by {pattern!r}" for name, pattern in matched.items()}


def _group_names(names: list[str]) -> dict[str, str]:
    return {name: group[0] for group in topology.fused_groups(names) for name in group}


def _decide(
    recipe: Recipe,
    name: str,
    module: nn.Module,
    linears: dict[str, nn.Linear],
    kept: dict[str, str],
    group_of: dict[str, str],
    moe: bool,
) -> LayerPlan:
    shape = tuple(next(module.parameters(recurse=False)).shape)
    if name not in linears:
        is_router = name.rpartition(".")[2] in topology.ROUTER_LEAVES
        reason = "router" if is_router else f"{type(module).__name__} is not a linear"
        return LayerPlan(name, shape, reason=reason)
    if name in kept:
        return LayerPlan(name, shape, reason=kept[name])
    if recipe.rollout == "bf16":
        return LayerPlan(name, shape, reason="rollout is bf16")
    return _quantized(recipe, name, shape, group_of[name], moe)


def _decide_stack(
    recipe: Recipe, name: str, module: nn.Module, model: nn.Module, kept: dict[str, str]
) -> LayerPlan:
    layout = layout_of(module, name, getattr(getattr(model, "config", None), "model_type", None))
    shape = tuple(getattr(module, name.rpartition(".")[2]).shape)
    shape = (shape[0], shape[2], shape[1]) if layout.transposed else shape
    if name in kept or recipe.rollout == "bf16":
        return LayerPlan(name, shape, reason=kept.get(name, "rollout is bf16"), layout=layout)
    layer = dataclasses.replace(_quantized(recipe, name, shape, name, moe=True), layout=layout)
    tiled = (layer.weight or "").startswith("fp8-block")
    if tiled and len(layout.names) == 2 and shape[1] // 2 % TILE:
        raise ValueError(
            f"{name}: gate and up have {shape[1] // 2} rows each, no multiple of the {TILE} x {TILE} tile of "
            f"{layer.weight}, so a tile would cover both; use rollout='fp8' or add {name!r} to keep"
        )
    return layer


def _quantized(recipe: Recipe, name: str, shape: tuple[int, ...], group: str, moe: bool) -> LayerPlan:
    weight = _fit(recipe.precision, shape)
    for format_name in (weight, recipe.precision.activation):
        if format_name is not None:
            get_format(format_name).check_shape(shape, name=name)
    learner = recipe.learner_precision
    return LayerPlan(
        name,
        shape,
        weight=weight,
        activation=recipe.precision.activation,
        learner_weight=weight if learner.weight else None,
        learner_activation=learner.activation,
        residual=recipe.residual_at(topology.site_of(name), moe),
        group=group,
    )


def _fit(precision: Precision, shape: tuple[int, ...]) -> str | None:
    """The weight format for one shape; int4 recipes alone adapt to it.

    The largest group that divides the width; under FP8 activations also the group-scale
    re-encoding of the Hopper kernel, which runs only where both sides are multiples of 128.
    """
    if precision.weight != "int4-g128":
        return precision.weight
    if precision.activation and all(size % 128 == 0 for size in shape[-2:]):
        return f"int4-g128{W4A8}"
    group = next((g for g in SMALLER_INT4_GROUPS if shape[-1] % g == 0), SMALLER_INT4_GROUPS[-1])
    return f"int4-g{group}"


def _one_format_a_group(layers: list[LayerPlan]) -> list[LayerPlan]:
    """A fused group is one product: where a member is too narrow for w4a8's re-encoding, none has it."""
    formats: dict[str, set[str | None]] = {}
    for layer in layers:
        formats.setdefault(layer.group, set()).add(layer.weight)
    return [
        dataclasses.replace(
            layer,
            weight=layer.weight and layer.weight.removesuffix(W4A8),
            learner_weight=layer.learner_weight and layer.learner_weight.removesuffix(W4A8),
        )
        if layer.group and len(formats[layer.group]) > 1
        else layer
        for layer in layers
    ]


def _check_dtypes(model: nn.Module) -> None:
    for name, parameter in model.named_parameters():
        if parameter.dtype not in (torch.bfloat16, torch.float32):
            raise ValueError(
                f"{name} is {parameter.dtype}; formats are defined for torch.bfloat16 and torch.float32 "
                "weights: load the model with dtype=torch.bfloat16"
            )


def _check_ties(plan: Plan, model: nn.Module, linears: dict[str, nn.Linear]) -> None:
    for layer in plan.quantized:
        module = linears.get(layer.name)
        if layer.weight and module is not None and topology.tied_to_embedding(model, module):
            raise ValueError(
                f"{layer.name} shares its weight with the input embedding, which stays in BF16; "
                f"add {layer.name!r} to keep, or untie the embeddings"
            )


def _numel(layer: LayerPlan) -> int:
    count = 1
    for size in layer.shape:
        count *= size
    return count


def _row(layer: LayerPlan) -> tuple[str, ...]:
    parts = ["static scale"] * layer.static + [f"residual {layer.residual:g}"] * bool(layer.residual)
    note = layer.reason or ", ".join(parts)
    if layer.group and layer.group != layer.name:
        note = f"{note}, scale of {layer.group.rpartition('.')[2]}".lstrip(", ")
    formats = (layer.weight, layer.activation, layer.learner_weight, layer.learner_activation)
    return (layer.name, "x".join(map(str, layer.shape)), *(f or "-" for f in formats), note)


def _describe(layer: LayerPlan | None, name: str) -> str:
    if layer is None:
        return f"{name}: absent"
    return f"{name}: " + " ".join(_row(layer)[1:])
