"""Which process this is, and what processes tell each other; alone, every function returns what it was given."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

T = TypeVar("T")
PATIENCE = timedelta(minutes=30)
"""How long a rank waits for the others: one may be sampling, or scoring, far longer than the rest."""


def launched() -> bool:
    """Whether torchrun, or anything that sets its variables, started this process."""
    return "RANK" in os.environ and "WORLD_SIZE" in os.environ


def joined() -> bool:
    """Whether this process works as one of a group, be it a group of one; that of a vLLM in this process is its own."""
    return launched() and dist.is_available() and dist.is_initialized()


def rank() -> int:
    """This process's number, from 0; before joining too, so that only one complains."""
    return dist.get_rank() if joined() else int(os.environ.get("RANK", 0)) if launched() else 0


def size() -> int:
    """How many processes train together."""
    return dist.get_world_size() if joined() else 1


def is_first() -> bool:
    """Whether this is the rank that writes and prints."""
    return rank() == 0


@contextmanager
def together() -> Iterator[None]:
    """Join the group that torchrun started for the block inside; alone, or inside another such block, nothing.

    CPU tensors travel by gloo beside NCCL: objects, offloaded shards and checkpoints are on the host.
    """
    if not launched() or joined():
        yield
        return
    dist.init_process_group("cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo", timeout=PATIENCE)
    yield
    # Not after an error: the others may be in the middle of a message, and torchrun ends them.
    dist.destroy_process_group()


def local_device(kind: str) -> torch.device:
    """This process's device of a kind: of several GPUs, the one of its number on this machine.

    Raises:
        ValueError: there are more processes on this machine than GPUs.
    """
    if kind != "cuda":
        return torch.device(kind)
    number, count = int(os.environ.get("LOCAL_RANK", 0)), torch.cuda.device_count()
    if number >= count:
        raise ValueError(
            f"process {number} of this machine has no GPU of its own, there are {count}; start at most {count} "
            "processes a machine (torchrun --nproc-per-node), or set model.device='cpu'"
        )
    torch.cuda.set_device(number)
    return torch.device("cuda", number)


def local_gpus(named: str | None) -> str | None:
    """CUDA_VISIBLE_DEVICES of a server of this process: its part of those named, or the GPU that it trains on.

    None leaves the server what this process sees.

    Raises:
        ValueError: the named ones cannot be shared out evenly among the processes of this machine.
    """
    if not joined() or (named is None and not torch.cuda.is_available()):
        return named
    number = int(os.environ.get("LOCAL_RANK", 0))
    if named is None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        return visible.split(",")[number] if visible else str(number)
    devices, here = named.split(","), int(os.environ.get("LOCAL_WORLD_SIZE") or size())
    if len(devices) % here:
        raise ValueError(
            f"rollout.vllm_devices={named!r} names {len(devices)} GPUs for the servers of {here} processes; name as "
            "many for each"
        )
    each = len(devices) // here
    return ",".join(devices[number * each : (number + 1) * each])


def gather(value: T) -> list[T]:
    """Every rank's value, in the order of ranks, on all of them; anything that can be pickled."""
    if size() == 1:
        return [value]
    values: list[Any] = [None] * size()
    dist.all_gather_object(values, value)
    return values


def from_first(value: T) -> T:
    """Rank 0's value, on all of them."""
    if size() == 1:
        return value
    values = [value]
    dist.broadcast_object_list(values, src=0)
    return values[0]


def total(tensor: Tensor) -> Tensor:
    """Sum over ranks of a tensor of which every rank has filled in its own entries, zeros elsewhere: exact."""
    if size() > 1:
        dist.all_reduce(tensor)
    return tensor


def any_rank(flag: bool) -> bool:
    """Whether `flag` is set on any rank."""
    return any(gather(flag))


def share(items: list[T]) -> list[T]:
    """This rank's part: every size()-th item."""
    return items[rank() :: size()]


def merge(parts: list[list[T]]) -> list[T]:
    """The whole that every rank's `share` was taken of."""
    merged: list[Any] = [None] * sum(map(len, parts))
    for first, part in enumerate(parts):
        merged[first :: len(parts)] = part
    return merged


def first_to_fail() -> bool:
    """Note that this rank stops, and say whether no other did before: one message is printed, not N.

    What stops the later ones is as a rule that they lost the first.
    """
    if not joined():
        return is_first()
    try:
        return dist.distributed_c10d._get_default_store().add("lowbitrl/failures", 1) == 1
    except RuntimeError:  # The store went with the process that kept it.
        return False
