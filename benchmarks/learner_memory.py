"""Peak memory of scoring and training on one micro-batch, against a (tokens x vocabulary) fp32 matrix.

python benchmarks/learner_memory.py --tokens 32768
"""

from __future__ import annotations

import argparse
import json
import resource
from pathlib import Path

import torch

from lowbitrl.engines import pick_device
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.runs import environment
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig, TrainingBatch

GIB = 2**30


def main() -> None:
    """One update on a micro-batch of `--tokens` tokens, nearly all of them responses."""
    arguments = parse()
    device = pick_device(arguments.device)
    model, _ = load_model(arguments.model, "bfloat16", device)
    prepare(model, Recipe(rollout="nvfp4", learner="weights"), "learner")
    trainer = Trainer(
        model,
        TrainerConfig(
            micro_batch_tokens=arguments.tokens, gradient_checkpointing=True, logprob_chunk=arguments.chunk
        ),
        ObjectiveConfig(name="grpo"),
        OptimizerConfig(),
    )
    rows = arguments.tokens // arguments.length
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(5, 40000, (n,), generator=generator).tolist()  # noqa: E731
    responses = [draw(arguments.length - 8) for _ in range(rows)]
    batch = TrainingBatch.build(
        [draw(8) for _ in range(rows)], responses, [[-1.0] * len(r) for r in responses], torch.randn(rows)
    )
    before = peak(device)
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated() / GIB
    trainer.update(batch, 0)
    matrix = arguments.tokens * model.config.vocab_size * 4 / GIB
    result = {
        "tokens": arguments.tokens,
        "vocabulary": model.config.vocab_size,
        "fp32 matrix of tokens x vocabulary, GiB": round(matrix, 2),
        "before, GiB": round(before, 2),
        "peak, GiB": round(peak(device), 2),
        "peak over start, GiB": round(peak(device) - before, 2),
        "setup": {k: str(v) for k, v in vars(arguments).items()},
        "environment": environment(device),
    }
    print(json.dumps(result, indent=2))
    if arguments.out:
        arguments.out.parent.mkdir(parents=True, exist_ok=True)
        arguments.out.write_text(json.dumps(result, indent=2) + "\n")


def peak(device: torch.device) -> float:
    """Peak GiB so far: of the allocator on CUDA, of the process elsewhere."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated() / GIB
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / GIB


def parse() -> argparse.Namespace:
    """`--length` tokens a sequence."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--tokens", type=int, default=32768)
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--chunk", type=int, default=1024)
    parser.add_argument("--out", type=Path)
    return parser.parse_args()


if __name__ == "__main__":
    main()
