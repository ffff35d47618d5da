"""The publisher's side of an update: buckets, their manifest, and nothing served unless all of it arrived."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from torch import Tensor

BUCKET_BYTES = 1 << 30
SHARED_MEMORY = Path("/dev/shm")
ALIGNED = 16
"""Bytes: of any element that is published, a multiple."""


class Control(Protocol):
    """vLLM's update calls, in this process or over HTTP."""

    def start(self) -> None:
        """Begin an update."""
        ...

    def update(self, info: dict[str, Any]) -> None:
        """Send one message of it."""
        ...

    def finish(self, version: int) -> None:
        """Serve what was sent."""
        ...


def buckets(stream: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Named tensors in dictionaries of about `size` bytes; at least one tensor each."""
    bucket: dict[str, Tensor] = {}
    held = 0
    for name, tensor in stream:
        if bucket and held + tensor.nbytes > size:
            yield bucket
            bucket, held = {}, 0
        bucket[name] = tensor
        held += tensor.nbytes
    if bucket:
        yield bucket


def send(
    control: Control,
    stream: Iterable[tuple[str, Tensor]],
    manifest: dict[str, Any],
    *,
    by_file: bool,
    bucket_bytes: int = BUCKET_BYTES,
) -> None:
    """Make vLLM serve a version, whole or not at all.

    Args:
        manifest: `manifest_data` of the version's manifest.
        by_file: through files in shared memory, for workers in other processes of this host.

    Raises:
        Exception: whatever the workers refuse it for, after they were told to forget it.
    """
    begin(control)
    try:
        for bucket in buckets(stream, bucket_bytes):
            _send_file(control, bucket) if by_file else control.update({"tensors": bucket})
        control.update({"manifest": manifest})
        control.finish(manifest["version"])
    except BaseException:
        abandon(control)
        raise


def begin(control: Control) -> None:
    """Start an update; one that a dead publisher left open is abandoned first."""
    try:
        control.start()
    except Exception as error:
        if "already active" not in str(error):
            raise
        abandon(control)
        control.start()


def abandon(control: Control) -> None:
    """Make vLLM leave its update state."""
    try:
        control.update({"abandon": True})
    except Exception:
        # Always: that error is how vLLM's workers leave an update, and an update already left is one too.
        return


def _send_file(control: Control, bucket: dict[str, Tensor]) -> None:
    folder = SHARED_MEMORY if SHARED_MEMORY.is_dir() else None
    with tempfile.TemporaryDirectory(prefix="lowbitrl-", dir=folder) as scratch:
        path = Path(scratch) / "bucket.safetensors"
        save_file(on_host(bucket), path)
        control.update({"path": str(path)})


def on_host(bucket: dict[str, Tensor]) -> dict[str, Tensor]:
    """Copies in host memory of their own, off the device in one transfer: one a tensor would wait for it each time."""
    raws = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in bucket.values()]
    padded = [F.pad(raw, (0, -raw.numel() % ALIGNED)) for raw in raws]
    parts = torch.cat(padded).cpu().split([p.numel() for p in padded])
    return {
        name: part[: raw.numel()].view(t.dtype).view(t.shape).clone()
        for (name, t), raw, part in zip(bucket.items(), raws, parts, strict=True)
    }
