"""RL with vLLM's rollouts in the learner's process: mismatch, live updates, memory. For an H200 and vLLM 0.26.

    python benchmarks/vllm_training.py                 50 steps of recipes/quads.toml on SmolLM2
    python benchmarks/vllm_training.py --chain F       hold its mismatch to an engines.json of `lowbitrl diagnose`
    python benchmarks/vllm_training.py --judge T --chain F     the same for a run that was made, from its training.json,
                                                       which may have been on another machine

Every update of the engine is timed here, by the wall clock, after the device has finished. The bus limit of an update
inside one device is its bytes, read and written, over the device's copy bandwidth.
"""

from __future__ import annotations

import argparse
import csv
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch

from lowbitrl.bench.ceilings import copy_bandwidth
from lowbitrl.bench.record import Bench, merge_findings
from lowbitrl.config import load_config
from lowbitrl.loop import train
from lowbitrl.rollout.vllm.engine import VllmEngine
from lowbitrl.runs import environment

ON_CUDA = {
    "max_model_len": 256, "kv_cache_memory_bytes": 1 << 30, "gpu_memory_utilization": 0.1, "max_num_seqs": 256,
    "compilation_config": {
        "mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [16, 64, 128, 192, 256],
    },
    "kernel_config": {"enable_flashinfer_autotune": False},
}  # fmt: skip
ON_CPU = {"max_model_len": 128, "kv_cache_memory_bytes": 1 << 28, "block_size": 32}
COLUMNS = ("step", "sync/version", "reward/mean", "mismatch/abs_mean", "mismatch/abs_p99", "actor/grad_norm",
           "timing/gen", "timing/update", "timing/publish", "timing/tokens_per_s")  # fmt: skip
SETTLED = 10
"""Updates after which memory must not grow."""


def main() -> None:
    """Train, and write what the updates took beside what the run logged."""
    arguments = parse()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if arguments.judge:
        judge_steps(json.loads(arguments.judge.read_text())["steps"], arguments)
        return
    overrides = {
        "model.name": arguments.model, "out": arguments.run, "seed": 0, "trainer.steps": arguments.steps,
        "checkpoint.every": 0, "checkpoint.final": False, "evaluation.every": 0,
        "rollout.engine": "vllm", "rollout.vllm": ON_CUDA if device == "cuda" else ON_CPU,
    }  # fmt: skip
    config = load_config(arguments.recipe, arguments_of(overrides) + arguments.more)
    updates = watch_updates(device)
    folder = train(config)
    steps = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in steps if row["step"] >= 0]
    found = {"updates": updates, "steps": steps, "environment": environment(torch.device(device))}
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "training.json").write_text(json.dumps(found, indent=1))
    judge_updates(updates, arguments, device)
    judge_steps(steps, arguments)


def arguments_of(settings: dict[str, Any]) -> list[str]:
    """Settings as overrides of a command line."""
    return [
        part
        for name, value in settings.items()
        for part in (f"--{name}", value if isinstance(value, str) else _toml(value))
    ]


def _toml(value: Any) -> str:
    if isinstance(value, dict):
        return "{ " + ", ".join(f"{key} = {_toml(each)}" for key, each in value.items()) + " }"
    return json.dumps(value)


def watch_updates(device: str) -> list[dict[str, float]]:
    """From now on every update of a VllmEngine adds a row: seconds, bytes, and memory after it."""
    rows: list[dict[str, float]] = []
    update = VllmEngine.update

    def timed(self: VllmEngine, stream: Any, manifest: Any) -> None:
        tensors = list(stream)
        began = _now(device)
        update(self, tensors, manifest)
        seconds = _now(device) - began
        rows.append({"seconds": seconds, "bytes": sum(t.nbytes for _, t in tensors), **_memory(device)})

    VllmEngine.update = timed  # type: ignore[method-assign]
    return rows


def _now(device: str) -> float:
    if device == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter()


def _memory(device: str) -> dict[str, float]:
    if device == "cuda":
        return {"allocated": torch.cuda.memory_allocated(), "reserved": torch.cuda.memory_reserved()}
    import psutil

    return {"allocated": psutil.Process().memory_info().rss}


COMMAND = "python benchmarks/vllm_training.py --chain runs/chain/engines.json"


def judge_updates(updates: list[Any], arguments: argparse.Namespace, device: str) -> None:
    """Memory and time of the updates beside their goals."""
    bench = Bench("vllm", COMMAND)
    size = updates[-1]["bytes"]
    seconds = statistics.median(u["seconds"] for u in updates[1:])
    limit = 2 * size / copy_bandwidth(device)
    grown = updates[-1]["allocated"] - updates[min(SETTLED, len(updates) - 1)]["allocated"]
    bench.find(
        f"device memory allocated after update {len(updates)} over update {SETTLED + 1}, share of a version",
        grown / size, at_most=0.05,
    )  # fmt: skip
    bench.find(f"live update of {size / 1e6:.0f} MB, seconds (median)", seconds, at_most=1.0, unit="s")
    bench.find("live update, share of the bus limit", limit / seconds, at_least=0.5)
    merge_findings(arguments.out / "summary.json", bench.findings)


def judge_steps(steps: list[Any], arguments: argparse.Namespace) -> None:
    """How far the run came, and its mismatch beside the prediction; a table of its steps."""
    bench = Bench("vllm", COMMAND)
    bench.find("steps of training on vLLM's rollouts", len(steps), at_least=50)
    versions = {row["sync/version"] for row in steps}
    bench.find("versions that those steps sampled from, each its own", len(versions), at_least=len(steps))
    if arguments.chain:
        first = statistics.mean(row["mismatch/abs_mean"] for row in steps[:SETTLED])
        rows = {row["scorer"]: row for row in json.loads(arguments.chain.read_text())["rows"]}
        predicted = rows["learner"]["mean"]
        bench.find(
            f"mean |mismatch| of the first {SETTLED} steps over diagnose's {predicted:.4f}, ratio above or below 1",
            max(first / predicted, predicted / first), at_most=1.25,
        )  # fmt: skip
    merge_findings(arguments.out / "summary.json", bench.findings)
    with (arguments.out / "training.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(steps)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="demo")
    parser.add_argument("--recipe", type=Path, default=Path("recipes/quads.toml"))
    parser.add_argument("--steps", type=int, default=50)
    parser.add_argument("--run", default="runs/vllm-training")
    parser.add_argument("--chain", type=Path, help="engines.json of lowbitrl diagnose --engine vllm")
    parser.add_argument("--judge", type=Path, help="training.json of a run; none is made")
    parser.add_argument("--out", type=Path, default=Path("results/h200-vllm"))
    arguments, arguments.more = parser.parse_known_args()
    return arguments


if __name__ == "__main__":
    main()
