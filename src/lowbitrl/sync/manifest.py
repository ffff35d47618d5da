"""The bill of a published version: which plan, which tensors, which bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from torch import Tensor

from lowbitrl.kernels.checksum import byte_checksums


@dataclass(frozen=True)
class Entry:
    """Shape, dtype name and checksum of one published tensor."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int


def entries_of(tensors: Mapping[str, Tensor]) -> dict[str, Entry]:
    """An entry a tensor; the checksums come off each device in one transfer."""
    sums = _checksums(list(tensors.values()))
    return {
        name: Entry(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), value)
        for (name, tensor), value in zip(tensors.items(), sums, strict=True)
    }


@dataclass(frozen=True)
class Manifest:
    """Everything an engine checks before it serves a version.

    Example:
        Manifest(7, "0f3a...", {"model.norm.weight": Entry((576,), "bfloat16", 1234)})
    """

    version: int
    plan_digest: str
    entries: Mapping[str, Entry]

    @classmethod
    def of(cls, version: int, plan_digest: str, tensors: Mapping[str, Tensor]) -> Manifest:
        """Describe `tensors` as version `version` under a plan."""
        return cls(version, plan_digest, entries_of(tensors))

    def verify(self, tensors: Mapping[str, Tensor]) -> None:
        """Check that `tensors` are exactly this version.

        Raises:
            ValueError: a tensor is missing, unexpected, of another shape or dtype, or of other
                bytes; the first one is named.
        """
        for name in (*self.entries, *tensors):
            if name not in tensors:
                raise ValueError(
                    f"version {self.version} is incomplete: {name} never arrived; publish it again"
                )
            if name not in self.entries:
                raise ValueError(
                    f"{name} is not part of version {self.version}: publisher and stream disagree"
                )
        for name, arrived in entries_of(tensors).items():
            if arrived != self.entries[name]:
                raise ValueError(
                    f"{name} of version {self.version} arrived as {arrived}, published as {self.entries[name]}"
                )


def checksum(tensor: Tensor) -> int:
    """A 64-bit position-weighted sum of a tensor's bytes, computed where the tensor lives.

    It sees any changed, moved or swapped byte of ordinary corruption; it is no cryptographic hash.
    """
    return _checksums([tensor])[0]


def _checksums(tensors: Sequence[Tensor]) -> list[int]:
    values = [0] * len(tensors)
    for device in {tensor.device for tensor in tensors}:
        rows = [i for i, tensor in enumerate(tensors) if tensor.device == device]
        found = byte_checksums([tensors[i] for i in rows]).tolist()
        for row, value in zip(rows, found, strict=True):
            values[row] = value
    return values
