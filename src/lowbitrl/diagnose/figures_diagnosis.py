"""Figures of a diagnosis, drawn from diagnosis.json and from nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullFormatter

from lowbitrl.diagnose.figures import COLORS, save
from lowbitrl.diagnose.rows import Diagnosis, candidate_line

FIRST_ERROR = "rollout against bf16, output"


def diagnosis_figures(found: Diagnosis, folder: Path) -> dict[str, Path]:
    """Every figure that `found` has the numbers for, by name, written into `folder`."""
    draws = {
        "terms": (lambda: terms(found["mismatch"]), True),
        "candidates": (lambda: candidates(found["candidates"], found["floor"]), True),
        "amplification": (lambda: amplification(found["amplification"]), bool(found["amplification"])),
        "layers": (lambda: layers(found["layers"]), bool(found["layers"])),
        "channels": (lambda: channels(found["channels"]), bool(found["channels"])),
        "keep": (lambda: keep(found["keep"]), bool(found["keep"])),
        "positions": (lambda: positions(found["positions"]), True),
    }
    return {name: save(draw, folder / f"{name}.png") for name, (draw, wanted) in draws.items() if wanted}


def terms(mismatch: Diagnosis) -> Figure:
    """Mean size of every term with its interval, for the recipe's learner and for a BF16 one."""
    figure, axes = plt.subplots(1, len(mismatch), figsize=(11, 3.2), constrained_layout=True, squeeze=False)
    for axis, (name, found) in zip(axes.flat, mismatch.items(), strict=True):
        rows = found["terms"]
        for i, (term, row) in enumerate(rows.items()):
            _bar(axis, i, row["mean_abs"], COLORS[5] if term == "total" else COLORS[0])
        axis.set_yticks(range(len(rows)), list(rows))
        axis.invert_yaxis()
        axis.set_xlabel("mean |term|, nats")
        axis.set_title("from this recipe's learner" if name == "own" else "from a BF16 learner")
    return figure


def candidates(rows: Sequence[Diagnosis], floor: Sequence[float]) -> Figure:
    """Mismatch against the residual fraction, a line an alignment, over the floor of two BF16 engines."""
    figure, axis = plt.subplots(figsize=(10, 4.4), constrained_layout=True)
    own = [r for r in rows if r["own"]]
    for color, (name, mine) in zip(COLORS * 9, _lines(own).items(), strict=False):
        values = np.array([r["mean"] for r in mine])
        errors = np.abs(values[:, 1:].T - values[:, 0])
        at = [r["residual"] for r in mine]
        axis.errorbar(at, values[:, 0], errors, color=color, marker="o", capsize=3, label=name)
    for color, marker, row in zip(
        COLORS[::-1], "sD^vPX*" * 9, [r for r in rows if not r["own"]], strict=False
    ):
        axis.plot(row["residual"], row["mean"][0], marker, color=color, label=row["name"], markersize=8)
    if floor[0] > 0:
        axis.axhline(floor[0], color=COLORS[5], linestyle="--", label="floor: two BF16 engines")
        _plain_log(axis)
    axis.set_xlabel("residual: share of channels with a second FP4 pass")
    axis.set_ylabel("mean |log p learner - log p rollout|, nats")
    figure.legend(fontsize=8, loc="outside right upper")
    return figure


def _plain_log(axis: Axes) -> None:
    """A logarithmic axis labelled 0.05, 0.1, 0.2, ... rather than by powers."""
    axis.set_yscale("log")
    axis.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.yaxis.set_minor_formatter(NullFormatter())


def _lines(rows: Sequence[Diagnosis]) -> dict[str, list[Diagnosis]]:
    """Candidates by the line they are on, in the order of their fractions.

    With no residual or a whole one there is nothing to scope, so lines of one learner share these points; a
    line of its own sites shares the one without any.
    """
    lines = {}
    for name, first in {candidate_line(r): r for r in rows}.items():
        kin = [r for r in rows if r["learner"] == first["learner"]]
        shared = [r for r in kin if not r["residual"] or (r["residual"] == 1 and not first["everywhere"])]
        shared = [r for r in shared if not r["everywhere"] and candidate_line(r) != name]
        mine = [r for r in kin if candidate_line(r) == name]
        lines[name] = sorted([*mine, *shared], key=lambda r: r["residual"])
    return lines


def amplification(rows: Sequence[Diagnosis]) -> Figure:
    """Nats moved against the noise, and how a noise of the smallest size grows from layer to layer."""
    figure, (left, right) = plt.subplots(1, 2, figsize=(12, 4), constrained_layout=True)
    smallest = min(r["noise"] for r in rows)
    for color, name in zip(COLORS, dict.fromkeys(r["rollout"] for r in rows), strict=False):
        mine = [r for r in rows if r["rollout"] == name]
        moved = [max(r["moved"][0], 1e-6) for r in mine]
        left.plot([r["noise"] for r in mine], moved, color=color, marker="o", label=name)
        growth = next(r["layers"] for r in mine if r["noise"] == smallest)
        right.plot(range(len(growth)), np.maximum(growth, 1e-9), color=color, label=name)
    for axis in (left, right):
        axis.set_yscale("log")
    left.set_xscale("log")
    left.set(xlabel="relative noise on the embeddings", ylabel="nats moved, mean")
    right.set(
        xlabel="decoder layer", ylabel="relative L2 of the output's change", title=f"noise {smallest:g}"
    )
    left.legend(fontsize=8)
    return figure


def layers(rows: Sequence[Diagnosis]) -> Figure:
    """Relative error of every block's output: the rollout's against BF16, and between the two sides."""
    kinds = dict.fromkeys(row["block"].rpartition(".")[2] for row in rows)
    figures = [
        k.removesuffix(", output") for k in rows[0] if k.endswith("rollout, output") or k == FIRST_ERROR
    ]
    figure, axes = plt.subplots(
        1, len(kinds), figsize=(6 * len(kinds), 3.8), constrained_layout=True, squeeze=False
    )
    for axis, kind in zip(axes.flat, kinds, strict=True):
        mine = [row for row in rows if row["block"].endswith(f".{kind}")]
        for color, what in zip(COLORS, figures, strict=False):
            axis.plot([max(row[f"{what}, output"], 1e-9) for row in mine], color=color, label=what)
        axis.set(xlabel="decoder layer", title=f"{kind}: output", ylabel="relative error")
        axis.set_yscale("log")
    axes.flat[0].legend(fontsize=8)
    return figure


def channels(found: Diagnosis) -> Figure:
    """The worst site: |Q(X) - X| over tokens and channels, channel scores, and energy captured against k."""
    worst = found["worst"]
    figure, (left, middle, right) = plt.subplots(
        1, 3, figsize=(13, 3.8), constrained_layout=True, width_ratios=(2, 1, 1)
    )
    heat = np.log10(np.maximum(np.array(worst["heat"]), 1e-6))
    image = left.imshow(heat, aspect="auto", cmap="magma", interpolation="nearest")
    figure.colorbar(image, ax=left, label="log10 |Q(X) - X|")
    left.set(xlabel="channels (bins)", ylabel="tokens", title=worst["site"])
    middle.plot(worst["k"], worst["scores"], color=COLORS[0])
    middle.set(xlabel="channels, worst first", title="score: L2 of a column")
    right.plot(
        worst["k"], worst["energy"], color=COLORS[1], label=f"{worst['site'].rpartition('.')[2]}, worst"
    )
    _typical(right, found["sites"])
    right.set(xlabel="share of channels repaired", title="error energy captured", ylim=(0, 1.02))
    right.legend(fontsize=8)
    return figure


def _typical(axis: Axes, sites: Sequence[Diagnosis]) -> None:
    keys = [k for k in sites[0] if k.startswith("energy at ")]
    at = [float(k.removeprefix("energy at ").rstrip("%")) / 100 for k in keys]
    axis.plot(
        at, np.median([[s[k] for k in keys] for s in sites], 0), "o--", color=COLORS[5], label="median site"
    )


def keep(found: Diagnosis) -> Figure:
    """What each layer alone gains in BF16, with intervals."""
    rows = found["alone"]
    figure, axis = plt.subplots(figsize=(max(6, 0.3 * len(rows) + 2), 3.6), constrained_layout=True)
    greedy = {row["layer"] for row in found["greedy"]}
    for i, row in enumerate(rows):
        value, low, high = row["gain"]
        axis.bar(i, value, color=COLORS[1] if row["layer"] in greedy else COLORS[0])
        axis.errorbar(
            i,
            value,
            [[max(value - low, 0)], [max(high - value, 0)]],
            color=plt.rcParams["text.color"],
            linewidth=1,
        )
    axis.axhline(0, color=COLORS[5], linewidth=0.8)
    axis.set_xticks(range(len(rows)), [row["layer"].rpartition(".")[2] for row in rows], fontsize=8)
    axis.set(xlabel="layer kept in BF16, alone", ylabel="nats gained")
    return figure


def positions(found: Diagnosis) -> Figure:
    """Mismatch by position, by response length, and where error tokens and repetition start."""
    figure, (left, middle, right) = plt.subplots(1, 3, figsize=(13, 3.6), constrained_layout=True)
    rows = found["by_position"]
    middles = [(row["first"] + row["last"]) / 2 for row in rows]
    values = np.array([row["mean"] for row in rows])
    left.errorbar(
        middles, values[:, 0], np.abs(values[:, 1:].T - values[:, 0]), color=COLORS[0], marker="o", capsize=3
    )
    left.set(xlabel="token of the response", ylabel="mean |d|, nats", ylim=(0, None))
    responses = found["by_length"]
    middle.scatter([r["length"] for r in responses], [r["mean"] for r in responses], s=14, color=COLORS[0])
    middle.set(xlabel="response length", ylabel="mean |d|, nats", ylim=(0, None))
    onsets = found["onsets"]
    kinds = (("error_onset", "first error token"), ("repetition_onset", "repetition"))
    for color, (key, name) in zip(COLORS, kinds, strict=False):
        right.hist([o for o in onsets[key] if o is not None], bins=12, color=color, alpha=0.7, label=name)
    right.set(xlabel="token of the response", ylabel="responses", title="where they start")
    right.yaxis.set_major_locator(MaxNLocator(integer=True))
    right.legend(fontsize=8)
    return figure


def _bar(axis: Axes, row: int, estimate: Sequence[float], color: str) -> None:
    value, low, high = estimate
    axis.barh(row, value, color=color)
    axis.errorbar(
        value,
        row,
        xerr=[[max(value - low, 0)], [max(high - value, 0)]],
        color=plt.rcParams["text.color"],
        capsize=3,
    )
