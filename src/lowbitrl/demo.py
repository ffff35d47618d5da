"""The main job in two runs: QUADS with TBPO, then the same few steps naive, and the gap between them."""

from __future__ import annotations

import time
from collections.abc import Mapping
from pathlib import Path

from rich.console import Console
from rich.table import Table

from lowbitrl.config import RunConfig, load_config
from lowbitrl.diagnose.report import summary, write_report
from lowbitrl.engines import Say
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
    _check(out, recipes)
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


def _check(out: Path, recipes: Path) -> None:
    """Both runs can start, before the first one does."""
    for name in RUNS:
        recipe = recipes / f"demo-{name}.toml"
        if not recipe.is_file():
            raise FileNotFoundError(
                f"demo needs {recipe}, which is not here: run it in a clone of the repository, or give the folder "
                "of its recipes with --recipes"
            )
        if (out / name / "config.json").is_file():
            raise FileExistsError(
                f"{out / name} already holds a run; name another folder with --out, look at this one with "
                f"`lowbitrl report {out / RUNS[0]} {out / RUNS[1]}`, or remove {out}"
            )


def _config(recipe: Path, out: Path, steps: int) -> RunConfig:
    return load_config(recipe, ["--out", str(out), *(["--trainer.steps", str(steps)] if steps else [])])


def _table(rows: Mapping[str, Mapping[str, float]]) -> Table:
    # Figures down, runs across: the names are long, and a terminal of 80 columns would cut them as a header.
    table = Table(title="4-bit rollouts, two learners")
    table.add_column("")
    for name in rows:
        table.add_column(name, justify="right")
    for figure in next(iter(rows.values())):
        table.add_row(figure, *(f"{row[figure]:.3g}" for row in rows.values()))
    return table
