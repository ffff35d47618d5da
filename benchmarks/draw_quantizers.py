"""Figure of kernels.csv: how near quantizers come to copying their bytes, by tokens and by weight format; and of the
table of backends: how much faster the C++ residual is than Triton's.

python benchmarks/draw_quantizers.py results/h200-kernels
"""

from __future__ import annotations

import csv
import json
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from lowbitrl.kernels.quantizer_choice import TABLE

ACTIVATION_OPS = ("fake_quantize", "quantize_residual")


def main(folder: Path) -> None:
    """Write quantizers.png beside the rows."""
    rows = list(csv.DictReader((folder / "kernels.csv").open()))
    figure, (left, right, last) = plt.subplots(1, 3, figsize=(16, 4.4))
    draw_activations(
        left, [r for r in rows if r["op"] in ACTIVATION_OPS and r["note"].startswith("residual")]
    )
    draw_weights(
        right, [r for r in rows if r["op"] == "fake_quantize" and not r["note"].startswith("residual")]
    )
    draw_backends(last, json.loads(TABLE.read_text())["rows"])
    figure.suptitle(f"{rows[0]['gpu']}, torch {rows[0]['torch']}, triton {rows[0]['triton']}")
    figure.tight_layout()
    figure.savefig(folder / "quantizers.png", dpi=130)


def draw_activations(axes: plt.Axes, rows: list[dict[str, str]]) -> None:
    """Share of copy bandwidth against tokens, a line a width and variant."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        tokens, width = row["shape"].strip("()").split(", ")
        lines.setdefault(f"K={width}, {row['note']}", []).append((int(tokens), float(row["ratio"])))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(0.7, color="gray", linestyle=":")
    axes.set(
        xscale="log",
        xlabel="tokens",
        ylabel="share of copy bandwidth",
        title=f"activations, by {backends(rows)}",
    )
    axes.legend(fontsize=7)


def draw_weights(axes: plt.Axes, rows: list[dict[str, str]]) -> None:
    """Share of copy bandwidth by format."""
    axes.barh([row["note"] for row in rows], [float(row["ratio"]) for row in rows])
    axes.axvline(0.7, color="gray", linestyle=":")
    axes.set(
        xlabel="share of copy bandwidth", title=f"QDQ of weights {rows[0]['shape']}, by {backends(rows)}"
    )


def backends(rows: list[dict[str, str]]) -> str:
    """What ran."""
    return ", ".join(sorted({row["backend"] for row in rows}))


def draw_backends(axes: plt.Axes, rows: list[dict]) -> None:
    """Triton's time over the C++ kernel's, a line an op and width."""
    lines: dict[str, list[tuple[int, float]]] = {}
    for row in rows:
        if row["op"].startswith("residual") and row["cuda"]:
            label = f"{row['op']}, K={row['width']}"
            lines.setdefault(label, []).append((row["rows"], row["triton"] / row["cuda"]))
    for label, points in lines.items():
        axes.plot(*zip(*sorted(points), strict=True), marker="o", label=label)
    axes.axhline(1.0, color="gray", linestyle=":")
    axes.set(
        xscale="log", xlabel="tokens", ylabel="Triton's time over C++'s", title="backends of the residual"
    )
    axes.legend(fontsize=7)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
