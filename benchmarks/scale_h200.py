"""A recipe on one process and on N of torchrun: the same run? how much faster? does it survive a killed rank?

python benchmarks/scale_h200.py recipes/quads.toml --processes 2 --out results/h200-scale --trainer.steps 50

Whatever is not an option of this script goes to both runs as a setting. The batch is the recipe's in both, so
efficiency is that of strong scaling: seconds a step alone / (N * seconds a step on N), the first step left out.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import socket
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from lowbitrl.runs import PHASES, read_json, read_metrics

LOSS_DRIFT = 3e-2
EFFICIENCY = 0.7


def main() -> None:
    """Run, compare, write summary.json."""
    options, settings = parse()
    options.out.mkdir(parents=True, exist_ok=True)
    alone, several = options.out / "alone", options.out / f"ranks-{options.processes}"
    launch([sys.executable, "-m", "lowbitrl"], options, settings, alone)
    launch(torchrun(options.processes), options, settings, several)
    rows = compare(read_metrics(alone), read_metrics(several), options.processes)
    if options.kill_after:
        rows.append(survive(options, settings, several))
    environment = read_json(several / "environment.json")
    for row in rows:
        row["command"] = " ".join(["python", *sys.argv])
    (options.out / "summary.json").write_text(json.dumps(rows, indent=1) + "\n")
    (options.out / "environment.json").write_text(json.dumps(environment, indent=1) + "\n")
    for row in rows:
        print(row["what"], row["figure"], row["goal"], "met" if row["met"] else "NOT met")


def parse() -> tuple[argparse.Namespace, list[str]]:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--out", type=Path, default=Path("results/h200-scale"))
    parser.add_argument(
        "--kill-after", type=int, default=0, help="steps before one rank is killed; 0 kills none"
    )
    return parser.parse_known_args()


def torchrun(processes: int) -> list[str]:
    """The start of a command line for N processes of this machine."""
    with socket.socket() as found:
        found.bind(("localhost", 0))
        port = found.getsockname()[1]
    launcher = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(processes)]
    return [*launcher, "--master-port", str(port), "-m", "lowbitrl"]


def launch(program: list[str], options: argparse.Namespace, settings: list[str], out: Path) -> None:
    subprocess.run([*program, "train", str(options.recipe), "--out", str(out), *settings], check=True)


def compare(alone: list[dict[str, Any]], several: list[dict[str, Any]], processes: int) -> list[dict]:
    """Rows of the summary: equality of the first step, drift of three, time of the others."""
    ours, theirs = several[1:], alone[1:]
    sampled = [k for k in theirs[0] if k.startswith(("reward/", "rollout/", "mismatch/"))]
    equal = sum(ours[0][k] == theirs[0][k] for k in sampled)
    drift = max(abs(a["actor/loss"] - b["actor/loss"]) for a, b in zip(ours[:3], theirs[:3], strict=True))
    speedup = seconds(theirs) / seconds(ours)
    return [
        row("metrics of the first rollout and its scores that are equal", equal / len(sampled), 1.0),
        row("largest difference of a loss in three steps", drift, LOSS_DRIFT, smaller=True),
        row(f"seconds a step, alone over {processes} processes", speedup, EFFICIENCY * processes),
        row(f"scaling efficiency of {processes} processes", speedup / processes, EFFICIENCY),
    ]


def row(what: str, figure: float, goal: float, smaller: bool = False) -> dict[str, Any]:
    return {
        "what": what,
        "figure": round(figure, 6),
        "goal": f"{'at most' if smaller else 'at least'} {goal:g}",
        "met": figure <= goal if smaller else figure >= goal,
    }


def seconds(records: list[dict[str, Any]]) -> float:
    """Median seconds of a step, evaluation left out."""
    laps = [lap for lap in PHASES if lap != "eval"]
    return statistics.median(sum(r[f"timing/{lap}"] for lap in laps) for r in records[1:] or records)


def survive(options: argparse.Namespace, settings: list[str], whole: Path) -> dict[str, Any]:
    """Kill the last rank after some steps, resume, and compare with the run that was left alone."""
    out = options.out / "killed"
    command = [*torchrun(options.processes), "train", str(options.recipe), "--out", str(out), *settings]
    running = subprocess.Popen([*command, "--checkpoint.every", "1"])
    while running.poll() is None and len(read_metrics(out)) <= options.kill_after:
        time.sleep(0.2)
    os.kill(workers(running.pid)[-1], signal.SIGKILL)
    running.wait()
    subprocess.run([*torchrun(options.processes), "train", str(out), "--resume"], check=True)
    ours, theirs = read_metrics(out), read_metrics(whole)
    same = sum(a["actor/loss"] == b["actor/loss"] for a, b in zip(ours[1:], theirs[1:], strict=True))
    return row(
        "steps of a run whose rank was killed that equal the undisturbed run's", same / len(ours[1:]), 1.0
    )


def workers(launcher: int) -> list[int]:
    """Process ids that torchrun started."""
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(launcher)], capture_output=True, text=True)
    return sorted(map(int, listed.stdout.split()))


if __name__ == "__main__":
    main()
