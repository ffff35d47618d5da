"""Tokens a second of the embedded engine, by scheduler and format, beside the byte limit of a decoding step.

A row's time is that of one decoding step: a whole ``generate``, prefill and bookkeeping in it, over the tokens of one
response. Bytes are those of a step in the middle: weights as published read once, keys and values of every row. No
token stops a response, so all do the same work. The note has tokens a second and what the linears multiply with.
"""

from __future__ import annotations

from dataclasses import dataclass

from transformers import LlamaForCausalLM

from lowbitrl.quant import Recipe, prepare, resolve
from lowbitrl.quant.products import why_not_low_bit
from lowbitrl.quant.recipe import Kernels
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.embedded.engine import Scheduler

from . import policy
from .record import Bench, Row
from .timing import Timing, time_whole

FORMATS = {
    "bf16": Recipe(rollout="bf16"),
    "fp8": Recipe(rollout="fp8"),
    "nvfp4-w4a16": Recipe(rollout="nvfp4-w4a16"),
    "nvfp4 + residual 0.5": Recipe(rollout="nvfp4", residual=0.5, residual_scope="token"),
}
SAMPLES = 2


@dataclass(frozen=True)
class Load:
    """Requests: prompts, tokens of each prompt, tokens of each response."""

    rows: int
    prompt: int
    response: int


FEW, MANY = Load(16, 64, 32), Load(128, 64, 32)
TINY = Load(3, 8, 4)
# Few rows by graphs alone: eager decoding there waits for launches, whatever the format.
CASES: dict[str, tuple[tuple[Load, Scheduler], ...]] = {
    "cuda": ((FEW, "graph"), (MANY, "graph"), (MANY, "batch"), (MANY, "continuous")),
    "cpu": ((TINY, "graph"), (TINY, "batch"), (TINY, "continuous")),
}


def run(bench: Bench) -> None:
    """A row a format, scheduler and load; NVFP4 held to BF16's speed by CUDA graphs, graphs to eager batches."""
    base = policy.build(bench.device)
    served = {name: rollout_model(base, recipe) for name, recipe in FORMATS.items()}
    took: dict[str, float] = {}
    for load, scheduler in CASES[bench.device]:
        before, took = took, {}
        for name, (model, kernels) in served.items():
            took[name] = time_engine(bench, model, name, scheduler, load, kernels).p50
            if bench.device == "cuda":
                _finding(bench, name, scheduler, load, took, before)


def rollout_model(base: LlamaForCausalLM, recipe: Recipe) -> tuple[LlamaForCausalLM, Kernels]:
    """A prepared copy, with low-bit kernels where there are any for the recipe."""
    (model,) = policy.copies(base, 1)
    refused = why_not_low_bit(resolve(recipe, model), model.device, model.dtype)
    kernels: Kernels = "learner" if refused else "low-bit"
    prepare(model, recipe, "rollout", kernels=kernels)
    return model, kernels


def time_engine(
    bench: Bench, model: LlamaForCausalLM, name: str, scheduler: Scheduler, load: Load, kernels: Kernels
) -> Row:
    """One row, op "generate <format> <scheduler>"."""
    engine = EmbeddedEngine(model, scheduler, max_batch=load.rows)
    asked = policy.prompts(bench.device, load.rows, load.prompt)
    never = Sampling(max_tokens=load.response, stop_token_ids=policy.no_stop(model))
    whole = time_whole(lambda: engine.generate(asked, 1, never), samples=SAMPLES)
    low, middle, high = (t / load.response for t in (whole.p20, whole.p50, whole.p80))
    step = Timing(low, middle, high, whole.samples, whole.l2)
    return bench.keep(
        f"generate {name} {scheduler}",
        f"{policy.shape_name(bench.device)}, {load.rows} rows, {load.prompt}+{load.response} tokens",
        step,
        nbytes=policy.decode_bytes(model, load.rows, load.prompt + load.response // 2),
        backend=kernels,
        note=f"{load.rows / step.p50 * 1e6:.0f} tokens/s",
    )


def _finding(
    bench: Bench,
    name: str,
    scheduler: Scheduler,
    load: Load,
    took: dict[str, float],
    before: dict[str, float],
) -> None:
    """Graphs: a format's speed over BF16's. Eager batches, timed right after graphs: graphs' speed over theirs."""
    if scheduler == "graph" and name != "bf16":
        what = f"rollout 1B {name}, graph, {load.rows} rows: tokens/s over BF16"
        bench.find(what, took["bf16"] / took[name], at_least=1.0)
    if scheduler == "batch":
        what = f"rollout 1B {name}, {load.rows} rows: graph over batch, tokens/s"
        bench.find(what, took[name] / before[name], at_least=1.0)
