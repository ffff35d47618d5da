"""Checkpoints that are whole or absent, of any number of processes, written while the run goes on.

    step-000050/  .metadata  __0_0.distcp  __1_0.distcp ...   torch.distributed.checkpoint: masters, optimizer
                  state.json  rng.pt                          where the loop stands, random states by rank
                  files.json                                  size and CRC of each

Copied aside in memory, written aside by every rank in a thread, flushed, renamed, verified when read.
"""

from __future__ import annotations

import json
import os
import random
import re
import shutil
import warnings
import zlib
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from lowbitrl.distributed import ranks
from lowbitrl.trainer.optim import MASTERS, MasterOptimizer

# One process is what most runs are.
warnings.filterwarnings("ignore", "torch.distributed is disabled, unavailable or uninitialized", UserWarning)

WRITTEN = {".metadata", "state.json", "rng.pt"}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder and its loop state."""

    path: Path
    state: dict[str, Any]

    def restore(self, optimizer: MasterOptimizer) -> None:
        """Put masters, optimizer states and random states back, and the parameters they imply.

        Raises:
            ValueError: the checkpoint is of another model or optimizer.
        """
        held = _names(self.path)
        optimizer.make_states(held)
        tensors = optimizer.tensors()
        _check_names(self.path, held, tensors.keys())
        _read(self.path, tensors)
        optimizer.resume(self.state["optimizer_steps"])
        _restore_random(torch.load(self.path / "rng.pt", weights_only=True))


class Saver:
    """Writes a run's checkpoints in a thread of its own, one at a time.

    Args:
        folder: where the run's checkpoints are.
        keep: newest ones kept, beside the best-scored.
    """

    def __init__(self, folder: Path, keep: int) -> None:
        self.folder, self.keep = folder, keep
        self._thread = ThreadPoolExecutor(1, "checkpoint")
        self._pending: Future[None] | None = None
        # The thread's messages must not meet those of the training that goes on.
        self._group: Any = dist.new_group(backend="gloo") if ranks.joined() else None

    def save(self, step: int, optimizer: MasterOptimizer, state: dict[str, Any]) -> Path:
        """Begin to write step-`step`; all ranks call this. Where it will be, once `wait` has returned.

        A crash or a full disk leaves at most a hidden partial folder; older checkpoints stay. Checkpoints
        of later steps, which a damaged run may have left, are of a future given up: they are not counted.

        Raises:
            OSError: the one before it could not be written.
        """
        self.wait()
        final, partial = self.folder / f"step-{step:06d}", self.folder / f".step-{step:06d}.partial"
        copies = {name: tensor.to("cpu", copy=True) for name, tensor in optimizer.tensors().items()}
        state = state | {"step": step, "optimizer_steps": optimizer.steps}
        randoms = ranks.gather(_random_states())
        if ranks.is_first():
            _clear(self.folder)
        ranks.from_first(None)
        self._pending = self._thread.submit(self._write, partial, final, copies, state, randoms)
        return final

    def wait(self) -> None:
        """Until what was begun is whole.

        Raises:
            OSError: it could not be written; earlier checkpoints are untouched.
        """
        pending, self._pending = self._pending, None
        if pending is not None:
            pending.result()

    def close(self) -> None:
        """Let the thread go, after what it may still be writing."""
        self._thread.shutdown(wait=False)

    def _write(
        self,
        partial: Path,
        final: Path,
        tensors: dict[str, Tensor],
        state: dict[str, Any],
        randoms: list[dict[str, Any]],
    ) -> None:
        try:
            writer, alone = FileSystemWriter(partial), self._group is None
            state_dict_saver.save(tensors, storage_writer=writer, process_group=self._group, no_dist=alone)
            if ranks.is_first():
                torch.save(randoms, partial / "rng.pt")
                (partial / "state.json").write_text(json.dumps(state))
                _seal(partial, final)
                _prune(self.folder, state["step"], self.keep)
        # A full disk is an OSError to Python, but not to torch.save, nor to what carries errors between ranks.
        except (OSError, RuntimeError, CheckpointException) as error:
            if ranks.is_first():
                shutil.rmtree(partial, ignore_errors=True)
            raise OSError(
                f"checkpoint {final} could not be written ({_cause(error)}); earlier checkpoints are untouched"
            ) from error


def save(folder: Path, step: int, optimizer: MasterOptimizer, state: dict[str, Any], keep: int) -> Path:
    """One checkpoint, whole when this returns; otherwise as `Saver.save`."""
    saver = Saver(folder, keep)
    path = saver.save(step, optimizer, state)
    try:
        saver.wait()
    finally:
        saver.close()
    return path


def latest(folder: Path) -> tuple[Checkpoint | None, list[str]]:
    """The newest checkpoint whose bytes are those written, and a line for each newer one that is damaged."""
    damaged = []
    for path in reversed(steps(folder).values()):
        fault = _fault(path)
        if fault is None:
            return Checkpoint(path, state_of(path)), damaged
        damaged.append(f"{path} is damaged ({fault}) and was skipped")
    return None, damaged


def state_of(path: Path) -> dict[str, Any]:
    """The loop state of a checkpoint folder."""
    return json.loads((path / "state.json").read_text())


@torch.no_grad()
def load_masters(path: Path, model: nn.Module) -> None:
    """Put a checkpoint's weights into `model`, cast to its dtype.

    Raises:
        ValueError: the folder is damaged, or of another model.
    """
    if not (path / "files.json").is_file():
        raise FileNotFoundError(
            f"checkpoint {path}: no checkpoint is there; give a step-* folder with files.json in it, as in "
            "runs/quads/checkpoints/step-000050"
        )
    fault = _fault(path)
    if fault is not None:
        raise ValueError(f"checkpoint {path} is damaged ({fault}); give a step-* folder of a run")
    parameters = {f"{MASTERS}{name}": p.detach() for name, p in model.named_parameters()}
    _check_names(path, {n for n in _names(path) if n.startswith(MASTERS)}, parameters.keys())
    _read(path, parameters, alone=True)


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, in its order; what a user put beside them is left alone."""
    found = folder.iterdir() if folder.is_dir() else ()
    numbered = {int(m[1]): p for p in found if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()}
    return dict(sorted(numbered.items()))


def _names(path: Path) -> set[str]:
    """Names of the tensors in a checkpoint."""
    if not (path / ".metadata").is_file():
        raise ValueError(
            f"checkpoint {path} is of a version of lowbitrl that wrote safetensors; go on with that version, or "
            "start from what it exports (lowbitrl export)"
        )
    return set(FileSystemReader(path).read_metadata().state_dict_metadata)


def _check_names(path: Path, held: set[str], wanted: Any) -> None:
    if odd := sorted(held ^ set(wanted)):
        raise ValueError(f"checkpoint {path} is of another model: {odd[0]} is on one side only")


def _read(path: Path, tensors: dict[str, Tensor], alone: bool = False) -> None:
    """Fill `tensors` in place, every rank its own shards."""
    reader = FileSystemReader(path)
    state_dict_loader.load(dict(tensors), storage_reader=reader, no_dist=alone or not ranks.joined())


def _seal(partial: Path, final: Path) -> None:
    """Note every file's size and checksum, flush all, and give the folder its name."""
    files = {path.name: [path.stat().st_size, _crc(path)] for path in partial.iterdir()}
    (partial / "files.json").write_text(json.dumps(files))
    for path in (*partial.iterdir(), partial):
        _flush(path)
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    _flush(final.parent)


def _clear(folder: Path) -> None:
    """Drop what writes that never ended have left."""
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob(".step-*.partial"):
        shutil.rmtree(stale, ignore_errors=True)


def _prune(folder: Path, step: int, keep: int) -> None:
    """Drop all up to `step` but the newest `keep` and the one that scored highest, the latest of equals."""
    known = {number: path for number, path in steps(folder).items() if number <= step}
    scores = {n: s for n, path in known.items() if (s := _score(path)) is not None}
    best = max(scores, key=lambda n: (scores[n], n), default=None)
    for number in list(known)[: -max(keep, 1)]:
        if number != best:
            shutil.rmtree(known[number])


def _score(path: Path) -> float | None:
    """The held-out score noted in a checkpoint; None where there is none, or no state to read it from."""
    try:
        return state_of(path).get("score")
    except (OSError, ValueError):
        return None


def _random_states() -> dict[str, Any]:
    """What the process's own generators would draw next: a reward function may use them."""
    name, keys, *rest = cast(Any, np.random.get_state(legacy=True))
    return {
        "torch": torch.get_rng_state(),
        "cuda": torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
        "python": random.getstate(),
        "numpy": (name, keys.tolist(), *rest),
    }


def _restore_random(by_rank: list[dict[str, Any]]) -> None:
    """A rank's own states; those of rank 0 on a rank that there was not."""
    state = by_rank[ranks.rank() if ranks.rank() < len(by_rank) else 0]
    torch.set_rng_state(state["torch"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state["cuda"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))


def _cause(error: BaseException) -> str:
    """What went wrong where it went wrong: torch wraps each rank's error in one of its own."""
    if isinstance(error, CheckpointException):
        failed, (first, _) = next(iter(error.failures.items()))
        return f"{type(first).__name__}: {first}" + (f", on rank {failed}" if failed else "")
    return str(error)


def _fault(path: Path) -> str | None:
    try:
        files = {
            name: (size, crc) for name, (size, crc) in json.loads((path / "files.json").read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"files.json: {error}"
    for name in {} if "masters.safetensors" in files else WRITTEN - files.keys():
        return f"files.json does not list {name}"
    for name, (size, crc) in files.items():
        file = path / name
        if not file.is_file():
            return f"{name} is missing"
        if file.stat().st_size != size:
            return f"{name} has {file.stat().st_size} bytes, {size} were written"
        if _crc(file) != crc:
            return f"{name} does not match its checksum"
    return None


def _crc(path: Path) -> int:
    value = 0
    with path.open("rb") as file:
        while block := file.read(1 << 24):
            value = zlib.crc32(block, value)
    return value


def _flush(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
