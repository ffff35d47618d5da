"""Tokens a second of the embedded engine and of `model.generate`, same model, same run, alternating.

python benchmarks/rollout_speed.py --requests 64 --unique 64
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from transformers import GenerationConfig

from lowbitrl.engines import pick_device
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.runs import environment

TEXT = "Question: a farmer has {} sheep and buys {} more at the market. Explain, step by step, how many there are."


def main() -> None:
    """Measure each engine `repeats` times, in turn; print and write medians."""
    arguments = parse()
    device = pick_device(arguments.device)
    model, tokenizer = load_model(arguments.model, arguments.dtype, device)
    unique = [tokenizer(TEXT.format(10 + i, 20 + i)).input_ids for i in range(arguments.unique)]
    samples = arguments.requests // arguments.unique
    prepare(model, Recipe(rollout=arguments.rollout, residual=arguments.residual), "rollout")
    never = (model.config.vocab_size,)  # no token stops a request: both engines do the same work
    sampling = Sampling(max_tokens=arguments.tokens, stop_token_ids=never)
    engines: dict[str, Callable[[], object]] = {
        "generate": lambda: plain_generate(model, unique, samples, arguments.tokens),
        "batch": lambda: EmbeddedEngine(model, "batch").generate(unique, samples, sampling),
    }
    if not arguments.residual:
        engines["continuous"] = lambda: EmbeddedEngine(model, "continuous").generate(
            unique, samples, sampling
        )
    rates: dict[str, list[float]] = {name: [] for name in engines}
    for name, engine in engines.items():
        engine()  # warm-up
        del name
    for _ in range(arguments.repeats):
        for name, engine in engines.items():
            rates[name].append(arguments.requests * arguments.tokens / seconds(engine, device))
    medians = {name: round(statistics.median(r), 1) for name, r in rates.items()}
    result = {
        "tokens_per_second": medians,
        "all": rates,
        "prompt_tokens": len(unique[0]),
        "setup": {k: str(v) for k, v in vars(arguments).items()},
        "environment": environment(device),
    }
    print(json.dumps(medians))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def plain_generate(model, prompts: list[list[int]], samples: int, tokens: int) -> None:
    """transformers' own batched sampling of equally long prompts."""
    ids = torch.tensor(prompts, device=model.device)
    config = GenerationConfig(
        do_sample=True, top_k=0, max_new_tokens=tokens, min_new_tokens=tokens, num_return_sequences=samples,
        eos_token_id=model.config.eos_token_id, pad_token_id=model.config.pad_token_id,
    )  # fmt: skip
    model.generate(ids, attention_mask=torch.ones_like(ids), generation_config=config)


def seconds(work: Callable[[], object], device: torch.device) -> float:
    """Wall-clock seconds of one call, device work included."""
    if device.type == "cuda":
        torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    if device.type == "cuda":
        torch.cuda.synchronize()
    return time.perf_counter() - started


def parse() -> argparse.Namespace:
    """`--unique` prompts, each sampled requests / unique times."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--rollout", default="bf16")
    parser.add_argument("--residual", type=float, default=0.0)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--unique", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=32)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
