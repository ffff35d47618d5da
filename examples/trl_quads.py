"""TRL's trainer with 4-bit rollouts: sums of two numbers, learned from samples of an NVFP4 policy.

    pip install "lowbitrl[trl,demo]"
    python examples/trl_quads.py --steps 20                        # QUADS on SmolLM2-135M, on a CPU: minutes
    python examples/trl_quads.py --steps 20 --learner bf16         # the same without alignment
    python examples/trl_quads.py --learner full --residual 0       # QaRL: the learner in the rollout's arithmetic

Watch `mismatch/abs_mean`: nats between what the learner and the sampler say of the sampled tokens.
"""

from __future__ import annotations

import argparse
import random
import re

from datasets import Dataset
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbitrl.integrations.trl import LowBitGRPOTrainer
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe
from trl import GRPOConfig


def sums(count: int, seed: int = 0) -> Dataset:
    """Prompts "What is 3 + 9 ? Answer : " with their answers."""
    pairs = random.Random(seed)
    rows = [(pairs.randint(0, 49), pairs.randint(0, 49)) for _ in range(count)]
    return Dataset.from_list([{"prompt": f"What is {a} + {b} ? Answer :", "answer": a + b} for a, b in rows])


def closeness(completions: list[str], answer: list[int], **_: object) -> list[float]:
    """1 for the right number, less the further off it is, 0 for none: a group's rewards seldom all agree."""
    found = [re.search(r"\d+", text) for text in completions]
    return [1 / (1 + abs(int(m[0]) - a)) if m else 0.0 for m, a in zip(found, answer, strict=True)]


def train(
    model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, recipe: Recipe, config: GRPOConfig
) -> LowBitGRPOTrainer:
    """Train `model` and return the trainer; its `state.log_history` holds the metrics."""
    trainer = LowBitGRPOTrainer(
        model,
        recipe=recipe,
        objective="tbpo",
        args=config,
        reward_funcs=closeness,
        train_dataset=sums(256),
        processing_class=tokenizer,
    )
    trainer.train()
    return trainer


def main(arguments: list[str] | None = None) -> LowBitGRPOTrainer:
    """Parse, train, and say how far learner and sampler were apart."""
    parser = argparse.ArgumentParser(description="GRPO with low-bit rollouts in TRL")
    parser.add_argument("--model", default="demo", help="checkpoint folder, hub id, or demo")
    parser.add_argument("--rollout", default="nvfp4", help="precision of the sampler")
    parser.add_argument("--learner", default="weights", choices=["bf16", "weights", "full"])
    parser.add_argument(
        "--residual", type=float, default=0.5, help="share of channels repaired, FP4 activations only"
    )
    parser.add_argument("--steps", type=int, default=10)
    parser.add_argument("--out", default="runs/trl")
    chosen = parser.parse_args(arguments)
    config = GRPOConfig(
        output_dir=chosen.out,
        max_steps=chosen.steps,
        per_device_train_batch_size=16,
        num_generations=8,
        gradient_accumulation_steps=2,
        max_completion_length=8,
        learning_rate=1e-5,
        lr_scheduler_type="constant",
        bf16=False,  # no autocast: the model computes in the dtype it has, as the rollout does
        router_aux_loss_coef=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to=[],
    )
    model, tokenizer = load_model(chosen.model)
    recipe = Recipe(rollout=chosen.rollout, learner=chosen.learner, residual=chosen.residual)
    trainer = train(model, tokenizer, recipe, config)
    gaps = [row["mismatch/abs_mean"] for row in trainer.state.log_history if "mismatch/abs_mean" in row]
    print(
        f"{chosen.rollout}, learner {chosen.learner}: mean |learner - sampler| {sum(gaps) / len(gaps):.2g} nats"
    )
    return trainer


if __name__ == "__main__":
    main()
