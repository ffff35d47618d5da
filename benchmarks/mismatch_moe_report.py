"""Seeds of `mismatch_moe.py` put together: tables of means with the range over seeds, block distances, and the
mismatch by share of repaired channels.

python benchmarks/mismatch_moe_report.py runs/moe/0 runs/moe/1 runs/moe/2 --out results/mismatch-moe-smollm2
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import numpy as np

LEARNERS = ("bf16", "weights", "full")
FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1.0)
LINES = {
    ("w13", "batch"): {"color": "tab:orange"},
    ("w13", "token"): {"color": "tab:orange", "ls": "--"},
    ("every site", "batch"): {"color": "tab:blue"},
    ("every site", "token"): {"color": "tab:blue", "ls": "--"},
}


def main() -> None:
    """results.json (a list, one entry a seed), tables.md, blocks.png and fractions.png."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folders", type=Path, nargs="+")
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    seeds = [json.loads((folder / "results.json").read_text()) for folder in arguments.folders]
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "results.json").write_text(json.dumps(seeds, separators=(",", ":")) + "\n")
    parts = [*(mismatch_table(seeds, figure) for figure in ("mean", "max")), routing_table(seeds)]
    text = "\n\n".join(parts) + "\n"
    (arguments.out / "tables.md").write_text(text)
    print(text)
    draw_blocks([seed["blocks"] for seed in seeds], arguments.out / "blocks.png")
    draw_fractions([seed["table"] for seed in seeds], arguments.out / "fractions.png")


def cell(values: list[float], digits: int) -> str:
    """Mean over the seeds that have it, and smallest to largest; one seed: its figure alone."""
    if not values:
        return "-"
    mean, low, high = (f"{f(values):.{digits}f}" for f in (np.mean, min, max))
    return mean if len(values) == 1 else f"{mean} ({low}-{high})"


def mismatch_table(seeds: list[dict], figure: str) -> str:
    """Precisions and fractions down, learner alignments across."""
    lines = [
        f"{figure} |log p learner - log p rollout|, nats: mean over {len(seeds)} seeds (smallest-largest)",
        "",
        "| rollout | " + " | ".join(LEARNERS) + " |",
        "|---|" + "---|" * len(LEARNERS),
    ]
    for column in seeds[0]["table"]:
        cells = [seed["table"].get(column, {}) for seed in seeds]
        found = [[cell[row][figure] for cell in cells if row in cell] for row in LEARNERS]
        lines.append(
            f"| {column} | " + " | ".join(cell(v, 3 if figure == "mean" else 1) for v in found) + " |"
        )
    return "\n".join(lines)


def routing_table(seeds: list[dict]) -> str:
    """Total, arithmetic and routing terms, and the mean router agreement, one rollout a line."""
    lines = [
        "learner `weights`, each rollout's own tokens: mean nats",
        "",
        "| rollout | total | under the rollout's routes | routing | routers agree |",
        "|---|---|---|---|---|",
    ]
    for name in seeds[0].get("routing", {}):
        terms = [s["routing"][name] for s in seeds if name in s.get("routing", {})]
        parts = [cell([t[part]["mean"] for t in terms], 3) for part in ("total", "arithmetic", "routing")]
        parts.append(cell([t["agreement"]["routing/agreement"] for t in terms], 3))
        lines.append(f"| {name} | " + " | ".join(parts) + " |")
    return "\n".join(lines)


def draw_blocks(seeds: list[dict[str, list[dict]]], path: Path) -> None:
    """Input and output L2 by layer: a line a configuration, a band from the smallest to the largest seed."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True, sharex=True)
    for axis, end in zip(axes, ("input", "output"), strict=True):
        for name in seeds[0]:
            layers = [b["layer"] for b in seeds[0][name]]
            rows = np.array([[b[end] for b in seed[name]] for seed in seeds])
            (line,) = axis.plot(layers, rows.mean(0), marker=".", label=name)
            axis.fill_between(layers, rows.min(0), rows.max(0), color=line.get_color(), alpha=0.2, lw=0)
        axis.set_title(f"MoE {end}: mean L2 distance of a token", fontsize=10)
        axis.set_xlabel("layer")
        axis.set_yscale("log")
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("L2 distance, learner to rollout")
    axes[0].legend(frameon=False, title="learner / rollout", fontsize=8)
    figure.savefig(path, dpi=130)
    plt.close(figure)


def draw_fractions(seeds: list[dict], path: Path) -> None:
    """Mean and largest mismatch of a weight-aligned learner by repaired channels, a line a site and scope."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 4.2), constrained_layout=True, sharex=True)
    for axis, statistic in zip(axes, ("mean", "max"), strict=True):
        for (site, scope), style in LINES.items():
            # All channels are the same ones in either scope.
            shares = [(share, scope if share < 1 else "batch") for share in FRACTIONS]
            columns = ["w4a4", *(f"{site} {share:g} per {s}" for share, s in shares)]
            rows = np.array([[seed[c]["weights"][statistic] for c in columns] for seed in seeds])
            percent = [0, *(100 * share for share in FRACTIONS)]
            axis.plot(percent, rows.mean(0), marker=".", label=f"{site}, channels per {scope}", **style)
            axis.fill_between(percent, rows.min(0), rows.max(0), color=style["color"], alpha=0.15, lw=0)
        floor = np.mean([seed["bf16"]["bf16"][statistic] for seed in seeds])
        axis.axhline(floor, color="0.4", ls=":", lw=1, label="BF16 on both sides: engines alone")
        axis.set_title(f"{statistic} |log p learner - log p rollout|", fontsize=10)
        axis.set_xlabel("channels repaired, %")
        axis.set_ylim(bottom=0)
        axis.spines[["top", "right"]].set_visible(False)
    axes[0].set_ylabel("nats")
    lines = axes[0].get_legend_handles_labels()
    figure.legend(*lines, frameon=False, fontsize=8, loc="outside lower center", ncols=3)
    figure.savefig(path, dpi=130)
    plt.close(figure)


if __name__ == "__main__":
    main()
