"""Weight stacks of experts: their layouts, their bytes, and the names of their parts in checkpoints.

    parameter   (E, 2I, H) or transposed (E, H, 2I); gate and up rows after one another or alternating
    canonical   (E, N, K): input dimension last, all gate rows before all up rows: what is encoded
    presented   (E, N, K): input dimension last, rows in the parameter's order: what is multiplied

Every expert is quantized as if it were alone: own blocks, and a global scale of its own that its gate
and up share, because engines fuse those two. A stack's bytes are therefore its experts' bytes, stacked.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbitrl.formats import Format, QuantizedTensor, get_format
from lowbitrl.kernels.quantize import encode

STACKS = ("gate_up_proj", "up_proj", "down_proj")
PLAIN_NAMES = {"gate_up_proj": ("gate_proj", "up_proj"), "up_proj": ("up_proj",), "down_proj": ("down_proj",)}


@dataclass(frozen=True)
class StackLayout:
    """How a stack's parameter is laid out, and what its parts are called on disk.

    Attributes:
        transposed: the input dimension is the middle one: (E, K, N).
        interleaved: gate and up rows alternate (gpt-oss).
        names: checkpoint names without ".weight", "{}" standing for the expert; two (gate, up) or one.

    Example:
        StackLayout(False, False, ("model.layers.0.mlp.experts.{}.gate_proj", "model.layers.0.mlp.experts.{}.up_proj"))
    """

    transposed: bool
    interleaved: bool
    names: tuple[str, ...]


def is_expert_module(module: nn.Module) -> bool:
    """Whether transformers' experts interface dispatches this module and its weights have the usual names."""
    marked = hasattr(module, "is_transposed") and hasattr(module, "has_gate")
    first = "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"
    weights = [getattr(module, leaf, None) for leaf in (first, "down_proj")]
    return marked and all(isinstance(w, nn.Parameter) and w.ndim == 3 for w in weights)


def layout_of(module: nn.Module, name: str, model_type: str | None) -> StackLayout:
    """Layout of the stack `name` (whole name) of an experts module."""
    owner, _, leaf = name.rpartition(".")
    transposed = bool(module.is_transposed)
    # transformers before 5.10 has no is_concatenated; there, what is transposed also alternates.
    alternating = not getattr(module, "is_concatenated", not transposed)
    names = checkpoint_names(owner, leaf, model_type)
    return StackLayout(transposed, alternating and leaf == "gate_up_proj", names)


def checkpoint_names(owner: str, leaf: str, model_type: str | None) -> tuple[str, ...]:
    """Per-expert names of a stack's parts on disk, as transformers' own conversion of the model type has them.

    A model type without a conversion (gpt-oss ships its stacks as they are) gets the plain names.

    Example:
        >>> checkpoint_names("model.layers.0.mlp.experts", "down_proj", "mixtral")
        ('model.layers.0.block_sparse_moe.experts.{}.w2',)
    """
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    mapping = (get_checkpoint_conversion_mapping(model_type) if model_type else None) or []
    on_disk = owner
    for rule in mapping:
        source, target = rule.source_patterns, rule.target_patterns
        if (
            len(source) == len(target) == 1
            and re.fullmatch(r"\.\w+\.", source[0])
            and target[0] in f"{owner}."
        ):
            on_disk = owner.replace(target[0], source[0])
    for rule in mapping:
        if rule.target_patterns[0].rstrip("$").endswith(f"experts.{leaf}"):
            leaves = [re.search(r"experts\.\*\.(\w+)\.weight", pattern) for pattern in rule.source_patterns]
            if all(leaves):
                return tuple(f"{on_disk}.{{}}.{found.group(1)}" for found in leaves if found)
    return tuple(f"{on_disk}.{{}}.{plain}" for plain in PLAIN_NAMES[leaf])


def to_canonical(weight: Tensor, layout: StackLayout) -> Tensor:
    """Parameter layout to canonical layout."""
    rows = weight.transpose(-1, -2) if layout.transposed else weight
    return torch.cat([rows[..., ::2, :], rows[..., 1::2, :]], -2) if layout.interleaved else rows


def present(canonical: Tensor, layout: StackLayout) -> Tensor:
    """Canonical layout to what a product takes: rows in the parameter's order."""
    if not layout.interleaved:
        return canonical
    gate, up = canonical.chunk(2, -2)
    return torch.stack([gate, up], -2).flatten(-3, -2)


def split(canonical: Tensor, layout: StackLayout) -> Iterator[tuple[str, Tensor]]:
    """(checkpoint name, matrix) of every expert's parts."""
    for expert, whole in enumerate(canonical):
        for name, part in zip(layout.names, whole.chunk(len(layout.names), 0), strict=True):
            yield name.format(expert), part.clone(memory_format=torch.contiguous_format)


def encode_stack(canonical: Tensor, fmt: Format, name: str) -> QuantizedTensor:
    """Quantize a stack expert by expert; a format with a scale per tensor gets one per expert, (E, 1, 1).

    Args:
        canonical: (E, N, K) in the compute dtype.

    Raises:
        ValueError: NaN or Inf in a weight, naming the stack.
    """
    return encode(canonical, fmt, parts=len(canonical), name=name)


def select(stack: QuantizedTensor, experts: int | Tensor) -> QuantizedTensor:
    """The bytes of one expert, (N, K), or of several, (U, N, K)."""
    parts = {name: part[experts] for name, part in stack.tensors().items()}
    lead = () if isinstance(experts, int) else (len(experts),)
    return QuantizedTensor.from_tensors(parts, (*lead, *stack.shape[1:]), stack.format)


def unfuse(stack: QuantizedTensor, layout: StackLayout) -> Iterator[tuple[str, QuantizedTensor]]:
    """(checkpoint name, bytes) of every expert's matrices, as a dense layer's would be."""
    count, height = len(layout.names), stack.shape[-2] // len(layout.names)
    coarse = "global_scale" if stack.global_scale is not None else "scale"
    scalar = coarse if get_format(stack.format).per == "tensor" else None
    for expert in range(stack.shape[0]):
        tensors = select(stack, expert).tensors()
        for part, name in enumerate(layout.names):
            # Codes and scales follow the rows; gate and up share what there is one of. Copies: a file
            # of tensors refuses those that share memory.
            own = {
                k: (t.reshape(()) if k == scalar else t.chunk(count, 0)[part]).clone()
                for k, t in tensors.items()
            }
            yield (
                name.format(expert),
                QuantizedTensor.from_tensors(own, (height, stack.shape[-1]), stack.format),
            )
