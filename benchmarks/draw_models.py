"""Figure of step.csv and sync.csv: where a training step's time goes by recipe, and a publication's by part.

python benchmarks/draw_models.py results/h200-kernels
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

PHASES = ("generate", "update", "publish")
Rows = list[dict[str, str]]


def main(folder: Path) -> None:
    """Write models.png beside the rows."""
    steps, parts = (list(csv.DictReader((folder / f"{suite}.csv").open())) for suite in ("step", "sync"))
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True)
    draw_steps(left, steps)
    draw_parts(right, parts)
    for axes in (left, right):
        axes.spines[["top", "right"]].set_visible(False)
    figure.suptitle(f"{steps[0]['gpu']}, torch {steps[0]['torch']}, triton {steps[0]['triton']}", fontsize=10)
    figure.savefig(folder / "models.png", dpi=130)


def draw_steps(axes: plt.Axes, rows: Rows) -> None:
    """A bar a recipe, its phases after one another, and the whole over BF16's."""
    took = {row["op"]: float(row["p50"]) / 1e3 for row in rows}
    names = [op.removeprefix("step ") for op in took if op.startswith("step ")]
    ends = [0.0] * len(names)
    for phase in PHASES:
        times = [took[f"{phase} {name}"] for name in names]
        axes.barh(names, times, left=ends, label=phase)
        ends = [end + time for end, time in zip(ends, times, strict=True)]
    for place, (name, end) in enumerate(zip(names, ends, strict=True)):
        axes.annotate(
            f" {took[f'step {name}'] / took['step bf16']:.3f}", (end, place), va="center", fontsize=8
        )
    axes.invert_yaxis()
    axes.set_title(f"a step: {rows[0]['shape']}", fontsize=10)
    axes.set_xlabel("milliseconds; whole step over BF16's beside the bar")
    axes.margins(x=0.1)
    axes.legend(frameon=False, fontsize=8, ncols=len(PHASES), loc="upper left", bbox_to_anchor=(0, -0.16))


def draw_parts(axes: plt.Axes, rows: Rows) -> None:
    """A bar a part of an update, and the time that its bytes need at copy bandwidth."""
    axes.barh([row["op"] for row in rows], [float(row["p50"]) / 1e3 for row in rows], label="measured")
    limits = [float(row["limit"]) / 1e3 for row in rows]
    axes.scatter(
        limits, range(len(rows)), color="black", marker="|", s=120, label="its bytes alone", zorder=3
    )
    axes.invert_yaxis()
    axes.set(xscale="log", xlabel="milliseconds")
    axes.set_title(f"an update of a {rows[0]['shape']} model, part by part", fontsize=10)
    axes.legend(frameon=False, fontsize=8, loc="lower right")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
