"""A version from a learner in shards to every rank's engine, a fused group at a time."""

from __future__ import annotations

from torch import nn

from lowbitrl.distributed import ranks
from lowbitrl.quant import attachment
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.vllm.server import VllmServerEngine
from lowbitrl.sync.manifest import Manifest
from lowbitrl.sync.publisher import pieces


def ship(
    learner: nn.Module, engine: EmbeddedEngine | VllmServerEngine, version: int
) -> tuple[Manifest, float]:
    """Gather and encode each group once, hand it to the engine, let it go; then compare what all ranks serve.

    Returns:
        The manifest, and the share of quantized codes that changed.

    Raises:
        ValueError: a rank serves other bytes than the first, or what `pieces` and `receive` refuse.
    """
    manifest, changed = engine.receive(pieces(learner), version, attachment(learner).plan.digest)
    first, *others = ranks.gather({name: entry.checksum for name, entry in manifest.entries.items()})
    for number, sums in enumerate(others, start=1):
        if odd := [name for name in first if sums[name] != first[name]]:
            raise ValueError(
                f"version {version}: rank {number} serves other bytes of {odd[0]} than rank 0; the ranks must run the "
                "same code on the same kind of device"
            )
    return manifest, changed
