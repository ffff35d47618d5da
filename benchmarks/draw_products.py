"""Figure of kernels.csv: 4-bit products beside their peers, and the expert layer, each with the limit of its bytes.

python benchmarks/draw_products.py results/h200-kernels
"""

from __future__ import annotations

import csv
import sys
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

Rows = list[dict[str, str]]
DENSE = ("w4a16 nvfp4", "w4a16 int4-g128")


def main(folder: Path) -> None:
    """Write products.png beside the rows."""
    rows = list(csv.DictReader((folder / "kernels.csv").open()))
    figure, axes = plt.subplots(1, 3, figsize=(14, 4.2))
    for at, op in zip(axes[:2], DENSE, strict=True):
        draw_dense(at, rows, op)
    draw_experts(axes[2], [r for r in rows if r["op"].startswith("experts")])
    made_by = next(r for r in rows if r["op"] in DENSE)
    figure.suptitle(f"{made_by['gpu']}, torch {made_by['torch']}, CUDA {made_by['cuda']}, cold L2")
    figure.tight_layout()
    figure.savefig(folder / "products.png", dpi=130)


def draw_dense(axes: plt.Axes, rows: Rows, op: str) -> None:
    """Microseconds against tokens, a line a backend, cuBLAS in BF16 and the limit among them."""
    plain = {tokens(r): float(r["p50"]) for r in rows if r["op"] == "bf16"}
    axes.plot(plain.keys(), plain.values(), color="black", label="cuBLAS BF16")
    own = [r for r in rows if r["op"] == op]
    for backend in dict.fromkeys(r["backend"] for r in own):
        points = {tokens(r): float(r["p50"]) for r in own if r["backend"] == backend}
        label = "ours" if backend == "auto" else backend
        axes.plot(points.keys(), points.values(), marker="o", label=label)
    limits = {tokens(r): float(r["limit"]) for r in own if r["backend"] == "auto"}
    axes.plot(
        limits.keys(), limits.values(), color="gray", linestyle=":", label="limit of bytes and operations"
    )
    axes.set(
        xscale="log", yscale="log", xlabel="tokens", ylabel="microseconds", title=f"{op}, K=4096 N=12288"
    )
    axes.legend(fontsize=7)


def draw_experts(axes: plt.Axes, rows: Rows) -> None:
    """Share of the byte limit that a layer of experts reaches, by tokens."""
    for op in dict.fromkeys(r["op"] for r in rows):
        points = {int(r["shape"].split()[0]): float(r["ratio"]) for r in rows if r["op"] == op}
        axes.plot(points.keys(), points.values(), marker="o", label=op)
    axes.axhline(0.6, color="gray", linestyle=":")
    at = sorted({int(r["shape"].split()[0]) for r in rows})
    axes.set_xscale("log")
    axes.set_xticks(at, labels=map(str, at))
    axes.minorticks_off()
    title = "Qwen3-30B-A3B experts, a layer"
    axes.set(xlabel="tokens", ylabel="share of the byte limit", ylim=(0, 1), title=title)
    axes.legend(fontsize=7)


def tokens(row: dict[str, str]) -> int:
    """Of a row whose shape is tokens x K x N."""
    return int(row["shape"].split("x")[0])


if __name__ == "__main__":
    main(Path(sys.argv[1]))
