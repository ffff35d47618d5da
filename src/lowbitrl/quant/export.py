"""export: the bytes a plan ships, streaming, under the names a checkpoint of the model has on disk."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace

from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.quant.groups import encode_group
from lowbitrl.quant.plan import LayerPlan, Plan
from lowbitrl.quant.stacks import PLAIN_NAMES, encode_stack, split, to_canonical, unfuse


def export(named_full_tensors: Iterable[tuple[str, Tensor]], plan: Plan) -> Iterator[tuple[str, Tensor]]:
    """The tensors to ship for a version, encoded by `plan`, one fused group at a time.

    A quantized weight "m.weight" becomes "m.qdata", "m.scale" and, where the format has one,
    "m.global_scale"; everything else passes as it is. A stack of experts comes apart into the
    checkpoint's own per-expert names ("....experts.3.gate_proj.qdata"), and its MoE block takes the
    name it has on disk; a stream that took the experts apart already gets the same bytes.
    Give weights in the compute dtype: bytes of the fp32 master differ from those of its BF16 value
    (field experience: 25 times the KL).

    Args:
        named_full_tensors: (name, full tensor); members of a group may come in any order.

    Raises:
        ValueError: a member of a fused group never comes; NaN or Inf in a weight; a matrix of an
            experts module under a name that the plan does not know.
    """
    names = _Names.of(plan)
    waiting: dict[tuple[str, ...], dict[str, Tensor]] = {}
    for name, tensor in named_full_tensors:
        if name in names.stacks:
            yield from _take_apart(names.stacks[name], tensor.detach())
            continue
        member = names.members.get(name)
        if member is None:
            yield names.on_disk(name, tensor), tensor
            continue
        arrived = waiting.setdefault(member.peers, {})
        arrived[member.name] = tensor.detach()
        if len(arrived) == len(member.peers):
            ordered = {peer: arrived[peer] for peer in member.peers}
            yield from wire(encode_group(ordered, get_format(member.format)))
            del waiting[member.peers]
    for peers, arrived in waiting.items():
        missing = next(peer for peer in peers if peer not in arrived)
        raise ValueError(f"{missing}.weight never came: its global scale is shared with {peers[0]}")


def wire(encoded: dict[str, QuantizedTensor]) -> Iterator[tuple[str, Tensor]]:
    """Flatten encoded weights to named tensors: "m.qdata", "m.scale", "m.global_scale"."""
    for name, quantized in encoded.items():
        for part, tensor in quantized.tensors().items():
            yield f"{name}.{part}", tensor


def _take_apart(row: LayerPlan, tensor: Tensor) -> Iterator[tuple[str, Tensor]]:
    """A stack's weights, (E, ...) in the parameter's layout, or its biases, (E, N), expert by expert."""
    layout = row.layout
    assert layout is not None
    if tensor.ndim == 2:
        column = to_canonical(tensor[..., None], replace(layout, transposed=False))
        yield from ((f"{name}.bias", part.squeeze(-1)) for name, part in split(column, layout))
    elif row.weight is None:
        yield from ((f"{name}.weight", part) for name, part in split(to_canonical(tensor, layout), layout))
    else:
        stack = encode_stack(to_canonical(tensor, layout), get_format(row.weight), row.name)
        yield from wire(dict(unfuse(stack, layout)))


@dataclass(frozen=True)
class _Member:
    """One matrix of a fused group: its exported name, all exported names of the group, its format."""

    name: str
    peers: tuple[str, ...]
    format: str


@dataclass(frozen=True)
class _Names:
    """What each streamed name stands for.

    Attributes:
        stacks: rows by the names of stacked parameters that come apart.
        members: matrices that are encoded with their group, by the name they may come under.
        blocks: (prefix in the model, prefix on disk) of MoE blocks.
        owners: prefixes below which every matrix must be known.
    """

    stacks: dict[str, LayerPlan] = field(default_factory=dict)
    members: dict[str, _Member] = field(default_factory=dict)
    blocks: dict[str, str] = field(default_factory=dict)
    owners: set[str] = field(default_factory=set)

    @classmethod
    def of(cls, plan: Plan) -> _Names:
        names = cls()
        for layers in plan.groups.values():
            peers = tuple(layer.name for layer in layers)
            for layer in layers:
                if layer.weight:
                    names.members[layer.parameter] = _Member(layer.name, peers, layer.weight)
        for layer in plan.layers:
            if layer.layout is not None:
                names._add_stack(layer)
        return names

    def _add_stack(self, row: LayerPlan) -> None:
        assert row.layout is not None
        owner, _, leaf = row.name.rpartition(".")
        disk = row.layout.names[0].partition(".{}.")[0]
        self.blocks[f"{owner.rpartition('.')[0]}."] = f"{disk.rpartition('.')[0]}."
        if row.weight is None and row.layout.transposed:
            return  # Such checkpoints hold the stacks as they are.
        self.stacks.update({row.name: row, f"{row.name}_bias": row})
        if row.weight is None:
            return
        self.owners.update((f"{owner}.", f"{disk}."))
        for expert in range(row.shape[0]):
            peers = tuple(name.format(expert) for name in row.layout.names)
            for name, plain in zip(peers, PLAIN_NAMES[leaf], strict=True):
                member = _Member(name, peers, row.weight)
                self.members.update({f"{name}.weight": member, f"{owner}.{expert}.{plain}.weight": member})

    def on_disk(self, name: str, tensor: Tensor) -> str:
        """The exported name of a tensor that is not encoded."""
        if tensor.ndim > 1 and any(name.startswith(owner) for owner in self.owners):
            raise ValueError(
                f"{name} belongs to experts that the plan quantizes, under a name that it does not know: it would "
                f"ship in BF16 unnoticed; stream the stacks, or experts as {next(iter(self.members))}"
            )
        for block, disk in self.blocks.items():
            if name.startswith(block):
                return disk + name.removeprefix(block)
        return name
