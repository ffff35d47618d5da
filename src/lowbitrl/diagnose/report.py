"""report.html of runs: their numbers with their figures, in one file that works offline.

Numbers go to summary.json first; the page shows what is there. A run that is going on is reported
as far as it has come.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbitrl.diagnose import page
from lowbitrl.diagnose.figures import Records, group_of, median, time_figure, training_figure
from lowbitrl.runs import PHASES, read_metrics

TAIL = 5  # steps averaged for "at the end"


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write figures, summary.json and report.html for `runs`, into the first run's folder unless `out` is given.

    Runs whose folders differ by "-seedN" alone are one recipe: a band in the figures, a row in the first table.

    Raises:
        FileNotFoundError: a folder holds no metrics.
    """
    records = {_name(path): read_metrics(path) for path in runs}
    for path, lines in zip(runs, records.values(), strict=True):
        if not lines:
            raise FileNotFoundError(f"{path} holds no metrics.jsonl with a complete line; give a run folder")
    folder = out or runs[0]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    training = training_figure(records, folder / "figures" / "training.png")
    spent = time_figure(records, folder / "figures" / "time.png")
    found = summary(records)
    recipes = recipe_summary(found)
    (folder / "summary.json").write_text(json.dumps({"runs": found, "recipes": recipes}, indent=2) + "\n")
    file = folder / "report.html"
    file.write_text(
        page.page(
            "lowbitrl report",
            [
                *([_recipe_table(recipes)] if len(recipes) < len(found) else []),
                page.section(
                    "Runs", page.table([{"run": name} | row for name, row in found.items()]), page.text(NOTE)
                ),
                page.section(
                    "Training",
                    page.figure(training, "a line a recipe; bands from the lowest to the highest seed"),
                ),
                page.section("Time", page.figure(spent, "median seconds of a step by phase")),
                page.section("Set-up", page.code("\n".join(f"{p}: {_setup(p)}" for p in runs))),
            ],
        )
    )
    return file


NOTE = (
    f"Rewards are means over the first and last {TAIL} steps; a mismatch is the mean of "
    "|log p learner - log p rollout| over a step's tokens, in nats; medians are over steps."
)


def summary(runs: Mapping[str, Records]) -> dict[str, dict[str, float]]:
    """Per run: reward at the start and end, median mismatch, what was clipped, seconds a step, tokens a second."""
    return {name: _summary(records) for name, records in runs.items()}


def _summary(records: Records) -> dict[str, float]:
    steps = [r for r in records if r["step"] >= 0]
    rewards = [r["reward/mean"] for r in steps]
    seconds = [sum(r.get(f"timing/{phase}", 0.0) for phase in PHASES) for r in steps]
    row = {
        "steps": len(steps),
        "reward, first": _mean(rewards[:TAIL]),
        "reward, last": _mean(rewards[-TAIL:]),
        "mismatch, median": _median_of(steps, "mismatch/abs_mean"),
        "mismatch p99, median": _median_of(steps, "mismatch/abs_p99"),
        "clipped, median": _median_of(steps, "actor/pg_clipfrac"),
        "entropy, last": _mean([r["actor/entropy"] for r in steps if "actor/entropy" in r][-TAIL:]),
        "seconds a step": median(seconds),
        "rollout tokens/s": _median_of(steps, "timing/tokens_per_s"),
    }
    evaluated = [r["eval/pass@1"] for r in records if "eval/pass@1" in r]
    return row | ({"held-out pass@1, last": evaluated[-1]} if evaluated else {})


def recipe_summary(rows: Mapping[str, Mapping[str, float]]) -> dict[str, dict[str, list[float]]]:
    """Mean, lowest and highest of every figure over the seeds of a recipe."""
    groups: dict[str, list[Mapping[str, float]]] = {}
    for name, row in rows.items():
        groups.setdefault(group_of(name), []).append(row)
    return {
        name: {key: _spread([row[key] for row in seeds if key in row]) for key in seeds[0]}
        for name, seeds in groups.items()
    }


def _recipe_table(recipes: Mapping[str, dict[str, list[float]]]) -> str:
    rows = [dict[str, page.Cell]({"recipe": name}) | row for name, row in recipes.items()]
    return page.section("Recipes: mean over seeds [lowest, highest]", page.table(rows))


def _spread(values: Sequence[float]) -> list[float]:
    return [_mean(values), min(values), max(values)]


def _median_of(records: Records, key: str) -> float:
    return median([r[key] for r in records if key in r])


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


def _name(path: Path) -> str:
    return path.resolve().name


def _setup(path: Path) -> str:
    """The recipe and the machine, as one line of JSON."""
    try:
        config: dict[str, Any] = json.loads((path / "config.json").read_text())
        machine: dict[str, Any] = json.loads((path / "environment.json").read_text())
    except FileNotFoundError:
        return "no config.json"
    chosen = {key: config[key] for key in ("seed", "model", "recipe", "objective", "rollout", "optimizer")}
    return json.dumps(chosen | {k: machine[k] for k in ("cpu_threads", "gpu", "versions")})
