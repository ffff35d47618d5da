"""The tables of a diagnosis as rows of cells, from diagnosis.json and from nothing else."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from lowbitrl.diagnose.amplification import first_layer
from lowbitrl.diagnose.page import Cell

Diagnosis = Mapping[str, Any]
TOTALS = {
    "mean": "mean |d|, nats",
    "p99": "99th percentile of |d|",
    "max": "largest |d|",
    "k3": "k3 KL(rollout || learner)",
    "token_mult_prob_error": "mean exp|d| (alarm: 1.05)",
    "outside": "tokens with ratio outside 1 +- 0.2",
    "effective_share": "effective sample size, of sequences",
}


def headline(found: Diagnosis) -> list[tuple[str, str, str]]:
    """The figures that a reader wants first: what, how much, what it means."""
    total, floor = found["mismatch"]["own"]["total"]["mean"], found["floor"]
    chosen = _chosen(found)
    tokens, responses = found["sampled"]["tokens"], found["sampled"]["responses"]
    return [
        (
            "Mismatch of this recipe",
            f"{total[0]:.3f} nats",
            f"mean |d|, 95% {total[1]:.3f} to {total[2]:.3f}",
        ),
        ("Floor", f"{floor[0]:.3f} nats", "two BF16 engines on the same tokens"),
        (
            "Recommended",
            f"{chosen['mean'][0]:.3f} nats",
            f"{_times(chosen['mean'][0], floor[0])}, {100 * chosen['extra_work']:.0f}% more activation work",
        ),
        ("Faults", str(len(found["faults"])), f"on {tokens} tokens of {responses} responses"),
    ]


def _chosen(found: Diagnosis) -> Diagnosis:
    return next(c for c in found["candidates"] if c["name"] == found["recommendation"]["name"])


def _times(mean: float, floor: float) -> str:
    return f"{mean / floor:.1f}x the floor" if floor else "the floor is zero"


def total_rows(mismatch: Diagnosis) -> list[dict[str, Cell]]:
    """One row a figure, a column a learner."""
    columns = {"own": "this recipe", "naive": "BF16 learner"}
    return [
        {"figure": words} | {columns[name]: found["total"][key] for name, found in mismatch.items()}
        for key, words in TOTALS.items()
    ]


def term_rows(mismatch: Diagnosis) -> list[dict[str, Cell]]:
    """One row a term and learner: share of the squared total, mean, mean size."""
    who = {"own": "this recipe", "naive": "BF16"}
    return [
        {
            "learner": who[name],
            "term": term,
            "share of squared total": row["share"],
            "mean": row["mean"],
            "mean size": row["mean_abs"],
        }
        for name, found in mismatch.items()
        for term, row in found["terms"].items()
    ]


def matrix(found: Diagnosis) -> list[dict[str, Cell]]:
    """Learners down, rollouts across: plain precisions from the grid, residuals from the candidates."""
    rows: dict[str, dict[str, Cell]] = {}
    for cell in found["grid"]:
        rows.setdefault(cell["learner"], {"learner": cell["learner"]})[cell["rollout"]] = cell["mean"]
    for c in found["candidates"]:
        if c["residual"] and c["own"]:
            name = candidate_line(c)
            rows.setdefault(name, {"learner": name})[f"+ {c['residual']:g}"] = c["mean"][0]
    return list(rows.values())


def candidate_line(c: Diagnosis) -> str:
    """The line of figure and table that a candidate's residual fraction runs along."""
    if c["everywhere"]:
        return f"{c['learner']}, at every site"
    scoped = c["scope"] == "token" and c["learner"] != "full"
    return f"{c['learner']}, channels per token" if scoped else c["learner"]


def candidate_rows(found: Diagnosis) -> list[dict[str, Cell]]:
    """One row a recipe, closest first."""
    floor = found["floor"][0]
    return [
        {
            "recipe": c["name"],
            "mean |d|": c["mean"],
            "99th percentile": c["p99"],
            "times the floor": c["mean"][0] / floor if floor else None,
            "extra work, %": 100 * c["extra_work"],
        }
        for c in sorted(found["candidates"], key=lambda c: c["mean"][0])
    ]


def amplification_rows(rows: Sequence[Diagnosis]) -> list[dict[str, Cell]]:
    """Nats moved, the first layer whose output moved a hundred times the noise, and the last layer's move."""
    return [
        {
            "rollout": r["rollout"],
            "noise": r["noise"],
            "nats moved": r["moved"],
            "starts at layer": first_layer(r["layers"], r["noise"]),
            "last layer moved": r["layers"][-1],
        }
        for r in rows
    ]


def layer_rows(rows: Sequence[Diagnosis]) -> list[dict[str, Cell]]:
    """Relative errors of every block's output, and the L2 between the sides at both ends; the rest is in the JSON."""
    return [{"block": r["block"]} | {k: v for k, v in r.items() if _shown(k)} for r in rows]


def _shown(key: str) -> bool:
    return key.endswith(", output") or key.endswith(
        ("learner against rollout, input L2", "rollout, output L2")
    )
