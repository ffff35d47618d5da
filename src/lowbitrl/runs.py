"""A run folder: what was asked, what was decided, what happened.

config.json  plan.json  environment.json  metrics.jsonl  rollouts/  checkpoints/  figures/  report.html
"""

from __future__ import annotations

import fcntl
import json
import os
import platform
import sys
from collections.abc import Callable, Iterable
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

PHASES = ("gen", "update", "publish", "eval")
"""Parts of a step, as timing/* names them."""


class RunFolder:
    """An open run folder, locked against a second writer until `close`.

    Of several processes that train together one `writes`; to the others it is a folder to read.

    Raises:
        FileExistsError: it holds another run and `resume` is off, or another process writes to it.
        PermissionError: it cannot be written.
        FileNotFoundError: `resume` of a folder that holds no run.
    """

    def __init__(self, path: Path | str, resume: bool = False, writes: bool = True) -> None:
        # Absolute: a reward function may change the working folder under the run.
        self.path = Path(path).absolute()
        self.metrics_file = self.path / "metrics.jsonl"
        self.checkpoints = self.path / "checkpoints"
        self.listeners: list[Callable[[dict[str, Any]], None]] = []
        self.writes = writes
        if resume and not (self.path / "config.json").is_file():
            raise FileNotFoundError(f"{self.path} holds no run to resume; start it without --resume")
        if not writes:
            return
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            self._lock = (self.path / "run.lock").open("w")
        except (PermissionError, NotADirectoryError, FileExistsError, OSError) as error:
            raise PermissionError(
                f"run folder {self.path} cannot be written ({error}); set out to another folder"
            ) from error
        try:
            self._claim(resume)
        except FileExistsError:
            self.close()
            raise

    def _claim(self, resume: bool) -> None:
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError as error:
            raise FileExistsError(
                f"run folder {self.path} is in use by another process; set out to another folder"
            ) from error
        if not resume and (self.path / "config.json").exists():
            raise FileExistsError(
                f"run folder {self.path} already holds a run; continue it with --resume, or set out to another folder"
            )
        if not resume and next(self.checkpoints.glob("step-*"), None) is not None:
            raise FileExistsError(
                f"run folder {self.path} has no config.json but checkpoints of an earlier run, which a resume would "
                "take for this run's; remove them, or set out to another folder"
            )

    def write_json(self, name: str, value: Any) -> None:
        """Write `name` atomically."""
        self._write(name, json.dumps(value, indent=2, sort_keys=True) + "\n")

    def _write(self, name: str, text: str) -> None:
        if not self.writes:
            return
        temporary = self.path / f".{name}.partial"
        temporary.write_text(text)
        os.replace(temporary, self.path / name)

    def read_json(self, name: str) -> Any:
        """What `write_json` wrote."""
        return read_json(self.path / name)

    def log(self, record: dict[str, Any]) -> None:
        """Append one line of metrics, flushed, then tell every listener."""
        if not self.writes:
            return
        with self.metrics_file.open("a") as file:
            file.write(json.dumps(record) + "\n")
        for listener in self.listeners:
            listener(record)

    def log_rollouts(self, step: int, rows: Iterable[dict[str, Any]]) -> None:
        """Write sampled completions of a step."""
        if not self.writes:
            return
        folder = self.path / "rollouts"
        folder.mkdir(exist_ok=True)
        (folder / f"step-{step:06d}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))

    def rewind(self, step: int) -> None:
        """Drop metrics of steps from `step` on: they will be made again."""
        if not self.writes:
            return
        kept = [line for line in read_metrics(self.path) if line["step"] < step]
        self._write(self.metrics_file.name, "".join(json.dumps(line) + "\n" for line in kept))

    def close(self) -> None:
        """Release the lock."""
        if self.writes:
            self._lock.close()

    def __enter__(self) -> RunFolder:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()


def read_json(file: Path) -> Any:
    """A JSON file of a run folder. Raises ValueError if it is damaged."""
    try:
        return json.loads(file.read_text())
    except ValueError as error:
        raise ValueError(f"{file} is damaged ({error}); it must be the JSON that the run wrote") from error


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """Every complete line of a run's metrics.jsonl; a line cut off by a crash is left out.

    Raises:
        ValueError: a complete line is no JSON object.
    """
    file = Path(path) / "metrics.jsonl"
    if not file.is_file():
        return []
    lines = file.read_bytes().split(b"\n")
    return [_record(file, number, line) for number, line in enumerate(lines[:-1], start=1)]


def _record(file: Path, number: int, line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        if isinstance(record, dict):
            return record
        problem = "no object"
    except ValueError as error:
        problem = str(error)
    raise ValueError(f"{file}, line {number}: {problem}; the file was damaged: mend or remove that line")


def environment(device: torch.device) -> dict[str, Any]:
    """What a figure must travel with: hardware, versions, command."""
    packages = ("torch", "transformers", "triton", "reasoning-gym", "numpy", "lowbitrl")
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "command": " ".join(sys.argv),
        "python": platform.python_version(),
        "machine": platform.machine(),
        "cpu_count": os.cpu_count(),
        "cpu_threads": torch.get_num_threads(),
        "gpu": gpu,
        "versions": {name: _version(name) for name in packages},
    }


def _version(package: str) -> str | None:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return None
