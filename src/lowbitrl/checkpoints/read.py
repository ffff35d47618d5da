"""Others' quantized checkpoints, and our own, as names and bytes.

Codes and scales are taken as they are, each weight with its own global scale. What engines would do otherwise
(one global scale for a fused layer, a module skipped by its name) is no error here: it is reported in `notes`.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from lowbitrl.formats import QuantizedTensor
from lowbitrl.quant.topology import fused_groups
from lowbitrl.sync.foreign import decode_global_scale, from_layout, group_parts
from lowbitrl.sync.wire import Layout, one_positive

INDEX = "model.safetensors.index.json"


@dataclass(frozen=True)
class QuantizedCheckpoint:
    """A quantized checkpoint in memory.

    Attributes:
        weights: quantized weights by module name ("model.layers.0.mlp.up_proj").
        others: everything else by tensor name, untouched.
        input_scales: static activation scales by module name, decode direction, fp32 ().
        layout: whose names the folder uses. notes: what engines would serve otherwise, one line each.
    """

    weights: dict[str, QuantizedTensor]
    others: dict[str, Tensor]
    input_scales: dict[str, Tensor]
    layout: Layout
    notes: tuple[str, ...]

    def state_dict(self, dtype: torch.dtype = torch.bfloat16) -> dict[str, Tensor]:
        """Dense tensors by parameter name: weights decoded and rounded once to `dtype`, the rest as stored."""
        decoded = {f"{name}.weight": q.dequantize(dtype) for name, q in self.weights.items()}
        return decoded | self.others


def load_quantized(folder: str | Path) -> QuantizedCheckpoint:
    """Read a compressed-tensors (NVFP4, FP8, INT4, INT8, MX) or ModelOpt (NVFP4) checkpoint folder.

    Raises:
        FileNotFoundError: no config or no weights there, or a shard that the index names is missing.
        OSError: a file is damaged.
        ValueError: no such quantization, or a weight that cannot be decoded exactly (named).
    """
    folder = Path(folder)
    config = _quantization_config(folder)
    layout = _layout(config, folder)
    tensors = _read_tensors(folder)
    modules, others = group_parts(tensors)
    weights = {m: from_layout(parts, f"{m}.weight") for m, parts in modules.items() if _has_weight(parts)}
    if not weights:
        raise ValueError(
            f"{folder} says it is quantized, but holds no quantized weight that can be told by its names"
        )
    inputs = {m: scale for m, parts in modules.items() if (scale := _input_scale(parts, m)) is not None}
    notes = (*_unshared(weights), *_misnamed(weights, others, _ignored(config)))
    return QuantizedCheckpoint(weights, others, inputs, layout, notes)


def _quantization_config(folder: Path) -> dict[str, Any]:
    """What config.json says, else the hf_quant_config.json of older ModelOpt exports."""
    file = folder / "config.json"
    if not file.is_file():
        raise FileNotFoundError(f"{folder} has no config.json; give the folder of a checkpoint")
    found = _json(file)
    config = found.get("quantization_config") or found.get("compression_config")
    legacy = folder / "hf_quant_config.json"
    if not config and legacy.is_file():
        config = {"quant_method": "modelopt", **_json(legacy)}
    if not config:
        raise ValueError(f"{folder} is not quantized: its config.json has no quantization_config")
    return config


def _layout(config: Mapping[str, Any], folder: Path) -> Layout:
    method = str(config.get("quant_method") or config.get("quantization", {}).get("quant_method") or "")
    if method == "compressed-tensors":
        sparsity = (config.get("sparsity_config") or {}).get("format", "dense")
        if sparsity != "dense":
            raise ValueError(f"{folder}: {sparsity} weights are not supported; only dense ones are")
        return "compressed-tensors"
    if method.startswith("modelopt"):
        algorithm = str(config.get("quant_algo") or config.get("quantization", {}).get("quant_algo") or "")
        if "NVFP4" not in algorithm.upper():
            raise ValueError(
                f"{folder}: ModelOpt's {algorithm or 'unnamed algorithm'} is not supported; NVFP4 is"
            )
        return "modelopt"
    raise ValueError(
        f"{folder}: quantization by {method or 'an unnamed method'} cannot be read; compressed-tensors and ModelOpt "
        "NVFP4 can"
    )


def _read_tensors(folder: Path) -> dict[str, Tensor]:
    index = folder / INDEX
    placed: dict[str, str] = _json(index)["weight_map"] if index.is_file() else {}
    files = sorted(set(placed.values())) or sorted(path.name for path in folder.glob("*.safetensors"))
    if not files:
        raise FileNotFoundError(f"{folder} holds no .safetensors file")
    tensors: dict[str, Tensor] = {}
    for name in files:
        tensors |= _read_file(folder / name)
    lost = sorted(placed.keys() - tensors.keys())
    if lost:
        raise ValueError(f"{folder}: the index names {lost[0]} in {placed[lost[0]]}, which does not hold it")
    return tensors


def _read_file(path: Path) -> dict[str, Tensor]:
    if not path.is_file():
        raise FileNotFoundError(f"{path} is missing, though the index names it; the download is incomplete")
    try:
        return load_file(path)
    except SafetensorError as error:
        raise OSError(f"{path} is damaged ({error}); copy it again") from error


def _json(path: Path) -> dict[str, Any]:
    try:
        return json.loads(path.read_text())
    except ValueError as error:
        raise OSError(f"{path} is no JSON ({error}); copy it again") from error


def _has_weight(parts: Mapping[str, Tensor]) -> bool:
    return any(name.startswith("weight_") for name in parts)


def _input_scale(parts: Mapping[str, Tensor], module: str) -> Tensor | None:
    """The decode scale of static activations: FP8 and ModelOpt store it, compressed-tensors' NVFP4 its inverse."""
    if "input_global_scale" in parts:
        return decode_global_scale(parts["input_global_scale"], f"{module}.input")
    if "input_scale" in parts:
        return one_positive(parts["input_scale"], f"{module}.input_scale")
    return None


def _unshared(weights: Mapping[str, QuantizedTensor]) -> Iterable[str]:
    """Fused groups whose members have global scales of their own."""
    for group in fused_groups(list(weights)):
        scales = {n: float(q.global_scale) for n in group if (q := weights[n]).global_scale is not None}
        if len(set(scales.values())) > 1:
            shown = ", ".join(f"{n.rpartition('.')[2]} {value:.6g}" for n, value in scales.items())
            apart = max(scales.values()) / min(scales.values())
            yield (
                f"{group[0].rpartition('.')[0]}: global scales are not shared ({shown}); decoded part by part here, "
                f"but an engine that fuses them takes one, and serves others up to {apart:.3g} times too large or small"
            )


def _misnamed(
    weights: Mapping[str, QuantizedTensor], others: Mapping[str, Tensor], ignored: list[str]
) -> Iterable[str]:
    """Modules that the configuration and the tensors tell different things about."""
    for name in weights:
        if any(_matches(name, pattern) for pattern in ignored):
            yield f"{name}: quantized here, but the configuration ignores it; engines will not look for its scales"
    leaves = {name.rpartition(".")[2] for name in weights}
    for name, tensor in others.items():
        module = name.removesuffix(".weight")
        alike = module != name and tensor.dim() == 2 and module.rpartition(".")[2] in leaves
        if alike and not any(_matches(module, pattern) for pattern in ignored):
            yield f"{module}: not quantized here, but not ignored either; engines will look for its scales"


def _ignored(config: Mapping[str, Any]) -> list[str]:
    legacy = config.get("quantization") or {}
    return list(config.get("ignore") or legacy.get("exclude_modules") or [])


def _matches(name: str, pattern: str) -> bool:
    """As compressed-tensors ("re:" or the whole name) and ModelOpt (globs) match module names."""
    if pattern.startswith("re:"):
        return re.match(pattern.removeprefix("re:"), name) is not None
    return fnmatchcase(name, pattern)
