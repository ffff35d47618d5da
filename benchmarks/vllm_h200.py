"""All that results/h200-vllm holds, in one command and in an order of worth; about twelve minutes of a free H200.

    python benchmarks/vllm_h200.py --model M          M: SmolLM2-135M-Instruct in BF16 with its tokenizer
    python benchmarks/vllm_h200.py --model M --only decode training

    decode       Qwen3-30B-A3B's shape, seven variants, an update of its bytes: four minutes, 85 GB, nothing beside it
    training     50 steps of recipes/quads.toml with vLLM's rollouts
    chain        what diagnose predicts for it; the run is then held to it
    cases        what the engine promises, case by case

A part that fails or takes too long is said, and the next one begins; every part writes as it goes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import time
from pathlib import Path

HERE = Path(__file__).parent
OUT = Path("results/h200-vllm")
RUNS = Path("runs/h200-vllm")
CHAIN = RUNS / "chain" / "engines.json"


def commands(model: str) -> dict[str, tuple[list[str], float]]:
    """By part: a command line of Python's, and the seconds that it may take."""
    training = [str(HERE / "vllm_training.py"), "--model", model, "--out", str(OUT)]
    chain = ["-m", "lowbitrl", "diagnose", model, "--recipes", "recipes/quads.toml", "--engine", "vllm"]
    return {
        "decode": ([str(HERE / "vllm_decode.py"), "--limit", "90", "--out", str(OUT)], 420),
        "training": ([*training, "--run", str(RUNS / "run"), "--trainer.micro_batch_tokens", "8192"], 240),
        "chain": ([*chain, "--tokens", "4000", "--max-tokens", "40", "--out", str(CHAIN.parent)], 150),
        "judge": ([*training, "--judge", str(OUT / "training.json"), "--chain", str(CHAIN)], 60),
        "cases": (
            [
                str(HERE / "vllm_cases.py"),
                "--model",
                model,
                "--at-once",
                "4",
                "--limit",
                "150",
                "--out",
                str(OUT),
            ],
            360,
        ),
    }


def main() -> None:
    """Run what was asked for; exit code 1 if a part failed."""
    arguments = parse()
    failed = []
    for name, (command, limit) in commands(arguments.model).items():
        if name not in arguments.only and not (name == "judge" and "chain" in arguments.only):
            continue
        began = time.perf_counter()
        try:
            code = subprocess.run([sys.executable, *command], check=False, timeout=limit).returncode
        except subprocess.TimeoutExpired:
            code = f"no end within {limit:.0f} s"
        print(f"== {name}: {code or 'done'} after {time.perf_counter() - began:.0f} s", flush=True)
        failed += [name] if code else []
    sys.exit(bool(failed))


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parts = ["decode", "training", "chain", "cases"]
    parser.add_argument(
        "--model", required=True, help="folder of a small dense checkpoint with its tokenizer"
    )
    parser.add_argument("--only", nargs="+", choices=parts, default=parts)
    return parser.parse_args()


if __name__ == "__main__":
    main()
