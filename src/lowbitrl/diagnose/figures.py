"""Figures of runs, drawn from metrics.jsonl and from nothing else; each in a light and a dark version."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from lowbitrl.runs import PHASES

Records = Sequence[Mapping[str, Any]]
Runs = Mapping[str, Records]
Draw = Callable[[], Figure]
# Seen apart by readers who confuse red and green, on white and on near-black.
COLORS = ("#2f86b7", "#d1704a", "#4f9d69", "#9a7bb5", "#c9a227", "#7d8597", "#2a9d8f", "#c2185b")
INK = {"light": ("#222222", "#ffffff"), "dark": ("#dddddd", "#181a1b")}
SMOOTH = 3
PANELS = (
    ("reward/mean", "mean reward", False),
    ("eval/pass@1", "held-out pass@1", False),
    ("mismatch/abs_mean", "|log p learner - log p rollout|, nats", True),
    ("rollout_corr/k3_kl", "k3 KL(rollout || learner)", True),
    ("actor/pg_clipfrac", "clipped share of tokens", False),
    ("actor/pg_clipfrac_positive", "clipped share, advantage above 0", False),
    ("actor/pg_clipfrac_negative", "clipped share, advantage below 0", False),
    ("rollout_corr/rollout_rs_masked_fraction", "share of tokens a correction rejected", False),
    ("actor/entropy", "entropy, nats", False),
    ("actor/grad_norm", "gradient norm", True),
    ("timing/tokens_per_s", "rollout tokens a second", False),
    ("rollout/repetition", "repeated 8-grams", False),
)


def save(draw: Draw, path: Path) -> Path:
    """Draw twice: `path` for light pages, and beside it the same name with -dark."""
    for theme, (ink, paper) in INK.items():
        with _theme(ink, paper):
            figure = draw()
            figure.savefig(path if theme == "light" else dark(path), dpi=130)
            plt.close(figure)
    return path


def dark(path: Path) -> Path:
    """Where a figure's dark version is."""
    return path.with_name(f"{path.stem}-dark{path.suffix}")


@contextmanager
def _theme(ink: str, paper: str) -> Iterator[None]:
    keys = (
        "text.color",
        "axes.labelcolor",
        "axes.edgecolor",
        "xtick.color",
        "ytick.color",
        "axes.titlecolor",
    )
    papers = ("figure.facecolor", "axes.facecolor", "savefig.facecolor")
    frame = {
        "axes.spines.top": False,
        "axes.spines.right": False,
        "axes.titlesize": 10,
        "legend.frameon": False,
    }
    rc: dict[Any, Any] = dict.fromkeys(keys, ink) | dict.fromkeys(papers, paper) | frame
    with plt.rc_context(rc):
        yield


def training_figure(runs: Runs, path: Path) -> Path:
    """Reward, evaluation, mismatch, clipping, entropy and speed against steps: a line a recipe, seeds as bands."""
    groups = grouped(runs)
    present = [p for p in PANELS if any(p[0] in r for records in runs.values() for r in records)]

    def draw() -> Figure:
        rows = -(-len(present) // 3)
        figure, axes = plt.subplots(rows, 3, figsize=(13, 3.1 * rows), constrained_layout=True, squeeze=False)
        for axis, (metric, title, log) in zip(axes.flat, present, strict=False):
            _panel(axis, groups, metric, log)
            axis.set_title(title)
        for axis in axes.flat[len(present) :]:
            axis.set_axis_off()
        if axes.flat[0].get_legend_handles_labels()[0]:
            figure.legend(*axes.flat[0].get_legend_handles_labels(), loc="outside lower center", ncols=4)
        return figure

    return save(draw, path)


def scores_figure(statistics: Mapping[str, Mapping[str, Any]], names: Sequence[str], path: Path) -> Path:
    """A panel a figure of `names`: each variant's mean and 95% interval over seeds, full where it differs from
    the reference, which has a dashed line."""

    def draw() -> Figure:
        height = 0.3 * len(statistics) + 1.2
        figure, axes = plt.subplots(
            1, len(names), figsize=(5.5 * len(names), height), sharey=True, squeeze=False
        )
        for axis, name in zip(axes.flat, names, strict=True):
            _scores(axis, [row.get(name, {}) for row in statistics.values()])
            axis.set_title(name)
        axes.flat[0].set_yticks(range(len(statistics)), list(statistics))
        axes.flat[0].invert_yaxis()
        figure.tight_layout()
        return figure

    return save(draw, path)


def _scores(axis: Axes, entries: Sequence[Mapping[str, Any]]) -> None:
    for row, entry in enumerate(entries):
        if "mean" not in entry:
            continue
        differs = entry.get("difference", {}).get("differs", False)
        axis.errorbar(
            entry["mean"], row, xerr=entry.get("half", 0.0), fmt="o", color=COLORS[0], capsize=2,
            markerfacecolor=COLORS[0] if differs else "none",
        )  # fmt: skip
        if "difference" not in entry:
            axis.axvline(entry["mean"], color=COLORS[5], linestyle="--", linewidth=1)


def time_figure(runs: Runs, path: Path) -> Path:
    """Median seconds of a step by phase, one bar a run."""

    def draw() -> Figure:
        figure, axis = plt.subplots(figsize=(12, 0.35 * len(runs) + 1.4), constrained_layout=True)
        for row, records in enumerate(runs.values()):
            left = 0.0
            for color, phase in zip(COLORS, PHASES, strict=False):
                width = median([r[f"timing/{phase}"] for r in records if f"timing/{phase}" in r])
                axis.barh(row, width, left=left, color=color, label=phase if row == 0 else None)
                left += width
        axis.set_yticks(range(len(runs)), list(runs))
        axis.invert_yaxis()
        axis.set_xlabel("seconds a step (median)")
        axis.legend(ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
        return figure

    return save(draw, path)


def grouped(runs: Runs) -> dict[str, list[Records]]:
    """Runs that differ by their seed alone, under one name: "quads-seed0" and "quads-seed1" are "quads"."""
    groups: dict[str, list[Records]] = {}
    for name, records in runs.items():
        groups.setdefault(group_of(name), []).append(records)
    return groups


def group_of(name: str) -> str:
    """A run folder's name without its seed."""
    return re.sub(r"-seed\d+$", "", name)


def median(values: Sequence[float]) -> float:
    """Middle value, 0 for none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _panel(axis: Axes, groups: Mapping[str, Sequence[Records]], metric: str, log: bool) -> None:
    for color, (name, seeds) in zip(COLORS, groups.items(), strict=False):
        steps, values = _aligned(seeds, metric)
        if not len(steps):
            continue
        smooth = _running_mean(values, 1 if metric.startswith("eval/") else SMOOTH)
        axis.plot(steps, smooth.mean(0), color=color, linewidth=2, label=name)
        if len(seeds) > 1:
            axis.fill_between(steps, smooth.min(0), smooth.max(0), color=color, alpha=0.2, linewidth=0)
        else:
            axis.plot(steps, values[0], color=color, alpha=0.35, linewidth=1)
    lines = [np.asarray(line.get_ydata()) for line in axis.get_lines()]
    if log and lines and all((line > 0).all() for line in lines):
        axis.set_yscale("log")
    else:
        axis.ticklabel_format(useOffset=False, axis="y")
    axis.xaxis.set_major_locator(MaxNLocator(integer=True))
    axis.set_xlabel("step")


def _aligned(seeds: Sequence[Records], metric: str) -> tuple[Any, Any]:
    """Steps that every seed has reached, and the values, (seeds, steps)."""
    by_step = [{r["step"] + 1: r[metric] for r in records if metric in r} for records in seeds]
    steps = sorted(set.intersection(*map(set, by_step)))
    return np.array(steps), np.array([[values[s] for s in steps] for values in by_step], dtype=float)


def _running_mean(values: Any, width: int) -> Any:
    """Mean of each value and the `width` - 1 before it, along the last dimension."""
    windows = [values[:, max(0, i + 1 - width) : i + 1].mean(1) for i in range(values.shape[1])]
    return np.stack(windows, 1)
