"""Four kinds of learners on one GPU, by the plain loop and under torchrun with one process: are three steps the same?

PYTHONPATH=src:. python benchmarks/scale_kinds.py cuda

FSDP2 on one rank shards nothing away, so every metric but the times should be the plain loop's to the bit; with
offload the CPU steps the optimizer and sums the gradient's norm. Models are tiny and random. All runs go at once:
no time is compared. What was seen goes to OUT/kinds.json; `--from OUT/kinds.json` writes its rows again.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from scale_h200 import Question, keep, lasting, torchrun, trained

from lowbitrl.runs import read_metrics
from tests import tiny_run
from tests.moe_models import tiny_moe

WEIGHTS = {"recipe": {"rollout": "nvfp4-w4a16", "residual": 0.0}}
MUON = {"optimizer": {"name": "muon", "muon_learning_rate": 1e-4, "learning_rate": 1e-4}}
KINDS: dict[str, tuple[bool, dict[str, Any]]] = {
    "quads": (False, {}),
    "moe": (True, WEIGHTS),
    "offload": (False, WEIGHTS | {"distributed": {"cpu_offload": True}}),
    "muon": (True, WEIGHTS | MUON),
}
SAID = {
    "quads": "dense, W4A4 with residual 0.5 (QUADS)",
    "moe": "experts, W4A16",
    "offload": "dense, W4A16, cpu_offload",
    "muon": "experts, W4A16, Muon",
}
SECONDS = 300


def main() -> None:
    """Run, compare, add the rows to summary.json."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("device", nargs="?", default="cuda")
    parser.add_argument("--out", type=Path, default=Path("results/h200-scale"))
    parser.add_argument("--from", dest="seen", type=Path, help="a kinds.json")
    options = parser.parse_args()
    if options.seen is None:
        with tempfile.TemporaryDirectory() as folder:
            seen = {name: differing(*runs) for name, runs in run(Path(folder), options.device).items()}
    else:
        seen = json.loads(options.seen.read_text())
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / "kinds.json").write_text(json.dumps(seen, indent=1) + "\n")
    command = "PYTHONPATH=src:. python benchmarks/scale_kinds.py cuda"
    fresh = [question(name).row(largest(found), command) for name, found in seen.items()]
    for row in keep(options.out / "summary.json", fresh):
        print(row["what"], row["figure"], row["goal"], "met" if row["met"] else "NOT met")


def run(folder: Path, device: str) -> dict[str, tuple[list[dict[str, Any]], list[dict[str, Any]]]]:
    """Metrics of each kind's steps, of the plain loop and of torchrun's."""
    started = []
    for name, (moe, sections) in KINDS.items():
        recipe = make(folder / name, device, moe, sections)
        for out, program in (("alone", [sys.executable, "-m", "lowbitrl"]), ("ranks", torchrun(1))):
            started.append(
                subprocess.Popen([*program, "train", str(recipe), "--out", str(folder / name / out)])
            )
    ended = [process.wait(SECONDS) for process in started]
    if any(ended):
        raise RuntimeError("a run failed, see its output above")
    return {
        name: (trained(read_metrics(folder / name / "alone")), trained(read_metrics(folder / name / "ranks")))
        for name in KINDS
    }


def make(folder: Path, device: str, moe: bool, sections: dict[str, Any]) -> Path:
    """A recipe of three steps, with its model and prompts beside it."""
    folder.mkdir()
    defaults = {
        "model": {"name": str(folder / "model"), "device": device},
        "rollout": {"prompts": 8, "samples": 4, "max_tokens": 16},
        "trainer": {"steps": 3, "mini_batch": 16, "micro_batch_tokens": 160},
        "optimizer": {"learning_rate": 1e-4},
        "evaluation": {"every": 0},
    }
    config = tiny_run.config(folder, "run", **(defaults | sections))
    if moe:
        tiny_moe().save_pretrained(folder / "model")
    recipe = folder / "recipe.toml"
    recipe.write_text(tiny_run.toml(config.model_dump(mode="json", exclude_none=True)))
    return recipe


def differing(alone: list[dict[str, Any]], ranks: list[dict[str, Any]]) -> dict[str, Any]:
    """The metrics that differ, step by step as [plain loop's, torchrun's], and all losses."""
    steps = list(zip(map(lasting, alone), map(lasting, ranks), strict=True))
    return {
        "differing": [{k: [a[k], b.get(k)] for k in a if a[k] != b.get(k)} for a, b in steps],
        "loss": [[a["actor/loss"], b["actor/loss"]] for a, b in steps],
    }


def largest(seen: dict[str, Any]) -> float:
    """Largest difference of a metric, in its own size."""
    pairs = [pair for step in seen["differing"] for pair in step.values()]
    return max((abs(a - b) / max(abs(a), abs(b)) for a, b in pairs), default=0.0)


def question(name: str) -> Question:
    asked = "largest relative difference of a metric to the plain loop's in three steps"
    limit = 1e-6 if name == "offload" else 0.0
    return Question(f"torchrun, 1 process, {SAID[name]}: {asked}", limit, at_most=True)


if __name__ == "__main__":
    main()
