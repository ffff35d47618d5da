"""Published bytes in verl's weight stream, and the manifest that closes it.

verl hands a rollout (name, tensor) pairs and no more, so the manifest travels as the last pair: JSON as
bytes, under a name that no parameter has. What arrives is a version only when it has come and fits.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator

import torch
from torch import Tensor

from lowbitrl.formats import get_format
from lowbitrl.quant import Plan, wire
from lowbitrl.quant.groups import encode_group
from lowbitrl.quant.stacks import encode_stack, to_canonical
from lowbitrl.rollout.vllm.sealed import manifest_data, manifest_of
from lowbitrl.sync.manifest import Entry, Manifest, entries_of

MANIFEST = "lowbitrl.manifest"


def sealed_stream(
    named_full_tensors: Iterable[tuple[str, Tensor]], plan: Plan, version: int
) -> Iterator[tuple[str, Tensor]]:
    """`published_stream`, then its manifest; one fused group is in memory at a time."""
    entries: dict[str, Entry] = {}
    for name, tensor in published_stream(named_full_tensors, plan):
        entries |= entries_of({name: tensor})
        yield name, tensor
    text = json.dumps(manifest_data(Manifest(version, plan.digest, entries)))
    yield MANIFEST, torch.frombuffer(bytearray(text, "ascii"), dtype=torch.uint8)


def published_stream(
    named_full_tensors: Iterable[tuple[str, Tensor]], plan: Plan
) -> Iterator[tuple[str, Tensor]]:
    """What `sync.publish` ships, from full tensors in the compute dtype as they come.

    Raises:
        ValueError: NaN or Inf in a tensor, naming it; a planned weight that never came.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    missing = {parameter: layer.name for parameter, layer in plan.by_parameter.items()}
    for name, tensor in named_full_tensors:
        row = plan.by_parameter.get(name)
        missing.pop(name, None)
        if row is None:
            if not bool(torch.isfinite(tensor).all()):
                raise ValueError(f"{name} holds NaN or Inf; resume from the last good checkpoint")
            yield name, tensor
        elif row.layout is not None:
            assert row.weight is not None
            stack = encode_stack(to_canonical(tensor, row.layout), get_format(row.weight), row.name)
            yield from wire({row.name: stack})
        else:
            assert row.weight is not None
            members = [layer.name for layer in plan.groups[row.group]]
            arrived = waiting.setdefault(row.group, {})
            arrived[row.name] = tensor
            if len(arrived) == len(members):
                group = {member: waiting[row.group][member] for member in members}
                yield from wire(encode_group(group, get_format(row.weight)))
                del waiting[row.group]
    if missing:
        raise ValueError(f"{next(iter(missing))} is in the plan and never came: the learner is another model")


class Arrivals:
    """What has arrived of a version; tensors are copied, since verl's buffers are used again."""

    def __init__(self) -> None:
        self.tensors: dict[str, Tensor] = {}
        self._manifest: Manifest | None = None

    def take(self, named: Iterable[tuple[str, Tensor]]) -> None:
        """Note some pairs of the stream."""
        for name, tensor in named:
            if name == MANIFEST:
                self._manifest = manifest_of(json.loads(bytes(tensor.cpu().tolist()).decode("ascii")))
            else:
                self.tensors[name] = tensor.clone()

    def manifest(self) -> Manifest:
        """The version's, which every engine verifies the tensors against.

        Raises:
            ValueError: none came: the sender is not our learner's engine, or the stream was cut off.
        """
        if self._manifest is None:
            raise ValueError(
                f"{len(self.tensors)} tensors came without a manifest: the learner's engine is not ours "
                "(set VERL_ENGINE_VENDOR=lowbitrl for all workers), or the stream was cut off"
            )
        return self._manifest
