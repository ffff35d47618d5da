"""The main job in two runs: QUADS with TBPO, then the same few steps naive, and the gap between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lowbitrl.assemble import Say
from lowbitrl.config import RunConfig, load_config
from lowbitrl.diagnose.report import summary, write_report
from lowbitrl.loop import train
from lowbitrl.runs import read_metrics

RUNS = ("quads", "naive")


def run_demo(out: Path, steps: int, recipes: Path, say: Say) -> Path:
    """Run demo-quads.toml and demo-naive.toml of `recipes` into `out` and compare.

    Args:
        steps: training steps of each; 0 takes the recipes' own.

    Returns:
        The report. Raises what `train` raises; run folders of an earlier demo are refused.
    """
    started = time.perf_counter()
    folders = []
    for name in RUNS:
        say(f"\n== {name} ==")
        folders.append(train(_config(recipes / f"demo-{name}.toml", out / name, steps), say=say))
    say("")
    records = {folder.name: read_metrics(folder) for folder in folders}
    table = summary(records)
    Console().print(_table(table))
    ratio = table["naive"]["mismatch, median"] / table["quads"]["mismatch, median"]
    page = write_report(folders, out)
    say(f"A naive W4A4 rollout is {ratio:.1f} times as far from its learner as QUADS.")
    say(f"Report {page}, figures beside it; {time.perf_counter() - started:.0f} seconds in all.")
    return page


def _config(recipe: Path, out: Path, steps: int) -> RunConfig:
    return load_config(recipe, ["--out", str(out), *(["--trainer.steps", str(steps)] if steps else [])])


def _table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    table = Table(title="4-bit rollouts, two learners")
    columns = list(next(iter(rows.values())))
    table.add_column("run")
    for column in columns:
        table.add_column(column, justify="right")
    for name, row in rows.items():
        table.add_row(name, *(f"{row[column]:.3g}" for column in columns))
    return table
