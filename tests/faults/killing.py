"""Runs in processes of their own, to be killed. A fork server has torch loaded: a run starts in milliseconds."""

from __future__ import annotations

import functools
import importlib
import itertools
import os
import signal
import threading
from collections.abc import Callable
from multiprocessing.process import BaseProcess
from pathlib import Path

from lowbitrl.runs import read_metrics
from lowbitrl.trainer import checkpoint
from tests.distributed.processes import CONTEXT, free_port

LONGEST = 6.0
"""Seconds within which a run is killed: a busy machine's tests would take minutes otherwise."""


def start(
    folder: Path,
    out: str,
    sections: dict,
    sabotage: Callable[[], None] | None = None,
    environment: dict[str, str] | None = None,
) -> BaseProcess:
    """Begin or go on with a tiny run, in a process that is its parent's child and nobody's thread.

    Args:
        sabotage: a function of a module, called in the process before the run.
        environment: variables set before that.
    """
    process = CONTEXT.Process(target=_run, args=(folder, out, sections, sabotage, environment or {}))
    process.start()
    return process


def start_ranks(folder: Path, out: str, sections: dict, size: int) -> list[BaseProcess]:
    """As `start`, `size` processes that train together, by rank."""
    shared = {"WORLD_SIZE": str(size), "MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port())}
    ranks = [{"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(size)]
    return [start(folder, out, sections, environment=shared | rank) for rank in ranks]


def _run(
    folder: Path,
    out: str,
    sections: dict,
    sabotage: Callable[[], None] | None,
    environment: dict[str, str],
) -> None:
    import torch

    from lowbitrl.loop import train
    from tests.tiny_run import config

    torch.set_num_threads(1)
    os.environ |= environment
    if sabotage is not None:
        sabotage()
    train(
        config(folder, out, **sections),
        resume=(folder / out / "config.json").is_file(),
        say=lambda line: None,
    )


def finish(process: BaseProcess, seconds: float = 60) -> int | None:
    """Wait for the end; the exit code, negative for a signal."""
    process.join(seconds)
    if process.is_alive():
        process.kill()
        process.join()
        raise AssertionError(f"the run was still going after {seconds} s")
    return process.exitcode


def lasting(folder: Path) -> list[dict]:
    """Metrics without wall-clock times."""
    return [{k: v for k, v in line.items() if not k.startswith("timing/")} for line in read_metrics(folder)]


def lost_steps(folder: Path) -> int:
    """Steps that were logged and that a resume would make again."""
    logged = [line["step"] for line in read_metrics(folder)] if (folder / "metrics.jsonl").is_file() else []
    saved, _ = checkpoint.latest(folder / "checkpoints")
    return max([*logged, -1]) + 1 - (saved.state["step"] if saved else 0)


def kill_myself() -> None:
    """What `kill -9` of this process does, and nothing after it runs."""
    os.kill(os.getpid(), signal.SIGKILL)
    signal.pause()


def hang() -> None:
    """Never go on."""
    threading.Event().wait()


def instead(place: str, at: int, what: Callable[[], None]) -> None:
    """Make call number `at` of `module:attribute.function` do `what` in place of its work."""
    module, _, path = place.partition(":")
    *owners, name = path.split(".")
    owner = functools.reduce(getattr, owners, importlib.import_module(module))
    real, count = getattr(owner, name), itertools.count()

    @functools.wraps(real)
    def wrapped(*arguments, **options):
        if next(count) == at:
            what()
        return real(*arguments, **options)

    setattr(owner, name, wrapped)
