"""Cutting and joining stored weights without decoding them: tensor-parallel shards and fused matrices.

    rows     codes and scales follow their rows; what there is one of (a tensor's scale) stays
    columns  codes and block scales follow their columns; a row's own scale stays
    join     members of a fused matrix under one another; what there is one of must agree

A cut through a block, and members whose shared scale differs, are refused: either would need other bytes
than the published ones. Stacks (E, N, K) are cut like matrices, along their last two dimensions.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.fp8 import TILE

Span = tuple[int, int]


def cut_rows(q: QuantizedTensor, span: Span, name: str) -> QuantizedTensor:
    """Output rows [start, stop) of a weight ([E,] N, K).

    Raises:
        ValueError: the cut goes through a tile of rows.
    """
    start, stop = span
    height = q.shape[-2]
    if (start, stop) == (0, height):
        return q
    parts = {
        key: part
        if _is_shared(part, q)
        else part[..., _blocks(span, _rows_a_scale(q), height, name), :]
        if key == "scale"
        else part[..., start:stop, :]
        for key, part in q.tensors().items()
    }
    return QuantizedTensor.from_tensors(parts, (*q.shape[:-2], stop - start, q.shape[-1]), q.format)


def _rows_a_scale(q: QuantizedTensor) -> int:
    return TILE if q.format.startswith("fp8-block") else 1


def _is_shared(part: Tensor, q: QuantizedTensor) -> bool:
    """Whether all rows of a matrix share what `part` holds."""
    return part.ndim < 2 or (part.shape[-2] == 1 and q.shape[-2] > 1 and _rows_a_scale(q) == 1)


def cut_columns(q: QuantizedTensor, span: Span, name: str) -> QuantizedTensor:
    """Input columns [start, stop) of a weight ([E,] N, K).

    Raises:
        ValueError: the cut goes through a block, or leaves a width that the format cannot hold.
    """
    start, stop = span
    width = q.shape[-1]
    if (start, stop) == (0, width):
        return q
    get_format(q.format).check_shape((q.shape[-2], stop - start), name)
    parts = {
        key: part
        if part.ndim < 2 or part.shape[-1] == 1
        else part[..., _blocks(span, -(-width // part.shape[-1]), width, name)]
        for key, part in q.tensors().items()
    }
    return QuantizedTensor.from_tensors(parts, (*q.shape[:-1], stop - start), q.format)


def _blocks(span: Span, size: int, whole: int, name: str) -> slice:
    start, stop = span
    if start % size or (stop % size and stop != whole):
        raise ValueError(
            f"{name}: a shard of {start}..{stop} cuts through blocks of {size}; use fewer tensor-parallel ranks "
            "or keep the module in BF16"
        )
    return slice(start // size, -(-stop // size))


def join_rows(members: Sequence[QuantizedTensor], names: Sequence[str]) -> QuantizedTensor:
    """Weights (N_i, K) of one format under one another.

    Raises:
        ValueError: a scale that they share differs, or a tile of rows would belong to two members.
    """
    first = members[0]
    if len(members) == 1:
        return first
    parts = {key: _join(key, members, names) for key in first.tensors()}
    height = sum(m.shape[-2] for m in members)
    return QuantizedTensor.from_tensors(parts, (*first.shape[:-2], height, first.shape[-1]), first.format)


@contextmanager
def one_look() -> Iterator[None]:
    """Inside, `join_rows` leaves comparing shared scales to the end: a GPU is waited for once, not hundreds of times.

    Raises:
        ValueError: at the end, for the first that differs.
    """
    _looks.append([])
    try:
        yield
        looks = _looks[-1]
    finally:
        _looks.pop()
    if looks and not bool(torch.stack([same for same, _ in looks]).all()):
        raise ValueError(next(said for same, said in looks if not bool(same)))


_looks: list[list[tuple[Tensor, str]]] = []


def _join(key: str, members: Sequence[QuantizedTensor], names: Sequence[str]) -> Tensor:
    parts = [m.tensors()[key] for m in members]
    if _is_shared(parts[0], members[0]):
        for name, part in zip(names[1:], parts[1:], strict=True):
            said = f"{name} and {names[0]} are served as one matrix, but their {key} differs"
            if _looks:
                _looks[-1].append(((part == parts[0]).all(), said))
            elif not torch.equal(part, parts[0]):
                raise ValueError(said)
        return parts[0]
    for name, member in zip(names[:-1], members[:-1], strict=True):
        if key == "scale" and member.shape[-2] % _rows_a_scale(member):
            raise ValueError(
                f"{name} has {member.shape[-2]} rows, no multiple of the {TILE}-row tile of {member.format}, so a "
                "fused matrix would share a tile; use rollout='fp8', or keep the module in BF16"
            )
    return torch.cat(parts, -2)


def row_spans(layer: object) -> list[Span]:
    """Rows of each published matrix that this rank's part of a vLLM linear holds, in the order they are fused."""
    rank, size = getattr(layer, "tp_rank", 0), getattr(layer, "tp_size", 1)
    if hasattr(layer, "num_kv_head_replicas"):
        kv = rank // layer.num_kv_head_replicas  # type: ignore[attr-defined]
        value = getattr(layer, "v_head_size", layer.head_size)  # type: ignore[attr-defined]
        heads = ((rank, layer.num_heads, layer.head_size), (kv, layer.num_kv_heads, layer.head_size))  # type: ignore[attr-defined]
        return [_share(*part) for part in (*heads, (kv, layer.num_kv_heads, value))]  # type: ignore[attr-defined]
    sizes = getattr(layer, "output_sizes", None) or [layer.output_size]  # type: ignore[attr-defined]
    if not hasattr(layer, "gather_output"):
        return [(0, width) for width in sizes]
    return [_share(rank, width // size, 1) for width in sizes]


def column_span(layer: object, width: int) -> Span:
    """Columns of the published matrix that this rank's part, `width` wide, of a vLLM linear holds."""
    # input_is_parallel is what row-parallel linears alone have.
    rank = layer.tp_rank if hasattr(layer, "input_is_parallel") else 0  # type: ignore[attr-defined]
    return _share(rank, width, 1)


def _share(rank: int, count: int, width: int) -> Span:
    return rank * count * width, (rank + 1) * count * width
