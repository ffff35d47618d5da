"""A model's weights, encoded by a recipe, as a checkpoint folder that transformers, vLLM and SGLang load.

    DIR/  model*.safetensors (and its index)  config.json with quantization_config  generation_config.json
          the tokenizer's files  lowbitrl.json: the plan, and what the layout could not say

Weights are encoded from their compute-dtype values and by fused group, as the learner encodes them at a publish.
The folder is whole or absent: it is built beside DIR and renamed.
"""

from __future__ import annotations

import json
import os
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lowbitrl import __version__
from lowbitrl.checkpoints.config import (
    compressed_tensors_config,
    legacy_modelopt_config,
    modelopt_config,
    split_groups,
)
from lowbitrl.formats import Calibrator
from lowbitrl.formats.fp8 import TILE
from lowbitrl.formats.grids import E4M3_MAX
from lowbitrl.formats.nvfp4 import encode_global
from lowbitrl.models import load_model
from lowbitrl.quant import LayerPlan, Plan, Recipe, export, resolve
from lowbitrl.quant.recipe import STATIC
from lowbitrl.sync.wire import Layout, check_layout, representable, translate

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

RECORD = "lowbitrl.json"
SHARD_SIZE = "5GB"
CALIBRATION_TOKENS = 2048
"""Calibration texts are cut here: a longer one adds time, and hardly another maximum."""


@dataclass(frozen=True)
class WrittenCheckpoint:
    """What `quantize_checkpoint` left on disk.

    Attributes:
        plan: the recipe on this model. notes: what of it the layout cannot say, one line each.
    """

    folder: Path
    plan: Plan
    notes: tuple[str, ...]


def quantize_checkpoint(
    model_name: str | Path,
    recipe: Recipe,
    out: str | Path,
    layout: str = "compressed-tensors",
    *,
    calibration: Sequence[str] = (),
    dtype: torch.dtype = torch.bfloat16,
    shard_size: str | int = SHARD_SIZE,
) -> WrittenCheckpoint:
    """Encode a model's weights by `recipe` and write them as a checkpoint.

    Args:
        model_name: as `models.load_model` takes it; weights are cast to `dtype` before they are encoded.
        out: a folder that does not exist or is empty.
        calibration: texts that fix the static activation scale both layouts want of NVFP4 W4A4. Without them
            its weights are written as weight-only, and a note says so.
        shard_size: most bytes of one safetensors file ("5GB", or a number).

    Raises:
        ValueError: an unknown layout; one without names for a weight format of the recipe; a recipe that
            quantizes no weight; a model quantized already; what `quant.resolve` and the encoders refuse.
        FileExistsError: `out` is a file, or holds something.
        OSError: the model cannot be loaded, or the folder not written; nothing is left behind.
    """
    layout, out = check_layout(layout), _free(Path(out))
    model, tokenizer = load_model(model_name, dtype)
    _check_unquantized(model_name, model)
    return write_quantized(
        model, tokenizer, recipe, out, layout, calibration=calibration, shard_size=shard_size
    )


def write_quantized(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    recipe: Recipe,
    out: Path,
    layout: str = "compressed-tensors",
    *,
    calibration: Sequence[str] = (),
    input_amax: Mapping[str, float] | None = None,
    shard_size: str | int = SHARD_SIZE,
) -> WrittenCheckpoint:
    """`quantize_checkpoint` of a model in memory; its weights are encoded from the dtype that they have.

    Args:
        input_amax: static maxima of inputs by fused group, as `quant.static_scales` gives them, in place of
            calibration texts.
    """
    layout, out = check_layout(layout), _free(out)
    plan = resolve(recipe, model)
    _check_names(plan, layout)
    stored, notes = _stored(plan, layout, bool(calibration or input_amax))
    notes += split_groups(stored, model)
    amax = (
        {name: torch.tensor(value) for name, value in input_amax.items()}
        if input_amax
        else _input_amax(model, tokenizer, stored, calibration)
    )
    tensors = {name: t.detach().contiguous() for name, t in _tensors(model, stored, layout, amax)}
    record = {"lowbitrl": __version__, "layout": layout, "plan": plan.to_dict(), "notes": notes}
    with _whole_or_absent(out) as partial:
        _save_tensors(tensors, partial, shard_size)
        _save_configs(model, tokenizer, stored, layout, partial)
        (partial / RECORD).write_text(json.dumps(record, indent=2))
    return WrittenCheckpoint(out, plan, tuple(notes))


def write_dense(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, out: Path) -> Path:
    """A model in memory as an ordinary checkpoint, in the dtype that it has; whole or absent.

    Raises:
        FileExistsError: `out` is a file, or holds something.
    """
    with _whole_or_absent(_free(out)) as partial:
        model.save_pretrained(partial)
        tokenizer.save_pretrained(partial)
    return out


def _stored(plan: Plan, layout: Layout, calibrated: bool) -> tuple[Plan, list[str]]:
    """The plan as a checkpoint can say it, and a line for each thing that it cannot."""
    notes: dict[str, None] = {}

    def store(layer: LayerPlan) -> LayerPlan:
        weight, activation = layer.weight, layer.activation
        if weight is not None and weight.endswith(":w4a8"):
            weight = weight.removesuffix(":w4a8")
            notes[
                "int4 weights carry their BF16 group scales; the W4A8 kernel makes its FP8 ones of them"
            ] = None
        if activation == STATIC["nvfp4-token"]:
            activation = (
                "nvfp4-token"  # A checkpoint's NVFP4 activations are static, whatever the recipe's are.
            )
        if activation == STATIC["fp8-token"] and not calibrated:
            activation = "fp8-token"
            notes["written with dynamic FP8 activations: a static scale needs calibration texts"] = None
        if activation == "nvfp4-token" and not calibrated:
            activation = None
            notes[
                "written as weight-only: NVFP4 activations need a static scale here; give calibration texts"
            ] = None
        elif activation not in (None, "nvfp4-token") and layout == "modelopt":
            notes[f"written as weight-only: the modelopt layout has no name for {activation} activations"] = (
                None
            )
            activation = None
        if layer.residual:
            notes[
                "the residual is not written: no checkpoint has a field for it, and no loader a second pass"
            ] = None
        return replace(layer, weight=weight, activation=activation)

    return replace(plan, layers=tuple(store(layer) for layer in plan.layers)), list(notes)


def _tiles_misguessed(n: int, k: int) -> bool:
    """Whether compressed-tensors 0.17's decompressor divides an FP8 block weight (N, K) into other tiles."""
    return n > TILE and (n % TILE != 0 or k == TILE)


def _tensors(
    model: PreTrainedModel, plan: Plan, layout: Layout, amax: dict[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    yield from translate(export(_named(model), plan), plan, layout)
    for group, peak in amax.items():
        row = plan.groups[group][0]
        if row.activation is None:
            continue  # A note says that this row was written weight-only.
        encode, decode = encode_global(peak)
        for name in _names_on_disk(plan, group):
            if row.activation == STATIC["fp8-token"]:
                yield f"{name}.input_scale", (peak / E4M3_MAX).reshape(1)
            elif layout == "modelopt":
                yield f"{name}.input_scale", decode.clone()
            else:
                yield f"{name}.input_global_scale", encode.reshape(1).clone()


def _names_on_disk(plan: Plan, group: str) -> Iterator[str]:
    """The matrices that read a fused group's input; every expert's where they are stacked."""
    for layer in plan.groups[group]:
        if layer.layout is None:
            yield layer.name
        else:
            yield from (name.format(e) for name in layer.layout.names for e in range(layer.shape[0]))


def _named(model: PreTrainedModel) -> Iterator[tuple[str, Tensor]]:
    """Parameters and saved buffers, each under its first name only: ties are made again by the loader."""
    seen: set[int] = set()
    for name, tensor in model.state_dict(keep_vars=True).items():
        if id(tensor) not in seen:
            seen.add(id(tensor))
            yield name, tensor


@torch.no_grad()
def _input_amax(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plan: Plan, texts: Sequence[str]
) -> dict[str, Tensor]:
    """Largest |input| of each fused group with static activations, over `texts` through the BF16 model."""
    sites = {
        name: Calibrator(name)
        for name, group in plan.groups.items()
        if group[0].activation in ("nvfp4-token", STATIC["fp8-token"])
    }
    if not sites:
        return {}
    stack = next((row.name for row in plan.quantized if row.layout is not None), None)
    if stack is not None:
        raise ValueError(
            f"{stack}: calibration cannot see what enters single experts; leave the texts out (weight-only)"
        )
    hooks = [
        model.get_submodule(name).register_forward_pre_hook(_observe(site)) for name, site in sites.items()
    ]
    for text in texts:
        model(**tokenizer(text, return_tensors="pt", truncation=True, max_length=CALIBRATION_TOKENS))
    for hook in hooks:
        hook.remove()
    return {name: site.refresh() for name, site in sites.items()}


def _observe(site: Calibrator) -> Any:
    return lambda module, args: site.observe(args[0])


def _save_tensors(tensors: dict[str, Tensor], folder: Path, shard_size: str | int) -> None:
    from huggingface_hub import save_torch_state_dict

    save_torch_state_dict(tensors, folder, max_shard_size=shard_size)


def _save_configs(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, plan: Plan, layout: Layout, folder: Path
) -> None:
    tokenizer.save_pretrained(folder)
    if model.can_generate() and model.generation_config is not None:
        model.generation_config.save_pretrained(folder)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    if layout == "modelopt":
        config["quantization_config"] = modelopt_config(plan, model)
        legacy = legacy_modelopt_config(config["quantization_config"])
        (folder / "hf_quant_config.json").write_text(json.dumps(legacy, indent=2))
    else:
        config["quantization_config"] = compressed_tensors_config(plan, model)
    file.write_text(json.dumps(config, indent=2))


def _check_names(plan: Plan, layout: Layout) -> None:
    quantized = [layer for layer in plan.layers if layer.weight]
    if not quantized:
        raise ValueError(
            f"rollout={plan.recipe.rollout!r} leaves every weight in BF16, so there is nothing to write; use the "
            "model as it is"
        )
    for layer in quantized:
        if layer.layout is not None and layer.layout.transposed:
            raise ValueError(
                f"{layer.name}: this model type keeps its experts as stacks on disk, and readers look for no others; "
                "neither layout names quantized stacks: add '*.experts.*' to keep"
            )
        plain = (layer.weight or "").removesuffix(":w4a8")
        if not representable(plain, layout):
            raise ValueError(
                f"{layer.name} is {plain}, which layout={layout!r} has no names for; use layout='compressed-tensors'"
            )


def _check_unquantized(name: str | Path, model: PreTrainedModel) -> None:
    if getattr(model.config, "quantization_config", None) is not None:
        raise ValueError(
            f"model {str(name)!r} is quantized already; quantizing it again would round twice: give the BF16 model, "
            "or read it with load_quantized"
        )


def _free(out: Path) -> Path:
    if out.is_file() or (out.is_dir() and any(out.iterdir())):
        raise FileExistsError(f"{out} exists and is not an empty folder; name another one, or remove it")
    return out


@contextmanager
def _whole_or_absent(out: Path) -> Iterator[Path]:
    """A folder beside `out` to write in: it becomes `out` when the block ends, or vanishes if it raises."""
    out.parent.mkdir(parents=True, exist_ok=True)
    partial = Path(tempfile.mkdtemp(prefix=f".{out.name}.partial-", dir=out.parent))
    try:
        yield partial
        # Temporary files are private to their maker; a checkpoint is not.
        partial.chmod(0o755)
        for path in partial.iterdir():
            path.chmod(0o644)
            _flush(path)
        os.replace(partial, out)
        _flush(out.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
