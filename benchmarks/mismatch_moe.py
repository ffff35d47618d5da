"""The mismatch table on a real mixture of experts: SmolLM2 upcycled, its experts made to differ, then measured.

    upcycle    every MLP of the dense model copied to --experts experts, --top-k of them taken
    fine-tune  --tune-steps of next-token prediction on several reasoning-gym tasks at once (prompt and
               answer), so that experts and router stop being copies; how far they came is in the output
    sample     a plain NVFP4 W4A4 engine answers further prompts of those tasks
    blocks     L2 distance of every MoE block's input and output between the sides (QUADS figures 7, 4b)
    measure    every rollout precision (columns) and learner alignment (rows) scores the sampled tokens;
               residual at the paper's site (W13) and at every site, channels per batch (QUADS) and per
               token; learner with eager attention, rollout with SDPA
    routing    mismatch split in a routing and an arithmetic term, router agreement by layer

The seed is that of experts' noise, routers, fine-tuning prompts and sampling. Seeds run apart, one folder
each, and `mismatch_moe_report.py` puts them together:

    for seed in 0 1 2; do
        python benchmarks/mismatch_moe.py --seed $seed --out runs/moe/$seed
    done
    python benchmarks/mismatch_moe_report.py runs/moe/0 runs/moe/1 runs/moe/2 --out results/mismatch-moe-smollm2
"""

from __future__ import annotations

import argparse
import copy
import gc
import itertools
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from lowbitrl.diagnose import compare
from lowbitrl.diagnose.experts import block_distances, routing_term
from lowbitrl.diagnose.mismatch import score
from lowbitrl.engines import pick_device
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare, real_tokens
from lowbitrl.quant.topology import expert_stacks
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.embedded.batch import pad_left
from lowbitrl.runs import environment
from lowbitrl.tasks import Prompt, TaskConfig, completion_text, encode_prompt, make_task
from lowbitrl.trainer.batch import arrange
from lowbitrl.upcycle import upcycle

TUNED = 4  # prompts of every task in a batch of the fine-tune
FRACTIONS = (0.125, 0.25, 0.5, 0.75, 1.0)
EVERYWHERE = ("w13", "w2", "attention", "other")
TASKS = (
    "chain_sum",
    "letter_counting",
    "spell_backward",
    "number_sorting",
    "word_sorting",
    "base_conversion",
)
PLAIN = {"bf16": "bf16", "w4a16": "nvfp4-w4a16", "w16a4": "nvfp4-w16a4", "w4a4": "nvfp4"}
ROUTED = ("w4a16", "w4a4", "w13 0.5 per batch", "every site 0.5 per batch", "every site 1 per batch")
LEARNERS = {a: Recipe(rollout="nvfp4", learner=a) for a in ("bf16", "weights", "full")}


def rollouts() -> dict[str, Recipe]:
    """Rollout recipes by column name."""
    columns = {name: Recipe(rollout=precision) for name, precision in PLAIN.items()}
    for scope, fraction in itertools.product(("batch", "token"), FRACTIONS):
        w13 = Recipe(rollout="nvfp4", residual=fraction, residual_scope=scope)
        columns[f"w13 {fraction:g} per {scope}"] = w13
        every = replace(w13, residual_sites=dict.fromkeys(EVERYWHERE, fraction))
        columns[f"every site {fraction:g} per {scope}"] = every
    return columns


class Bench:
    """The tuned mixture and the settings of a run."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        self.arguments, self.device = arguments, pick_device(arguments.device)
        self.tasks = [make_task(TaskConfig(name=name, held_out=0, seed=arguments.seed)) for name in TASKS]
        self.dense, self.tokenizer = load_model(arguments.model, "float32")
        self.base = upcycle(self.dense, arguments.experts, arguments.top_k, arguments.noise, arguments.seed)

    def side(self, recipe: Recipe, side: str) -> torch.nn.Module:
        """A fresh BF16 copy wearing `recipe`; the last ones, which hold cycles, are let go first."""
        gc.collect()
        model = copy.deepcopy(self.base)
        model.set_attn_implementation("eager" if side == "learner" else "sdpa")
        prepare(model, recipe, side, keep_decoded_experts=side == "rollout")
        return model

    def tune(self) -> list[float]:
        """Fine-tune with fp32 weights (TF32 products on a GPU), then cast to BF16; returns the loss of every step."""
        precision = torch.get_float32_matmul_precision()
        torch.set_float32_matmul_precision("high")
        model = self.base.to(self.device).train()
        model.set_experts_implementation(self.arguments.tune_experts)
        optimizer = torch.optim.AdamW(model.parameters(), lr=self.arguments.tune_lr, betas=(0.9, 0.95))
        losses = []
        for prompts, answers in itertools.islice(self._texts(), self.arguments.tune_steps):
            batch = arrange([p[:1] for p in prompts], [p[1:] + a for p, a in zip(prompts, answers, strict=True)],
                            "packed", self.device)  # fmt: skip
            states = model.base_model(input_ids=batch.ids, position_ids=batch.positions, use_cache=False)
            predicted = model.lm_head(states.last_hidden_state.flatten(0, 1)[batch.predicts])
            loss = torch.nn.functional.cross_entropy(predicted.float(), batch.targets)
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss.detach()))
        torch.set_float32_matmul_precision(precision)
        model.zero_grad(set_to_none=True)
        model.set_experts_implementation("grouped_mm")
        self.base = model.to(torch.bfloat16).eval()
        return losses

    def _texts(self):
        """Batches of (prompt ids, answer ids), tasks in turn within a batch."""
        for step in itertools.count():
            prompts = self.prompts(step * TUNED, TUNED)
            ends = [self.tokenizer.eos_token_id]
            yield (
                [encode_prompt(self.tokenizer, p, self.arguments.tune_tokens) for p in prompts],
                [self.tokenizer.encode(f"{p.answer}", add_special_tokens=False) + ends for p in prompts],
            )

    def prompts(self, start: int, count: int) -> list[Prompt]:
        """Prompts `start` to `start + count` of every task."""
        return [prompt for task in self.tasks for prompt in task.prompts("train", start, count)]

    def draw(self, recipe: Recipe) -> tuple[list, list]:
        """Prompts and completions of an engine, with routes: whole rounds until there are enough tokens."""
        options = self.arguments
        engine = EmbeddedEngine(self.side(recipe, "rollout"), max_batch=512, record_routing=True)
        prompts, completions, unseen = [], [], options.tune_steps * TUNED
        while sum(len(c.token_ids) for c in completions) < options.tokens:
            chosen = self.prompts(unseen, options.prompts)
            ids = [encode_prompt(self.tokenizer, p, options.tune_tokens) for p in chosen]
            seeds = [options.seed * 1_000_003 + len(prompts) + i for i in range(len(ids))]
            fresh = engine.generate(ids, options.samples, Sampling(max_tokens=options.max_tokens), seeds)
            completions += [replace(c, prompt_index=c.prompt_index + len(prompts)) for c in fresh]
            prompts, unseen = prompts + ids, unseen + options.prompts
        return prompts, completions


def divergence(model: torch.nn.Module) -> dict[str, float]:
    """How far the experts of a stack are from their mean, as a share of its norm, by layer: mean and range."""
    shares = []
    for name, module in expert_stacks(model).items():
        stack = getattr(module, name.rpartition(".")[2]).detach().float().flatten(1)
        shares.append(float((stack - stack.mean(0)).norm(dim=1).mean() / stack.mean(0).norm()))
    return {"mean": sum(shares) / len(shares), "min": min(shares), "max": max(shares)}


def mismatches(bench: Bench, prompts: list, completions: list) -> Iterator[tuple[str, dict[str, dict]]]:
    """Every column (rollout): by row (alignment), every figure of `compare`."""

    def scored(recipe: Recipe, side: str) -> list[Tensor]:
        tokens = bench.arguments.micro_batch_tokens
        return score(bench.side(recipe, side), prompts, completions, micro_batch_tokens=tokens)

    rows = {name: scored(recipe, "learner") for name, recipe in LEARNERS.items()}
    for column, recipe in rollouts().items():
        theirs, ours = scored(recipe, "rollout"), dict(rows)
        # Symmetric alignment means the residual on both sides, which only channels per token allow.
        if recipe.compensates:
            del ours["full"]
            if recipe.scope == "token":
                ours["full"] = scored(replace(recipe, learner="full"), "learner")
        cells = {row: asdict(compare(logprobs, theirs)) for row, logprobs in ours.items()}
        print(f"{column:28}", *(f"{row} {cell['mean']:.4f}" for row, cell in cells.items()), flush=True)
        yield column, cells


def blocks(bench: Bench, prompts: list, completions: list) -> Iterator[tuple[str, list[dict]]]:
    """MoE block distances by configuration (learner / rollout), as in QUADS figures 4b and 7."""
    chosen = completions[: bench.arguments.block_rows]
    ids, real = pad_left([[*prompts[c.prompt_index], *c.token_ids] for c in chosen], bench.device)

    def run(model: torch.nn.Module) -> None:
        positions = (real.cumsum(1) - 1).clamp(min=0)
        with real_tokens(model, real):
            model.base_model(
                input_ids=ids, attention_mask=real.long(), position_ids=positions, use_cache=False
            )

    plain, columns = Recipe(rollout="nvfp4"), rollouts()
    pairs = {
        "bf16 / bf16": (Recipe(), Recipe()),
        "bf16 / w4a4": (LEARNERS["bf16"], plain),
        "w4a16 / w4a4": (LEARNERS["weights"], plain),
        "w4a16 / w4a4 + w13 0.5": (LEARNERS["weights"], columns["w13 0.5 per batch"]),
        "w4a16 / w4a4 + every site 0.5": (LEARNERS["weights"], columns["every site 0.5 per batch"]),
        "w4a4 / w4a4": (LEARNERS["full"], plain),
    }
    for name, (ours, theirs) in pairs.items():
        found = block_distances(bench.side(ours, "learner"), bench.side(theirs, "rollout"), run, real)
        yield name, [asdict(block) for block in found]


def routing(bench: Bench, prompts: list, completions: list) -> Iterator[tuple[str, dict]]:
    """The two terms of the mismatch for a weight-aligned learner, each rollout sampling for itself.

    Args:
        prompts / completions: what plain W4A4 drew.
    """
    for name in ROUTED:
        drawn = (prompts, completions) if name == "w4a4" else bench.draw(rollouts()[name])
        learner = bench.side(LEARNERS["weights"], "learner")
        tokens = bench.arguments.micro_batch_tokens
        yield name, asdict(routing_term(learner, *drawn, micro_batch_tokens=tokens))


class Clock:
    """Seconds of each part, printed as they end."""

    def __init__(self) -> None:
        self.last, self.seconds = time.perf_counter(), {}

    def __call__(self, part: str) -> None:
        now = time.perf_counter()
        self.seconds[part], self.last = round(now - self.last, 1), now
        print(f"{part}: {self.seconds[part]} s", flush=True)


def main() -> None:
    """Upcycle, tune, measure; results.json holds what there is so far: a run that is cut off keeps it."""
    arguments, clock = parse(), Clock()
    torch.manual_seed(arguments.seed)
    bench = Bench(arguments)
    before = divergence(bench.base)
    clock("upcycle")
    losses = bench.tune()
    after = divergence(bench.base)
    print(f"loss {losses[0]:.3f} -> {losses[-1]:.3f}, experts {before['mean']:.4f} -> {after['mean']:.4f} of their "
          "mean's norm")  # fmt: skip
    clock("tune")
    prompts, completions = bench.draw(Recipe(rollout="nvfp4"))
    clock("sample")
    setup = vars(arguments) | {"out": str(arguments.out), "device": str(bench.device)}
    setup |= {
        "tokens": sum(len(c.token_ids) for c in completions),
        "responses": len(completions),
        "sample": completion_text(bench.tokenizer, completions[0].token_ids),
    }
    results = {
        "setup": setup,
        "tuned": {"loss": losses, "divergence_before": before, "divergence_after": after},
        "environment": environment(bench.device),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part, measure in (("blocks", blocks), ("table", mismatches), ("routing", routing)):
        results[part] = {}
        for name, found in measure(bench, prompts, completions):
            results[part][name] = found
            (arguments.out / "results.json").write_text(json.dumps(results) + "\n")
        clock(part)
    results["seconds"] = clock.seconds
    (arguments.out / "results.json").write_text(json.dumps(results) + "\n")


def parse() -> argparse.Namespace:
    """Defaults suit a GPU with 40 GB or more; the fine-tune holds fp32 weights, gradients and two moments."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="demo")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--noise", type=float, default=0.05, help="on each expert, before the fine-tune")
    parser.add_argument("--tune-steps", type=int, default=300)
    parser.add_argument("--tune-lr", type=float, default=5e-5)
    parser.add_argument("--tune-tokens", type=int, default=512, help="longest prompt of the fine-tune")
    parser.add_argument(
        "--tune-experts", default="grouped_mm", help="experts implementation of the fine-tune"
    )
    parser.add_argument("--tokens", type=int, default=8000, help="least tokens to sample")
    parser.add_argument("--prompts", type=int, default=64, help="of each task in a round of sampling")
    parser.add_argument("--samples", type=int, default=2)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--micro-batch-tokens", type=int, default=32768)
    parser.add_argument("--block-rows", type=int, default=64, help="responses of the block distances")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, required=True)
    return parser.parse_args()


if __name__ == "__main__":
    main()
