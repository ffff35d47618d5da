"""report.html: the numbers of one or more runs with their figures, in one file that works offline."""

from __future__ import annotations

import base64
import html
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lowbitrl.diagnose.figures import Records, median, time_figure, training_figure
from lowbitrl.runs import read_metrics

TAIL = 5  # steps averaged for "at the end"
STYLE = """
body{font:16px/1.5 system-ui,sans-serif;max-width:72rem;margin:2rem auto;padding:0 1rem;color:#222;background:#fff}
table{border-collapse:collapse;display:block;overflow-x:auto}td,th{padding:.3rem .8rem;border-bottom:1px solid #ccc;
text-align:right;white-space:nowrap}td:first-child,th:first-child{text-align:left}img{max-width:100%;background:#fff}
pre{overflow-x:auto;background:#8881;padding:.8rem}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#181a1b}td,th{border-color:#444}}
"""


def write_report(runs: Sequence[Path], out: Path | None = None) -> Path:
    """Write figures and report.html for `runs`, into the first run's folder unless `out` is given.

    Raises:
        FileNotFoundError: a folder holds no metrics.
    """
    records = {_name(path): read_metrics(path) for path in runs}
    for path, lines in zip(runs, records.values(), strict=True):
        if not lines:
            raise FileNotFoundError(f"{path} holds no metrics.jsonl with a complete line; give a run folder")
    folder = out or runs[0]
    (folder / "figures").mkdir(parents=True, exist_ok=True)
    figures = [
        training_figure(records, folder / "figures" / "training.png"),
        time_figure(records, folder / "figures" / "time.png"),
    ]
    table = summary(records)
    (folder / "summary.json").write_text(json.dumps(table, indent=2) + "\n")
    setup = "\n".join(f"{p}: {_setup(p)}" for p in runs)
    page = folder / "report.html"
    page.write_text(_page(table, figures, setup))
    return page


def summary(runs: Mapping[str, Records]) -> dict[str, dict[str, float]]:
    """Per run: reward at the start and end, median and last mismatch, seconds a step, tokens a second."""
    return {name: _summary([r for r in records if r["step"] >= 0]) for name, records in runs.items()}


def _summary(records: Records) -> dict[str, float]:
    rewards = [r["reward/mean"] for r in records]
    mismatch = [r["mismatch/abs_mean"] for r in records if "mismatch/abs_mean" in r]
    p99 = [r["mismatch/abs_p99"] for r in records if "mismatch/abs_p99" in r]
    seconds = [sum(v for k, v in r.items() if k in PHASES) for r in records]
    return {
        "steps": len(records),
        "reward, first": _mean(rewards[:TAIL]),
        "reward, last": _mean(rewards[-TAIL:]),
        "mismatch, median": median(mismatch),
        "mismatch p99, median": median(p99),
        "seconds a step": median(seconds),
        "rollout tokens/s": median([r["timing/tokens_per_s"] for r in records]),
    }


PHASES = frozenset(f"timing/{phase}" for phase in ("gen", "update", "publish", "eval"))


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


def _page(table: Mapping[str, Mapping[str, float]], figures: Sequence[Path], setup: str) -> str:
    columns = list(next(iter(table.values())))
    head = "".join(f"<th>{html.escape(c)}</th>" for c in ["run", *columns])
    rows = "".join(
        f"<tr><td>{html.escape(name)}</td>{''.join(f'<td>{row[c]:.4g}</td>' for c in columns)}</tr>"
        for name, row in table.items()
    )
    images = "".join(f'<p><img alt="{f.stem}" src="data:image/png;base64,{_encode(f)}"></p>' for f in figures)
    return (
        f'<!doctype html><html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">'
        f"<title>lowbitrl report</title><style>{STYLE}</style><h1>lowbitrl report</h1>"
        f"<table><tr>{head}</tr>{rows}</table>"
        f"<p>Rewards are means over the first and last {TAIL} steps; a mismatch is the mean of "
        f"|log p learner - log p rollout| over a step's tokens, in nats.</p>{images}"
        f"<h2>Set-up</h2><pre>{html.escape(setup)}</pre></html>\n"
    )


def _encode(path: Path) -> str:
    return base64.b64encode(path.read_bytes()).decode()
