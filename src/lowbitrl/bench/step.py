"""One training step by phase, per alignment, beside the same step in BF16 of the same model.

generate -> update (forward, backward, optimizer) -> publish (encode, checksum, adopt), as ``loop`` does them, without
tasks and rewards: responses of equal length, advantages by chance. Every alignment starts from the same weights. A row
a phase and one for the step; limits are the step's BF16 operations (6 a weight and token, 4 of them backward) and, for
generating, the bytes of its decoding steps.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import LlamaForCausalLM

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer import Trainer
from lowbitrl.trainer.batch import TrainingBatch
from lowbitrl.trainer.config import ObjectiveConfig, TrainerConfig
from lowbitrl.trainer.optim import OptimizerConfig

from . import policy
from .record import Bench
from .timing import percentiles, wall_microseconds

ALIGNMENTS = {
    "bf16": Recipe(rollout="bf16"),
    "QUADS nvfp4 + residual 0.5": Recipe(rollout="nvfp4", learner="weights", residual=0.5),
    "naive nvfp4": Recipe(rollout="nvfp4", learner="bf16"),
    "weights nvfp4-w4a16": Recipe(rollout="nvfp4-w4a16", learner="weights"),
    "full nvfp4": Recipe(rollout="nvfp4", learner="full"),
}
HELD_TO_BF16, OVER_BF16 = "QUADS nvfp4 + residual 0.5", 1.08
PHASES = ("generate", "update", "publish")
SAMPLES = 2


@dataclass(frozen=True)
class Size:
    """Of a step: prompts, responses of each, tokens of either."""

    prompts: int
    samples: int
    prompt: int
    response: int

    @property
    def rows(self) -> int:
        """Responses."""
        return self.prompts * self.samples

    @property
    def tokens(self) -> int:
        """That the learner's pass sees."""
        return self.rows * (self.prompt + self.response)


SIZES = {"cuda": Size(16, 8, 64, 128), "cpu": Size(2, 2, 6, 4)}


class Policy:
    """Learner and embedded engine of one alignment."""

    def __init__(self, base: LlamaForCausalLM, recipe: Recipe, size: Size, device: str) -> None:
        learner, rollout = policy.copies(base, 2)
        plan = prepare(learner, recipe, "learner")
        prepare(rollout, plan, "rollout")
        self.size, self.asked = size, policy.prompts(device, size.prompts, size.prompt)
        self.sampling = Sampling(max_tokens=size.response, stop_token_ids=policy.no_stop(base))
        self.trainer = Trainer(
            learner, TrainerConfig(), ObjectiveConfig(name="grpo"), OptimizerConfig(learning_rate=1e-6)
        )
        self.engine = EmbeddedEngine(rollout, "graph", max_batch=size.rows)
        self.done = 0
        self.publish()

    def generate(self) -> None:
        """Sample, and make a batch of it."""
        completions = self.engine.generate(self.asked, self.size.samples, self.sampling)
        chance = torch.Generator().manual_seed(self.done)
        self.batch = TrainingBatch.build(
            [self.asked[c.prompt_index] for c in completions],
            [c.token_ids for c in completions],
            [c.rollout_logprobs for c in completions],
            torch.randn(len(completions), generator=chance),
        )

    def update(self) -> None:
        """One optimizer step on it."""
        self.trainer.update(self.batch, self.done)
        self.done += 1

    def publish(self) -> None:
        """Encode once, serve the same bytes."""
        published = publish(self.trainer.model, self.done)
        self.engine.update(published.stream(), published.manifest)


def run(bench: Bench) -> None:
    """Rows by alignment and phase; the QUADS step held to BF16's."""
    base, size = policy.build(bench.device), SIZES[bench.device]
    whole: dict[str, float] = {}
    for name, recipe in ALIGNMENTS.items():
        whole[name] = time_steps(bench, base, name, recipe, size)
        if name != "bf16" and bench.device == "cuda":
            what = f"whole step 1B, {name}, over a BF16 step"
            bench.find(what, whole[name] / whole["bf16"], at_most=OVER_BF16)


def time_steps(bench: Bench, base: LlamaForCausalLM, name: str, recipe: Recipe, size: Size) -> float:
    """Rows of one alignment; microseconds of its whole step, the median."""
    both = Policy(base, recipe, size, bench.device)
    laps = [[wall_microseconds(getattr(both, phase)) for phase in PHASES] for _ in range(1 + SAMPLES)][1:]
    model = both.trainer.model
    weights = sum(p.numel() for p in model.parameters())
    decode = policy.decode_bytes(both.engine.model, size.rows, size.prompt + size.response // 2)
    need = {
        "generate": (decode * size.response, 0),
        "update": (0, 6 * weights * size.tokens),
        "publish": (2 * policy.BF16_BYTES * weights, 0),
        "step": (decode * size.response, 6 * weights * size.tokens),
    }
    columns: dict[str, list[float]] = {phase: [lap[i] for lap in laps] for i, phase in enumerate(PHASES)}
    columns["step"] = [sum(lap) for lap in laps]
    where = f"{policy.shape_name(bench.device)}, {size.rows} rows, {size.prompt}+{size.response} tokens"
    for phase, times in columns.items():
        moved, flops = need[phase]
        bench.keep(
            f"{phase} {name}",
            where,
            percentiles(times, "warm"),
            nbytes=moved,
            flops=flops,
            backend="auto",
            note=f"{recipe.rollout} / {recipe.learner}",
        )
    return percentiles(columns["step"], "warm").p50
