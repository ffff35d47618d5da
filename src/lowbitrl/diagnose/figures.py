"""Figures drawn from metrics.jsonl and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt  # noqa: E402  (the backend must be chosen first)
from matplotlib.axes import Axes  # noqa: E402

Records = Sequence[Mapping[str, Any]]
COLORS = ("#1f6f8b", "#c8553d", "#6a994e", "#8d6a9f", "#c9a227", "#4a4e69", "#2a9d8f", "#9d0208")


def training_figure(runs: Mapping[str, Records], path: Path) -> Path:
    """Reward, mismatch (log scale) and gradient norm against steps, one line a run."""
    figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), constrained_layout=True)
    _lines(axes[0], runs, "reward/mean", "mean reward", smooth=3)
    _lines(axes[1], runs, "mismatch/abs_mean", "|log p learner - log p rollout|, nats", log=True)
    _lines(axes[2], runs, "actor/grad_norm", "gradient norm", log=True)
    axes[0].legend(frameon=False)
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def time_figure(runs: Mapping[str, Records], path: Path) -> Path:
    """Median seconds of a step by phase, one bar a run."""
    figure, axis = plt.subplots(figsize=(7, 0.7 * len(runs) + 1.6), constrained_layout=True)
    for row, records in enumerate(runs.values()):
        left = 0.0
        for color, phase in zip(COLORS, ("gen", "update", "publish", "eval"), strict=False):
            width = median([r[f"timing/{phase}"] for r in records if f"timing/{phase}" in r])
            axis.barh(row, width, left=left, color=color, label=phase if row == 0 else None)
            left += width
    axis.set_yticks(range(len(runs)), list(runs))
    axis.set_xlabel("seconds a step (median)")
    axis.legend(frameon=False, ncols=4, loc="lower right", bbox_to_anchor=(1, 1))
    figure.savefig(path, dpi=130)
    plt.close(figure)
    return path


def median(values: Sequence[float]) -> float:
    """Middle value, 0 for none."""
    ordered = sorted(values)
    return ordered[len(ordered) // 2] if ordered else 0.0


def _lines(axis: Axes, runs: Mapping[str, Records], metric: str, label: str, log: bool = False, smooth: int = 1) -> None:
    for color, (name, records) in zip(COLORS, runs.items(), strict=False):
        points = [(r["step"] + 1, r[metric]) for r in records if r["step"] >= 0 and metric in r]
        if not points:
            continue
        steps, values = zip(*points, strict=True)
        axis.plot(steps, values, color=color, alpha=0.35 if smooth > 1 else 1.0, linewidth=1.4)
        if smooth > 1:
            axis.plot(steps, _running_mean(values, smooth), color=color, linewidth=2, label=name)
    if log and any(line.get_ydata(orig=True).min() > 0 for line in axis.get_lines()):  # type: ignore[union-attr]
        axis.set_yscale("log")
    axis.set_xlabel("step")
    axis.set_title(label, fontsize=10)
    axis.spines[["top", "right"]].set_visible(False)


def _running_mean(values: Sequence[float], width: int) -> list[float]:
    """Mean of each value and the `width` - 1 before it."""
    windows = [values[max(0, i + 1 - width) : i + 1] for i in range(len(values))]
    return [sum(window) / len(window) for window in windows]
