"""diagnosis.json, its figures and its report.html; the same tables as text for a terminal."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbitrl.diagnose import page
from lowbitrl.diagnose.figures_diagnosis import diagnosis_figures
from lowbitrl.diagnose.rows import (
    Diagnosis,
    amplification_rows,
    candidate_rows,
    headline,
    layer_rows,
    matrix,
    term_rows,
    total_rows,
)


def write_diagnosis(found: Diagnosis, folder: Path) -> Path:
    """Write diagnosis.json, and from what it then holds recommended.toml, figures and report.html."""
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    numbers = folder / "diagnosis.json"
    numbers.write_text(json.dumps(found, indent=1) + "\n")
    return draw_diagnosis(folder)


def draw_diagnosis(folder: Path) -> Path:
    """Redraw figures and report.html from a folder's diagnosis.json.

    Raises:
        FileNotFoundError: it holds none.
    """
    found = json.loads((folder / "diagnosis.json").read_text())
    (folder / "recommended.toml").write_text(recipe_toml(found["recommendation"]["recipe"]))
    if found["keep"].get("greedy"):
        (folder / "keep.toml").write_text(recipe_toml(kept_recipe(found)))
    figures = diagnosis_figures(found, folder / "figures")
    file = folder / "report.html"
    file.write_text(page.page(_title(found), list(_parts(found, figures))))
    return file


def _title(found: Diagnosis) -> str:
    model = found.get("setup", {}).get("model")
    own = found["recipe"]
    residual = f", residual {own['residual']:g}" if own["residual"] else ""
    return f"lowbitrl diagnosis: {f'{model}, ' if model else ''}{own['rollout']}, {own['learner']}{residual}"


def _parts(found: Diagnosis, figures: Mapping[str, Path]) -> Iterator[str]:
    yield from _verdict(found)
    yield page.section(
        "How far sampler and learner are apart",
        page.table(total_rows(found["mismatch"])),
        page.text(
            "d = log p learner - log p rollout of each sampled token; 95% intervals by bootstrap over responses."
        ),
    )
    yield page.section(
        "Which part comes from where",
        page.table(term_rows(found["mismatch"])),
        page.figure(
            figures["terms"],
            "mean size of each step of the chain; signed, they add up to the total per token",
        ),
    )
    yield page.section(
        "Learner alignment x rollout precision x residual",
        page.table(matrix(found)),
        page.figure(figures["candidates"], "mean mismatch of every alignment against the residual fraction"),
        page.text("What each recipe buys: closest first; extra work is that of the second FP4 pass."),
        page.table(candidate_rows(found)),
    )
    if found.get("routing"):
        yield page.section(
            "Routing",
            page.text(
                "Share of the engine's experts that the learner's routers choose too, layers before replayed."
            ),
            page.table([{"router": k, "agreement": v} for k, v in found["routing"].items()]),
        )
    for name, (title, words) in MORE.items():
        if name in figures:
            yield page.section(title, page.figure(figures[name], words), *_tables(name, found))
    yield page.section(
        "Where time went", page.table([{"stage": k, "seconds": v} for k, v in found["seconds"].items()])
    )
    yield page.section("Set-up", page.code(json.dumps(found.get("setup", found["sampled"]), indent=1)))


MORE = {
    "amplification": (
        "Amplification",
        "nats moved by noise on the embeddings alone, in fp32; its growth by layer",
    ),
    "layers": (
        "Layers",
        "relative L2 of the difference of block outputs, errors accumulated through the network",
    ),
    "channels": (
        "Channels",
        "the site with the largest relative error; the share of error energy in the worst k% channels",
    ),
    "keep": (
        "Layers to keep in BF16",
        "nats gained by each layer alone, 95% intervals; those the greedy search took stand out",
    ),
    "positions": (
        "Position and length",
        "an error token has a learner probability below 2%; repetition is of an 8-gram",
    ),
}


def _verdict(found: Diagnosis) -> Iterator[str]:
    yield page.tiles(headline(found))
    faults = [f"{f['fault']}: {f['where']} ({f['evidence']})" for f in found["faults"]]
    if faults:
        yield page.callout(["Faults found; everything below measures a broken pair.", *faults], bad=True)
    chosen = found["recommendation"]
    yield page.callout([f"Use {chosen['name']}.", *chosen["reasons"]])
    yield page.code(recipe_toml(chosen["recipe"]))


def _tables(name: str, found: Diagnosis) -> list[str]:
    if name == "amplification":
        return [page.table(amplification_rows(found["amplification"]))]
    if name == "layers":
        return [page.table(layer_rows(found["layers"]))]
    if name == "channels":
        return [page.table(found["channels"]["sites"])]
    if name == "keep":
        return _keep_tables(found)
    onsets = found["positions"]["onsets"]
    shares = {k: v for k, v in onsets.items() if isinstance(v, float)}
    return [page.table([shares])]


def _keep_tables(found: Diagnosis) -> list[str]:
    kept = found["keep"]
    per_byte = [r | {"nats per MB": 1e6 * r["gain"][0] / r["bytes"]} for r in kept["alone"]]
    parts = [page.table(per_byte)]
    if not kept["greedy"]:
        return [*parts, page.text("No layer gains more than chance explains on these tokens: keep none.")]
    return [
        *parts,
        page.text("Greedily, each on top of those before:"),
        page.table(kept["greedy"]),
        page.code(recipe_toml(kept_recipe(found))),
    ]


def kept_recipe(found: Diagnosis) -> dict[str, Any]:
    """The diagnosed recipe with the layers of the greedy search in BF16."""
    return {k: v for k, v in found["recipe"].items() if v is not None} | {"keep": found["keep"]["patterns"]}


def recipe_toml(recipe: Mapping[str, Any]) -> str:
    """A recipe section as TOML."""
    lines = [f"{key} = {_toml(value)}" for key, value in recipe.items()]
    return "\n".join(["[recipe]", *lines]) + "\n"


def _toml(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{k} = {_toml(v)}" for k, v in value.items()) + " }"
    return json.dumps(list(value) if isinstance(value, tuple) else value)


def lines(found: Diagnosis) -> Iterator[str]:
    """The short form for a terminal: faults, totals, terms, table, recommendation, time."""
    yield from (f"FAULT {f['fault']}: {f['where']} ({f['evidence']})" for f in found["faults"])
    if not found["faults"]:
        yield "no fault found: plans, versions, bytes, modules and log-probabilities agree"
    for title, rows in (
        ("mismatch", total_rows(found["mismatch"])),
        ("terms", term_rows(found["mismatch"])),
        ("mean mismatch, learner against rollout", matrix(found)),
    ):
        yield ""
        yield title
        yield from _aligned(rows)
    yield ""
    yield f"Use {found['recommendation']['name']}."
    yield from (f"  {reason}" for reason in found["recommendation"]["reasons"])
    kept = found["keep"].get("greedy")
    yield (
        f"  Keep {', '.join(row['layer'] for row in kept)} in BF16."
        if kept
        else "  No layer is worth keeping in BF16."
    )
    yield ""
    yield f"{sum(found['seconds'].values()):.0f} s: " + ", ".join(
        f"{k} {v:.0f}" for k, v in found["seconds"].items()
    )


def _aligned(rows: Sequence[Mapping[str, page.Cell]]) -> Iterator[str]:
    columns = list(dict.fromkeys(key for row in rows for key in row))
    cells = [columns, *([_plain(row.get(c)) for c in columns] for row in rows)]
    widths = [max(len(line[i]) for line in cells) for i in range(len(columns))]
    for line in cells:
        yield "  " + "  ".join(cell.ljust(w) for cell, w in zip(line, widths, strict=True)).rstrip()


def _plain(value: page.Cell) -> str:
    if value is None:
        return "-"
    if isinstance(value, str):
        return value
    if isinstance(value, int | float):
        return f"{value:.4f}"
    return f"{value[0]:.4f} [{value[1]:.4f}, {value[2]:.4f}]"
