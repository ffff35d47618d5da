"""Where measurements go: a CSV row a case, a finding a claim. Both carry what made them.

kernels.csv      every case: op, shape, backend, L2, percentiles, limit and ratio, GPU, versions, commit
summary.json     {"what", "figure", "goal", "met", "command"} a line of the goals; other suites' rows stay
"""

from __future__ import annotations

import csv
import functools
import json
import os
import platform
import subprocess
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

import torch

from .ceilings import limit_microseconds
from .timing import L2, Call, Timing, time_calls

COMMIT_VARIABLE = "LOWBITRL_COMMIT"


@dataclass(frozen=True)
class Row:
    """One measured case. Times in microseconds; ``ratio`` is limit over p50, 1.0 the physical limit."""

    suite: str
    op: str
    shape: str
    backend: str
    l2: L2
    p20: float
    p50: float
    p80: float
    bytes: int
    flops: int
    limit: float
    ratio: float
    note: str
    gpu: str
    torch: str
    triton: str
    cuda: str
    driver: str
    commit: str


@dataclass(frozen=True)
class Finding:
    """One line of summary.json: a measured figure next to the goal it is held to."""

    what: str
    figure: float
    goal: str
    met: bool
    command: str


@dataclass
class Bench:
    """What a suite measures with; ``save`` writes what it gathered."""

    suite: str
    command: str
    device: str = field(default_factory=lambda: "cuda" if torch.cuda.is_available() else "cpu")
    commit: str = field(default_factory=lambda: current_commit())
    rows: list[Row] = field(default_factory=list)
    findings: list[Finding] = field(default_factory=list)

    def measure(
        self, op: str, shape: str, calls: Sequence[Call], *, nbytes: int, flops: int = 0, l2: L2, backend: str,
        note: str = "", samples: int = 30,
    ) -> Row:  # fmt: skip
        """Time a case and keep its row.

        Args:
            calls: one a set of buffers (``cold_sets``), graph-safe.
            nbytes: fewest bytes the op must move: each input read once, each output written once.
            flops: tensor-core operations it must do.
        """
        timing = time_calls(calls, l2=l2, samples=samples)
        return self.keep(op, shape, timing, nbytes=nbytes, flops=flops, backend=backend, note=note)

    def keep(
        self,
        op: str,
        shape: str,
        timing: Timing,
        *,
        nbytes: int,
        flops: int = 0,
        backend: str,
        note: str = "",
    ) -> Row:
        """A row of a case timed elsewhere."""
        limit = limit_microseconds(self.device, nbytes, flops)
        row = Row(
            suite=self.suite,
            op=op,
            shape=shape,
            backend=backend,
            l2=timing.l2,
            p20=round(timing.p20, 3),
            p50=round(timing.p50, 3),
            p80=round(timing.p80, 3),
            bytes=nbytes,
            flops=flops,
            limit=round(limit, 3),
            ratio=round(limit / timing.p50, 4),
            note=note,
            **software(),
            commit=self.commit,
        )
        self.rows.append(row)
        print(
            f"{op:28} {shape:24} {backend:10} {row.l2} {row.p50:10.2f} us  "
            f"limit {row.limit:9.2f}  {row.ratio:.2f}  {note}"
        )
        return row

    def find(self, what: str, figure: float, *, at_least: float | None = None, at_most: float | None = None,
             unit: str = "") -> Finding:  # fmt: skip
        """Hold a figure to a goal; exactly one bound. ``met`` follows from the two numbers alone."""
        assert (at_least is None) != (at_most is None)
        met = figure >= at_least if at_least is not None else figure <= at_most  # type: ignore[operator]
        bound = f"at least {at_least:g}" if at_least is not None else f"at most {at_most:g}"
        finding = Finding(what, round(figure, 4), f"{bound} {unit}".strip(), bool(met), self.command)
        self.findings.append(finding)
        print(f"{'met ' if met else 'MISS'} {what}: {finding.figure} (goal {finding.goal})")
        return finding

    def save(self, out: Path) -> None:
        """Merge rows into ``<suite>.csv`` and findings into ``summary.json``."""
        out.mkdir(parents=True, exist_ok=True)
        write_rows(out / f"{self.suite}.csv", self.rows)
        merge_findings(out / "summary.json", self.findings)


def write_rows(path: Path, rows: list[Row]) -> None:
    """Replace the rows of the same ops, keep the others: benchmarks of one suite may run apart."""
    ops = {row.op for row in rows}
    lines = [line for line in _read_rows(path) if line["op"] not in ops]
    with path.open("w", newline="") as file:
        writer = csv.DictWriter(file, [f.name for f in fields(Row)])
        writer.writeheader()
        writer.writerows([*lines, *(asdict(row) for row in rows)])


def _read_rows(path: Path) -> list[dict[str, str]]:
    return list(csv.DictReader(path.open())) if path.exists() else []


def merge_findings(path: Path, findings: list[Finding]) -> None:
    """Replace the lines of the same ``what``, keep the others, in order of first appearance."""
    lines = {line["what"]: line for line in json.loads(path.read_text())} if path.exists() else {}
    lines |= {finding.what: asdict(finding) for finding in findings}
    path.write_text("[\n" + ",\n".join(json.dumps(line) for line in lines.values()) + "\n]\n")


@functools.cache
def software() -> dict[str, str]:
    """GPU (or CPU) and versions, by column."""
    on_cuda = torch.cuda.is_available()
    return {
        "gpu": torch.cuda.get_device_name()
        if on_cuda
        else f"none ({platform.processor() or platform.machine()})",
        "torch": torch.__version__,
        "triton": metadata.version("triton") if find_spec("triton") else "none",
        "cuda": torch.version.cuda or "none",
        "driver": _driver() if on_cuda else "none",
    }


def current_commit() -> str:
    """LOWBITRL_COMMIT where it is set (a copy without .git), else HEAD of the working folder's repository."""
    given = os.environ.get(COMMIT_VARIABLE)
    if given:
        return given
    try:
        asked = subprocess.run(["git", "rev-parse", "HEAD"], capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return "unknown"
    return asked.stdout.strip() or "unknown"


def _driver() -> str:
    try:
        query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
        return subprocess.run(query, capture_output=True, text=True, check=False).stdout.split("\n")[0]
    except FileNotFoundError:
        return "unknown"
