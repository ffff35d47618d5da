"""``lowbitrl bench SUITE``: run the suite's modules, write rows, findings and figures.

A suite is a list of modules, each with ``run(bench: Bench) -> None``: it measures cases, and holds what it
measured to goals. A new benchmark is a new module named here.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from pathlib import Path

from .record import Bench

SUITES: dict[str, tuple[str, ...]] = {
    "kernels": ("lowbitrl.bench.products", "lowbitrl.bench.experts", "lowbitrl.bench.quantizers"),
    "rollout": ("lowbitrl.bench.rollout",),
    "step": ("lowbitrl.bench.step",),
    "sync": ("lowbitrl.bench.sync",),
}


def run_suite(suite: str, out: Path, only: Sequence[str] = ()) -> Bench:
    """Run one suite and save it.

    Args:
        only: modules of the suite to run, by last name ("quantize"); all where empty.

    Raises:
        ValueError: no such suite or module.
    """
    if suite not in SUITES:
        raise ValueError(f"unknown suite {suite!r}; known: {', '.join(SUITES)}")
    known = {name.rpartition(".")[2]: name for name in SUITES[suite]}
    for name in only:
        if name not in known:
            raise ValueError(f"suite {suite} has no benchmark {name!r}; known: {', '.join(known) or 'none'}")
    bench = Bench(suite, " ".join(["lowbitrl bench", suite, *(f"--only {name}" for name in only)]))
    try:
        for name in only or known:
            importlib.import_module(known[name]).run(bench)
    finally:
        # What was measured before a failure stays.
        bench.save(out)
    return bench
