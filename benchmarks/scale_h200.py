"""A recipe on one process and on N of torchrun: the same run? how long is a step? does it survive a killed rank?

python benchmarks/scale_h200.py recipes/quads.toml --processes 2 --trainer.steps 50
python benchmarks/scale_h200.py recipes/quads.toml --processes 2 --kill-after 10 --trainer.steps 50

The first compares the plain loop with torchrun, the second kills the last rank of a run, resumes it, and compares
it with one that was left alone. Whatever is not an option of this script goes to all runs as a setting. The batch
is the recipe's everywhere, so efficiency is that of strong scaling: seconds a step of the plain loop over
N * those of N processes, a run's first step left out.

Each call replaces its own rows of OUT/summary.json. A row that no call has measured says so.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import socket
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lowbitrl.bench.record import current_commit
from lowbitrl.runs import PHASES, read_json, read_metrics

ASKED = (1, 2)
NOT_RUN = "not run"
COMMAND = " ".join(["python", *sys.argv])


@dataclass(frozen=True)
class Question:
    """One row of the summary, for a number of processes."""

    what: str
    goal: float
    at_most: bool = False

    def row(self, figure: float | None, command: str | None) -> dict[str, Any]:
        """As summary.json holds it; without a figure it is not run, so not met."""
        met = figure is not None and (figure <= self.goal if self.at_most else figure >= self.goal)
        return {
            "what": self.what,
            "figure": NOT_RUN if figure is None else float(f"{figure:.6g}"),
            "goal": f"{'at most' if self.at_most else 'at least'} {self.goal:g}",
            "met": met,
            "command": command,
        }


def questions(processes: int) -> dict[str, Question]:
    """What is asked of N processes beside the plain loop, by the part of a call that answers it."""

    def ask(what: str, goal: float, at_most: bool = False) -> Question:
        return Question(f"torchrun, {processes} process{'es' * (processes > 1)}: {what}", goal, at_most)

    return {
        "equal": ask(
            "share of the first rollout's and first scores' metrics that equal the plain loop's", 1.0
        ),
        "drift": ask("largest difference of a loss to the plain loop's in three steps", 3e-2, True),
        "efficiency": ask("scaling efficiency over the plain loop", 0.7 if processes > 1 else 0.8),
        "survived": ask("a rank killed, the run resumed: share of steps equal to an undisturbed run's", 1.0),
    }


def main() -> None:
    """Run, compare, write summary.json."""
    options, settings = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    shutil.rmtree(options.runs, ignore_errors=True)
    measure = survive if options.kill_after else compare
    figures, last = measure(options, settings)
    environment = read_json(last / "environment.json") | {"command": COMMAND, "commit": current_commit()}
    (options.out / f"environment-{last.name}.json").write_text(json.dumps(environment, indent=1) + "\n")
    for row in write(options.out / "summary.json", options.processes, figures):
        print(row["what"], row["figure"], row["goal"], "met" if row["met"] else "NOT met")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/h200-scale"))
    parser.add_argument("--runs", type=Path, default=Path("runs/scale"), help="folder of the runs; emptied")
    parser.add_argument("--kill-after", type=int, default=0, help="steps before one rank is killed")
    return parser.parse_known_args()


def write(file: Path, processes: int, figures: dict[str, float]) -> list[dict[str, Any]]:
    """The summary with these figures in it, every asked question once."""
    fresh = [questions(processes)[key].row(figure, COMMAND) for key, figure in figures.items()]
    return keep(file, fresh)


def keep(file: Path, fresh: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put rows into the summary, in place of their last measurement; what was asked and never run says so."""
    rows = {row["what"]: row for row in json.loads(file.read_text())} if file.is_file() else {}
    asked = [question.row(None, None) for count in ASKED for question in questions(count).values()]
    rows = {row["what"]: row for row in asked} | rows | {row["what"]: row for row in fresh}
    file.write_text("[\n" + ",\n".join(map(json.dumps, rows.values())) + "\n]\n")
    return list(rows.values())


def compare(options: argparse.Namespace, settings: list[str]) -> tuple[dict[str, float], Path]:
    """The plain loop, then torchrun: equality of the first step, drift of three, time of the others."""
    alone, several = options.runs / "alone", options.runs / f"ranks-{options.processes}"
    for program, out in (([sys.executable, "-m", "lowbitrl"], alone), (torchrun(options.processes), several)):
        subprocess.run([*program, "train", str(options.recipe), "--out", str(out), *settings], check=True)
        shutil.copy(out / "metrics.jsonl", options.out / f"{out.name}.jsonl")
    ours, theirs = (trained(read_metrics(out)) for out in (several, alone))
    sampled = [k for k in theirs[0] if k.startswith(("reward/", "rollout/", "mismatch/"))]
    return {
        "equal": sum(ours[0][k] == theirs[0][k] for k in sampled) / len(sampled),
        "drift": max(abs(a["actor/loss"] - b["actor/loss"]) for a, b in zip(ours[:3], theirs[:3], strict=True)),
        "efficiency": seconds(theirs) / seconds(ours) / options.processes,
    }, several  # fmt: skip


def survive(options: argparse.Namespace, settings: list[str]) -> tuple[dict[str, float], Path]:
    """Kill the last rank after some steps, resume, and compare with a run that was left alone."""
    whole, killed = options.runs / "whole", options.runs / f"killed-{options.processes}"
    start = [*torchrun(options.processes), "train", str(options.recipe), *settings, "--out"]
    subprocess.run([*start, str(whole)], check=True)
    running = subprocess.Popen([*start, str(killed), "--checkpoint.every", "1"])
    while running.poll() is None and len(trained(read_metrics(killed))) < options.kill_after:
        time.sleep(0.05)
    os.kill(last_rank(running.pid), signal.SIGKILL)
    if running.wait() == 0:
        raise RuntimeError("a run whose rank is killed must fail; see its output above")
    left = len(trained(read_metrics(killed)))
    subprocess.run([*torchrun(options.processes), "train", str(killed), "--resume"], check=True)
    shutil.copy(killed / "metrics.jsonl", options.out / f"{killed.name}.jsonl")
    ours, theirs = trained(read_metrics(killed)), trained(read_metrics(whole))
    same = [lasting(a) == lasting(b) for a, b in zip(ours, theirs, strict=True)]
    print(f"killed after step {left} of {len(ours)}; equal to the undisturbed run: {same}")
    return {"survived": sum(same) / len(same)}, killed


def torchrun(processes: int) -> list[str]:
    """The start of a command line for N processes of this machine."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*launcher, "--master-port", str(port), "-m", "lowbitrl"]


def last_rank(launcher: int) -> int:
    """Process id of the highest rank that torchrun started."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = (folder / "stat").read_text().rpartition(")")[2].split()[1]
            variables = dict(
                v.split("=", 1) for v in (folder / "environ").read_text().split("\0") if "=" in v
            )
        except OSError:
            continue
        if int(parent) == launcher and "RANK" in variables:
            found[int(variables["RANK"])] = int(folder.name)
    return found[max(found)]


def trained(records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Without the line of the start."""
    return [record for record in records if record["step"] >= 0]


def lasting(record: dict[str, Any]) -> dict[str, Any]:
    """Without wall-clock times."""
    return {key: value for key, value in record.items() if not key.startswith("timing/")}


def seconds(records: list[dict[str, Any]]) -> float:
    """Median seconds of a step, evaluation left out."""
    laps = [lap for lap in PHASES if lap != "eval"]
    return statistics.median(sum(r[f"timing/{lap}"] for lap in laps) for r in records[1:] or records)


if __name__ == "__main__":
    main()
