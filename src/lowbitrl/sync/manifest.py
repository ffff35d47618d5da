"""The bill of a published version: which plan, which tensors, which bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_PRIME = 2_654_435_761  # Knuth's multiplicative-hash constant: odd, so multiplying loses no bit.


@dataclass(frozen=True)
class Entry:
    """Shape, dtype name and checksum of one published tensor."""

    shape: tuple[int, ...]
    dtype: str
    checksum: int

    @classmethod
    def of(cls, tensor: Tensor) -> Entry:
        """The entry that describes `tensor`."""
        return cls(tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor))


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
        return cls(version, plan_digest, {name: Entry.of(tensor) for name, tensor in tensors.items()})

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
        for name, entry in self.entries.items():
            arrived = Entry.of(tensors[name])
            if arrived != entry:
                raise ValueError(
                    f"{name} of version {self.version} arrived as {arrived}, published as {entry}"
                )


def checksum(tensor: Tensor) -> int:
    """A 64-bit position-weighted sum of a tensor's bytes, computed where the tensor lives.

    It sees any changed, moved or swapped byte of ordinary corruption; it is no cryptographic hash.
    """
    raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
    tail = raw[raw.numel() // 8 * 8 :].long()
    words = raw[: raw.numel() // 8 * 8].view(torch.int64) if raw.numel() >= 8 else raw.new_zeros(0).long()
    # int64 arithmetic wraps, which is what a hash wants.
    mixed = (words ^ (words >> 29)) * (2 * torch.arange(words.numel(), device=raw.device) * _PRIME + 1)
    return int(mixed.sum() * 31 + (tail * (torch.arange(tail.numel(), device=raw.device) + 1)).sum())
