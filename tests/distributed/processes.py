"""Small work in several processes that train as one, on the CPU: what torchrun does, without its start-up time.

Processes are forked from a server that has imported everything once.
"""

from __future__ import annotations

import multiprocessing
import os
import socket
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

CONTEXT = multiprocessing.get_context("forkserver")
# conftest first: it sets what Triton and the hub client read when they are imported. One server serves all tests.
CONTEXT.set_forkserver_preload(
    ["tests.conftest", "lowbitrl.loop", "tests.moe_models", "tests.distributed.work"]
)
SECONDS = 120


def run_ranks(size: int, folder: Path, work: Callable[..., Any], *args: Any) -> list[Any]:
    """`work(*args)` on `size` ranks; what each returned, through files in `folder`.

    `size` 0 is one process without a group. Raises AssertionError with the traceback of the first that failed.
    """
    folder.mkdir(parents=True, exist_ok=True)
    port = free_port()
    started = [
        CONTEXT.Process(target=_one, args=(rank, size, port, folder, work, args))
        for rank in range(max(size, 1))
    ]
    for process in started:
        process.start()
    for process in started:
        process.join(SECONDS)
    stuck = [process for process in started if process.is_alive()]
    for process in stuck:
        process.kill()
    failures = [file.read_text() for file in sorted(folder.glob("failed-*"))]
    assert not failures, failures[0]
    assert not stuck, f"{len(stuck)} of {size} processes had to be killed after {SECONDS} s"
    return [torch.load(folder / f"result-{rank}", weights_only=False) for rank in range(max(size, 1))]


def _one(
    rank: int, size: int, port: int, folder: Path, work: Callable[..., Any], args: tuple[Any, ...]
) -> None:
    torch.set_num_threads(1)
    if size:
        os.environ |= {"RANK": str(rank), "WORLD_SIZE": str(size), "LOCAL_RANK": str(rank)}
        os.environ |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    from lowbitrl.distributed import ranks

    try:
        with ranks.together():
            torch.save(work(*args), folder / f"result-{rank}")
    except BaseException:
        (folder / f"failed-{rank}").write_text(traceback.format_exc())
        os._exit(1)


def free_port() -> int:
    """A TCP port that nothing listens on."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        return found.getsockname()[1]
