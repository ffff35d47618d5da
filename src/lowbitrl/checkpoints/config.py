"""quantization_config: what a written checkpoint tells the engine that loads it.

Built with the schema classes of compressed-tensors, so that a field it does not know cannot be written, and
checked with its own matcher: the modules that an engine will look for scales in are the plan's, no more
and no fewer. ModelOpt's is a plain dictionary, as its exporter writes it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

from torch import nn

from lowbitrl.quant import LayerPlan, Plan
from lowbitrl.quant.topology import FUSED_SIBLINGS

if TYPE_CHECKING:
    from compressed_tensors.quantization import QuantizationArgs, QuantizationScheme

PRESETS = {
    "nvfp4": "NVFP4A16",
    "mxfp4": "MXFP4A16",
    "mxfp8": "MXFP8A16",
    "fp8-channel": "FP8_DYNAMIC",
    "fp8-block": "FP8_BLOCK",
    "int8-channel": "INT8",
    "int4": "W4A16",
}
"""Weight format -> the preset of compressed-tensors whose weights are meant."""
ACTIVATION_PRESETS = {
    "fp8-token": "FP8_DYNAMIC",
    "fp8-tensor:vllm": "FP8",
    "fp8-1x128": "FP8_BLOCK",
    "int8-token": "INT8",
    "nvfp4-token": "NVFP4",
    "mxfp4": "MXFP4",
    "mxfp8": "MXFP8",
}
STORAGE = {
    "nvfp4": "nvfp4-pack-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
    "fp8-channel": "float-quantized",
    "fp8-block": "float-quantized",
    "int8-channel": "int-quantized",
    "int4": "pack-quantized",
}
# vLLM serves these as one layer; what it is called there.
FUSED_NAMES = {"q_proj": "qkv_proj", "gate_proj": "gate_up_proj", "w1": "w13", "q_a_proj": "fused_qkv_a_proj"}


def compressed_tensors_config(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """The `quantization_config` of a checkpoint in compressed-tensors' layout.

    Args:
        plan: its weight and activation formats are what is written; where every quantized linear wears the
            same, the target is "Linear" and the rest are ignored by whole name, else names are targets.
        model: the model whose modules the names are.

    Raises:
        ImportError: compressed-tensors is not installed.
        ValueError: compressed-tensors would match other modules than the plan's.
    """
    from compressed_tensors import __version__
    from compressed_tensors.quantization import QuantizationConfig, QuantizationStatus

    by_format: dict[tuple[str, str | None], list[str]] = {}
    for layer in plan.exported.values():
        assert layer.weight is not None
        by_format.setdefault((layer.weight, layer.activation), []).append(layer.name)
    schemes = {
        f"group_{i}": _scheme(weight, activation, ["Linear"] if len(by_format) == 1 else names)
        for i, ((weight, activation), names) in enumerate(by_format.items())
    }
    storages = {scheme.format for scheme in schemes.values()}
    config = QuantizationConfig(
        config_groups=dict(schemes),
        format=storages.pop() if len(storages) == 1 else "mixed-precision",  # type: ignore[arg-type]
        quantization_status=QuantizationStatus.COMPRESSED,
        ignore=_left_alone(plan, model),
    )
    _check_matches(config.config_groups, config.ignore or [], plan, model)
    return {"version": __version__, **config.model_dump(mode="json")}


def modelopt_config(plan: Plan, model: nn.Module) -> dict[str, Any]:
    """The `quantization_config` of an NVFP4 checkpoint with ModelOpt's names.

    Raises:
        ValueError: a name to ignore is part of a quantized module's, which vLLM would leave unquantized too.
    """
    ignore = _left_alone(plan, model)
    _check_substrings(ignore, list(plan.exported))
    static = next(iter(plan.exported.values())).activation is not None
    number = {"dynamic": False, "num_bits": 4, "type": "float", "group_size": 16}
    group: dict[str, Any] = {"weights": number, "targets": ["Linear"]}
    return {
        "quant_method": "modelopt",
        "quant_algo": "NVFP4" if static else "W4A16_NVFP4",
        "group_size": 16,
        "kv_cache_scheme": None,
        "ignore": ignore,
        "config_groups": {"group_0": group | ({"input_activations": number} if static else {})},
    }


def legacy_modelopt_config(config: Mapping[str, Any]) -> dict[str, Any]:
    """The same as the contents of hf_quant_config.json, where older readers look."""
    fields = {
        "quant_algo": config["quant_algo"],
        "kv_cache_quant_algo": None,
        "group_size": config["group_size"],
        "exclude_modules": config["ignore"],
    }
    return {"quantization": fields}


def _scheme(weight: str, activation: str | None, targets: list[str]) -> QuantizationScheme:
    from compressed_tensors.config import CompressionFormat
    from compressed_tensors.quantization import QuantizationScheme

    base = weight.partition(":")[0]
    family = "int4" if base.startswith("int4-g") else base
    weights = _arguments(PRESETS[family], "weights")
    if family == "int4":
        weights = weights.model_copy(update={"group_size": int(base.removeprefix("int4-g"))})
    inputs = activation and _arguments(ACTIVATION_PRESETS[activation], "input_activations")
    return QuantizationScheme(
        targets=targets,
        weights=weights,
        input_activations=inputs or None,
        format=CompressionFormat(STORAGE[family]),
    )


def _arguments(preset: str, side: str) -> QuantizationArgs:
    from compressed_tensors.quantization import preset_name_to_scheme

    return getattr(preset_name_to_scheme(preset, ["Linear"]), side)


def _left_alone(plan: Plan, model: nn.Module) -> list[str]:
    """Modules with a matrix that stays in BF16, routers included: in some engines those are linears too."""
    names = [
        layer.name
        for layer in plan.layers
        if layer.weight is None and len(layer.shape) == 2 and not _is_embedding(model, layer)
    ]
    blocks = _blocks_on_disk(plan)
    renamed = [
        disk + n.removeprefix(block) for n in names for block, disk in blocks.items() if n.startswith(block)
    ]
    return [*names, *(n for n in renamed if n not in names)]


def _is_embedding(model: nn.Module, layer: LayerPlan) -> bool:
    return layer.layout is None and isinstance(model.get_submodule(layer.name), nn.Embedding)


def _blocks_on_disk(plan: Plan) -> dict[str, str]:
    """Prefixes of MoE blocks: in transformers' model -> on disk, where engines read other names."""
    blocks = {}
    for row in plan.layers:
        if row.layout is not None:
            disk = row.layout.names[0].partition(".{}.")[0].rpartition(".")[0]
            blocks[f"{row.name.rsplit('.', 2)[0]}."] = f"{disk}."
    return blocks


def _check_matches(groups: Mapping[str, Any], ignore: list[str], plan: Plan, model: nn.Module) -> None:
    """Field experience: 56 modules were FP8 on one side and BF16 on the other for one unescaped dot."""
    from compressed_tensors.utils.match import match_named_modules

    targets = [target for scheme in groups.values() for target in scheme.targets]
    theirs = {name for name, _ in match_named_modules(model, targets, ignore)}
    # Experts are stacks in the model and linears on disk, where only their names can be matched.
    odd = theirs ^ {row.name for row in plan.layers if row.weight and row.layout is None}
    odd |= set(ignore) & plan.exported.keys()
    if odd:
        raise ValueError(
            f"compressed-tensors and the plan disagree about {len(odd)} modules, the first {min(odd)}: a module's "
            "class or name is matched in another way; keep it, or quantize it, on both sides"
        )


def _check_substrings(ignore: Iterable[str], quantized: list[str]) -> None:
    """vLLM's ModelOpt reader ignores every module whose name, fused or not, contains an ignored one."""
    fused = {name: [name, *_fused_name(name)] for name in quantized}
    for left in ignore:
        swallowed = [name for name, names in fused.items() if any(left in each for each in names)]
        if swallowed:
            raise ValueError(
                f"{left} stays in BF16 and its name is part of {swallowed[0]}, which vLLM's ModelOpt reader would "
                "then leave in BF16 as well; use layout='compressed-tensors', which matches whole names"
            )


def _fused_name(name: str) -> list[str]:
    parent, dot, leaf = name.rpartition(".")
    for family in FUSED_SIBLINGS:
        if leaf in family and family[0] in FUSED_NAMES:
            return [parent + dot + FUSED_NAMES[family[0]]]
    return []


def split_groups(plan: Plan, model: nn.Module) -> list[str]:
    """One line for each fused layer of an engine whose parts wear different formats: vLLM refuses those."""
    lines = []
    names = {n for n, m in model.named_modules() if isinstance(m, nn.Linear)}
    for layer in plan.layers:
        parent, dot, leaf = layer.name.rpartition(".")
        family = next((f for f in FUSED_SIBLINGS if f[0] == leaf), ())
        members = [parent + dot + m for m in family if parent + dot + m in names]
        formats = {m: _formats(plan.by_name[m]) for m in members}
        if len(set(formats.values())) > 1:
            shown = ", ".join(f"{m.rpartition('.')[2]} {f[0] or 'bf16'}" for m, f in formats.items())
            lines.append(
                f"{parent}: {shown} are one layer in engines that fuse them (vLLM), which will refuse"
            )
    return lines


def _formats(layer: LayerPlan) -> tuple[str | None, str | None]:
    return layer.weight, layer.activation
