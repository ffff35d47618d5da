"""Checkpoints that are whole or absent: written aside, flushed, renamed, verified when read.

step-000050/ masters.safetensors  optimizer.pt  state.json  files.json (size and CRC of each)
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import nn

from lowbitrl.trainer.optim import MasterOptimizer

WRITTEN = {"masters.safetensors", "optimizer.pt", "state.json"}


@dataclass(frozen=True)
class Checkpoint:
    """A verified checkpoint folder and its loop state."""

    path: Path
    state: dict[str, Any]

    def restore(self, optimizer: MasterOptimizer) -> None:
        """Put masters and optimizer states back, and the parameters they imply.

        Raises:
            ValueError: the checkpoint is of another model or optimizer.
        """
        masters = load_file(self.path / "masters.safetensors")
        optimizer.load(masters, torch.load(self.path / "optimizer.pt", weights_only=True))


def save(folder: Path, step: int, optimizer: MasterOptimizer, state: dict[str, Any], keep: int) -> Path:
    """Write step-`step` under `folder`, then drop all but the newest `keep`.

    A crash or a full disk leaves at most a hidden partial folder; older checkpoints stay. Checkpoints
    of later steps, which a damaged run may have left, are of a future given up: they are not counted.

    Raises:
        OSError: it could not be written.
    """
    final, partial = folder / f"step-{step:06d}", folder / f".step-{step:06d}.partial"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    try:
        masters = {name: m.detach().contiguous().cpu() for name, m in optimizer.masters.items()}
        save_file(masters, partial / "masters.safetensors")
        torch.save(optimizer.state_dict(), partial / "optimizer.pt")
        (partial / "state.json").write_text(json.dumps(state | {"step": step}))
        files = {path.name: [path.stat().st_size, _crc(path)] for path in partial.iterdir()}
        (partial / "files.json").write_text(json.dumps(files))
        for path in partial.iterdir():
            _flush(path)
    # A full disk is an OSError to Python, but not to the writers of safetensors and of torch.save.
    except (OSError, SafetensorError, RuntimeError) as error:
        shutil.rmtree(partial, ignore_errors=True)
        raise OSError(
            f"checkpoint {final} could not be written ({error}); earlier checkpoints are untouched"
        ) from error
    shutil.rmtree(final, ignore_errors=True)
    os.replace(partial, final)
    _flush(folder)
    for old in [path for number, path in steps(folder).items() if number <= step][: -max(keep, 1)]:
        shutil.rmtree(old)
    return final


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
    masters, parameters = load_file(path / "masters.safetensors"), dict(model.named_parameters())
    if masters.keys() != parameters.keys():
        odd = next(iter(masters.keys() ^ parameters.keys()))
        raise ValueError(f"checkpoint {path} is of another model: {odd} is on one side only")
    for name, parameter in parameters.items():
        parameter.copy_(masters[name])


def steps(folder: Path) -> dict[int, Path]:
    """Checkpoint folders by step, in its order; what a user put beside them is left alone."""
    found = folder.iterdir() if folder.is_dir() else ()
    numbered = {int(m[1]): p for p in found if (m := re.fullmatch(r"step-(\d+)", p.name)) and p.is_dir()}
    return dict(sorted(numbered.items()))


def _fault(path: Path) -> str | None:
    try:
        files = {
            name: (size, crc) for name, (size, crc) in json.loads((path / "files.json").read_text()).items()
        }
    except (OSError, ValueError, TypeError, AttributeError) as error:
        return f"files.json: {error}"
    for name in WRITTEN - files.keys():
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
