"""Mismatch of learner alignments against rollout precisions, on the same sampled tokens.

A plain NVFP4 W4A4 engine samples; every column is a rollout arithmetic and every row a learner
alignment that scores those tokens; a cell is the mean of |log p learner - log p rollout|. Learner
and rollout run different attention implementations, so that the corner bf16/bf16 shows what two
engines differ by anyway.

    python benchmarks/mismatch_table.py --out results/mismatch-smollm2
"""

from __future__ import annotations

import argparse
import json
import time
from dataclasses import asdict
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import torch

from lowbitrl.diagnose import compare
from lowbitrl.diagnose.mismatch import score
from lowbitrl.engines import pick_device
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.runs import environment
from lowbitrl.tasks import TaskConfig, make_task

FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1.0)
PLAIN = {"bf16": "bf16", "w4a16": "nvfp4-w4a16", "w16a4": "nvfp4-w16a4", "w4a4": "nvfp4"}
TASK = TaskConfig(name="chain_sum", options={"min_terms": 2, "max_terms": 3}, scorer="last-number")


def columns(full: bool) -> dict[str, Recipe]:
    """Rollout recipes by column name; `full` chooses residual channels per token, as both sides must."""
    scope = "token" if full else "batch"
    residual = {f"w4a4 + {f:g}": Recipe(rollout="nvfp4", residual=f, residual_scope=scope) for f in FRACTIONS}
    return {name: Recipe(rollout=precision) for name, precision in PLAIN.items()} | residual


def learners() -> dict[str, Recipe]:
    """Learner recipes by row name. "full" has a row a residual fraction: the same on both sides."""
    return {
        "bf16": Recipe(rollout="nvfp4", learner="bf16"),
        "weights": Recipe(rollout="nvfp4", learner="weights"),
        "full": Recipe(rollout="nvfp4", learner="full"),
    } | {f"full + {f:g}": Recipe(rollout="nvfp4", learner="full", residual=f) for f in FRACTIONS}


def main() -> None:
    """Sample, score every column and row, write table.json, table.md and table.png."""
    arguments = parse()
    torch.manual_seed(arguments.seed)
    device = pick_device(arguments.device)
    started = time.perf_counter()
    prompts, completions = draw(arguments, device)

    def scored(recipe: Recipe, side: str, attention: str) -> list[torch.Tensor]:
        model, _ = load_model(arguments.model, "bfloat16", device, attn_implementation=attention)
        prepare(model, recipe, side)
        return score(model, prompts, completions, micro_batch_tokens=arguments.micro_batch_tokens)

    rollouts = {name: scored(r, "rollout", "sdpa") for name, r in columns(False).items()}
    token_scope = {name: scored(r, "rollout", "sdpa") for name, r in columns(True).items() if "+" in name}
    rows = {name: scored(r, "learner", "eager") for name, r in learners().items()}
    table = {row: {} for row in ("bf16", "weights", "weights, channels per token", "full")}
    for row, column in ((r, c) for r in table for c in rollouts):
        both = row == "full" and "+" in column
        ours = rows[column.replace("w4a4", "full") if both else row.partition(",")[0]]
        per_token = "+" in column and row not in ("bf16", "weights")
        theirs = (token_scope if per_token else rollouts)[column]
        table[row][column] = asdict(compare(ours, theirs))
    setup = vars(arguments) | {"out": str(arguments.out), "device": str(device)}
    setup |= {
        "seconds": round(time.perf_counter() - started, 1),
        "tokens": sum(len(c.token_ids) for c in completions),
    }
    write(arguments.out, table, setup | {"environment": environment(device)})


def draw(arguments: argparse.Namespace, device: torch.device) -> tuple[list, list]:
    """Prompts and completions of a plain NVFP4 W4A4 engine."""
    model, tokenizer = load_model(arguments.model, "bfloat16", device)
    prepare(model, Recipe(rollout="nvfp4"), "rollout")
    task = make_task(TASK)
    prompts = [task.encode(tokenizer, p) for p in task.prompts("train", 0, arguments.prompts)]
    sampling = Sampling(max_tokens=arguments.max_tokens)
    return prompts, EmbeddedEngine(model).generate(prompts, arguments.samples, sampling)


def write(out: Path, table: dict, setup: dict) -> None:
    """The folder of one claim: numbers, a table to read, a picture."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "table.json").write_text(json.dumps({"setup": setup, "table": table}, indent=2) + "\n")
    names = list(next(iter(table.values())))
    lines = ["| learner \\ rollout | " + " | ".join(names) + " |", "|---|" + "---|" * len(names)]
    lines += [
        f"| {row} | " + " | ".join(f"{cells[n]['mean']:.3f}" for n in names) + " |"
        for row, cells in table.items()
    ]
    (out / "table.md").write_text("\n".join(lines) + "\n")
    print("\n".join(lines))
    print(json.dumps(setup))
    figure, axis = plt.subplots(figsize=(9, 3.6), constrained_layout=True)
    for row, cells in table.items():
        axis.plot(names, [cells[n]["mean"] for n in names], marker="o", label=f"learner {row}")
    axis.set_yscale("log")
    axis.set_ylabel("mean |mismatch|, nats")
    axis.set_xlabel("rollout")
    axis.legend(frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    figure.savefig(out / "table.png", dpi=130)


def parse() -> argparse.Namespace:
    """Defaults are for two CPU cores; a GPU takes --prompts 64 --samples 8."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--prompts", type=int, default=8)
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=32)
    parser.add_argument("--micro-batch-tokens", type=int, default=8192)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=Path("results/mismatch-smollm2"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
