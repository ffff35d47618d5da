"""Allocated memory of learner and embedded engine on a GPU, next to what `lowbitrl plan --size` says.

python benchmarks/plan_memory.py --out results/plan-memory/h200.json

Random weights of a config's shape; two updates of two micro-batches of random tokens, so that the second update meets
the optimizer's states and its second micro-batch the first one's gradients.
"""

from __future__ import annotations

import argparse
import gc
import json
from pathlib import Path
from typing import Any

import torch
import transformers

from lowbitrl.config import unnamed_run
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.runs import environment
from lowbitrl.sizing import Estimate, SizeRequest, estimate, shape_of
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig, TrainingBatch

BASE: dict[str, Any] = {
    "vocab_size": 32768,
    "hidden_size": 1024,
    "num_hidden_layers": 8,
    "num_attention_heads": 16,
    "num_key_value_heads": 4,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": 2,
}
SHAPES: dict[str, dict[str, Any]] = {
    "dense": {"model_type": "llama", "intermediate_size": 4096, "tie_word_embeddings": True},
    "moe": {
        "model_type": "qwen3_moe",
        "intermediate_size": 4096,
        "moe_intermediate_size": 512,
        "num_experts": 16,
        "num_experts_per_tok": 4,
        "norm_topk_prob": True,
        "tie_word_embeddings": False,
    },
}
TOKENS, LENGTH = 4096, 512


def main() -> None:
    """Each shape in BF16 and NVFP4, with and without gradient checkpointing."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, required=True)
    out = parser.parse_args().out
    rows = []
    for shape in SHAPES:
        for rollout in ("bf16", "nvfp4", "fp8"):
            for checkpointing in (False, True):
                rows.append(measure(shape, rollout, checkpointing))
                print(json.dumps(rows[-1]), flush=True)
    result = {"rows": rows, "shapes": {n: BASE | s for n, s in SHAPES.items()}, "tokens": TOKENS}
    result["environment"] = environment(torch.device("cuda"))
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n")


def build(shape: str) -> Any:
    """The shape with random weights, on the GPU."""
    config = transformers.AutoConfig.for_model(**(BASE | SHAPES[shape]))
    with torch.device("cuda"):
        return transformers.AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def measure(shape: str, rollout: str, checkpointing: bool) -> dict[str, Any]:
    """Bytes, [allocated, planned]: of a version, of the learner at rest and at its peak, of the engine."""
    gc.collect()
    torch.cuda.empty_cache()
    start = torch.cuda.memory_allocated()
    learner = build(shape)
    plan = prepare(learner, Recipe(rollout=rollout, learner="weights"), "learner")
    trainer = Trainer(
        learner,
        TrainerConfig(micro_batch_tokens=TOKENS, gradient_checkpointing=checkpointing),
        ObjectiveConfig(name="grpo"),
        OptimizerConfig(),
    )
    generator = torch.Generator().manual_seed(0)
    draw = lambda n: torch.randint(5, 30000, (n,), generator=generator).tolist()  # noqa: E731
    count = 2 * TOKENS // LENGTH
    responses = [draw(LENGTH - 8) for _ in range(count)]
    batch = TrainingBatch.build(
        [draw(8) for _ in range(count)], responses, [[-1.0] * len(r) for r in responses], torch.randn(count)
    )
    trainer.update(batch, 0)
    published = publish(learner, 1)
    gc.collect()
    rest = torch.cuda.memory_allocated() - start
    torch.cuda.reset_peak_memory_stats()
    trainer.update(batch, 1)
    peak = torch.cuda.max_memory_allocated() - start
    shipped = sum(tensor.nbytes for tensor in published.tensors.values())
    before = torch.cuda.memory_allocated()
    model = build(shape)
    prepare(model, plan, "rollout")
    engine = EmbeddedEngine(model)
    gc.collect()
    served = torch.cuda.memory_allocated() - before
    del engine, model, trainer, learner, published
    sized = planned(shape, plan, checkpointing)
    passing = ("gradients", "activations of a micro-batch", "logits of a chunk")
    return {
        "shape": shape,
        "rollout": rollout,
        "checkpointing": checkpointing,
        "published": [shipped, sized.published],
        "learner at rest": [rest, sum(item.bytes for item in sized.learner if item.name not in passing)],
        "learner peak": [peak, Estimate.total(sized.learner)],
        "engine": [served, sized.served],
    }


def planned(shape: str, plan: Any, checkpointing: bool) -> Estimate:
    """What the plan says of the same."""
    settings = {"micro_batch_tokens": TOKENS, "gradient_checkpointing": str(checkpointing).lower()}
    config = unnamed_run([f"--trainer.{key}={value}" for key, value in settings.items()])
    config_of = transformers.AutoConfig.for_model(**(BASE | SHAPES[shape]))
    with torch.device("meta"):
        skeleton = transformers.AutoModelForCausalLM.from_config(config_of, dtype=torch.bfloat16)
    return estimate(skeleton, shape_of(skeleton, shape), plan, SizeRequest.of(config=config))


if __name__ == "__main__":
    main()
