"""How many numbers and bytes the weights of a plan are, by where they lie; exact, from shapes alone.

Encoded sizes come from the encoders themselves, run on tensors without data.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache

import torch
from torch import nn

from lowbitrl.distributed.sharding import layers_of
from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels.weights4 import why_not_weight4
from lowbitrl.quant import LayerPlan, Plan
from lowbitrl.quant.linear import CODE_PAIRS
from lowbitrl.quant.stacks import encode_stack
from lowbitrl.trainer.optim import hidden_matrices

MATRIX, STACK = 2, 3


@dataclass(frozen=True)
class Weights:
    """The weights of a model under a plan.

    Attributes:
        parameters: shape by name, ties once. hidden: names of those that Muon steps.
        layer / root: numbers of the largest layer that FSDP gathers, and of what is in no layer.
        encoded: bytes of codes and scales. largest: of the largest matrix or stack.
        linears / stacks: numbers of matrices, and of stacks of experts, that are encoded.
        served_decoded: numbers that vLLM on CUDA holds decoded beside their bytes.
    """

    parameters: dict[str, tuple[int, ...]]
    hidden: frozenset[str]
    layer: int
    root: int
    encoded: int
    largest: int
    linears: int
    stacks: int
    served_decoded: int

    @classmethod
    def of(cls, model: nn.Module, plan: Plan) -> Weights:
        """Measure `model`, which may be on the meta device."""
        named = dict(model.named_parameters())
        rows = [row for row in plan.quantized if row.weight]
        sizes = {row.name: encoded_like(row.weight, row.shape) for row in rows if row.weight}
        layers = [sum(p.numel() for p in layer.parameters()) for layer in layers_of(model)]
        total = sum(p.numel() for p in named.values())
        return cls(
            parameters={name: tuple(p.shape) for name, p in named.items()},
            hidden=frozenset(hidden_matrices(model, named)),
            layer=max(layers, default=0),
            root=total - sum(layers),
            encoded=sum(q.nbytes for q in sizes.values()),
            largest=max((q.nbytes for q in sizes.values()), default=0),
            linears=sum(q.shape.numel() for q in sizes.values() if len(q.shape) == MATRIX),
            stacks=sum(q.shape.numel() for q in sizes.values() if len(q.shape) == STACK),
            served_decoded=sum(
                sizes[row.name].shape.numel() for row in rows if _decodes(row, sizes[row.name])
            ),
        )

    @property
    def total(self) -> int:
        """Numbers in all parameters."""
        return _numel(self.parameters.values())

    @property
    def plain(self) -> int:
        """Numbers in parameters that are not encoded."""
        return self.total - self.linears - self.stacks

    def shard(self, ranks: int, names: frozenset[str] | None = None) -> int:
        """Numbers that the fullest of `ranks` processes holds when parameters are cut by their first dimension."""
        shapes = [shape for name, shape in self.parameters.items() if names is None or name in names]
        return _numel((-(-shape[0] // ranks), *shape[1:]) for shape in shapes)


@cache
def encoded_like(format_name: str, shape: tuple[int, ...]) -> QuantizedTensor:
    """What the encoder makes of a matrix, or of a stack of experts, of that shape, without data."""
    empty, fmt = torch.empty(shape, dtype=torch.bfloat16, device="meta"), get_format(format_name)
    return encode_stack(empty, fmt, format_name) if len(shape) == STACK else fmt.quantize(empty)


def _decodes(row: LayerPlan, encoded: QuantizedTensor) -> bool:
    codes = len(row.shape) == MATRIX and (row.activation, row.weight) in CODE_PAIRS
    return not codes and why_not_weight4(encoded) is not None


def _numel(shapes: Iterable[tuple[int, ...]]) -> int:
    return sum(math.prod(shape) for shape in shapes)
