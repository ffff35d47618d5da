"""The same sampled tokens scored by every engine and the learner: how far apart neighbours are.

    vllm sampling    our plugin's vLLM, fed live, when it sampled the tokens
    vllm prefill     the same, as a prompt                       decode against prefill
    vllm stock       stock vLLM on `lowbitrl quantize`'s checkpoint of the same weights   its kernels, its loader
    embedded         our embedded engine, fed the same bytes     vLLM's attention and norms against transformers'
    learner          the learner's forward pass                  alignment: the activations, in `learner = "weights"`

Each row is compared with the first, whose log-probabilities are the behaviour policy.
"""

from __future__ import annotations

import gc
import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbitrl.checkpoints import quantize_checkpoint
from lowbitrl.diagnose.lab import find_scales
from lowbitrl.diagnose.run import DiagnoseConfig, Say
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm.engine import VllmEngine, score_stock
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.logprobs import response_logprobs

KV_CACHE_BYTES = 1 << 28
"""Of each vLLM in turn: both are small beside the models."""
MEMORY_SHARE = 0.1
"""What vLLM wants to find free; with the cache's size given it takes no more than it needs."""


def engine_chain(
    model: str, recipe: Recipe, prompts: Sequence[Sequence[int]], config: DiagnoseConfig, dtype: str,
    device: torch.device, say: Say,
) -> dict[str, Any]:  # fmt: skip
    """Sample about `config.tokens` tokens with vLLM at temperature 1, and score them everywhere.

    Returns:
        {"plan": summary, "tokens": count, "rows": [{"scorer", "mean", "max"} or {"scorer", "absent": why}]}

    Raises:
        ValueError: a temperature other than 1 (vLLM scores prompts without one).
    """
    if config.temperature != 1.0:
        raise ValueError(
            f"temperature={config.temperature}: the chain of engines is scored at 1; leave it out"
        )
    learner, tokenizer = load_model(model, dtype, device)
    with tempfile.TemporaryDirectory() as scratch:
        plain = Path(scratch) / "plain"
        learner.save_pretrained(plain)
        tokenizer.save_pretrained(plain)
        plan = prepare(learner, recipe, "learner")
        find_scales(learner, prompts)
        published = publish(learner, 0)
        longest = max(map(len, prompts)) + config.max_tokens
        options = {
            "max_model_len": longest + 1, "kv_cache_memory_bytes": KV_CACHE_BYTES, "enforce_eager": True,
            "gpu_memory_utilization": MEMORY_SHARE,
        }  # fmt: skip
        engine = VllmEngine(plain, plan, dtype, **options)
        say(engine.summary())
        engine.update(published.stream(), published.manifest)
        done = _draw(engine, prompts, config)
        used = [list(prompts[c.prompt_index]) for c in done]
        whole = [p + list(c.token_ids) for p, c in zip(used, done, strict=True)]
        scores: dict[str, list[Tensor] | str] = {
            "vllm sampling": [torch.tensor(c.rollout_logprobs) for c in done],
            "vllm prefill": _responses(engine.score(whole), used),
        }
        engine.close()
        gc.collect()
        scores["vllm stock"] = _stock(model, recipe, Path(scratch) / "quantized", whole, used, dtype, options)
    rollout, _ = load_model(model, dtype, device)
    prepare(rollout, plan, "rollout")
    embedded = EmbeddedEngine(rollout, "batch")
    embedded.update(published.stream(), published.manifest)
    scores["embedded"] = _responses([embedded.score([s])[0] for s in whole], used)
    scores["learner"] = _learner(learner, used, done)
    rows = [_row(name, scores["vllm sampling"], found) for name, found in scores.items()]
    return {"plan": plan.summary(), "tokens": sum(len(c.token_ids) for c in done), "rows": rows}


def _draw(engine: VllmEngine, prompts: Sequence[Sequence[int]], config: DiagnoseConfig) -> list[Completion]:
    done: list[Completion] = []
    while sum(len(c.token_ids) for c in done) < config.tokens:
        # Seeds of its own for every round.
        first = config.seed + len(done)
        seeds = [first + i for i in range(len(prompts))]
        done += engine.generate(prompts, 1, Sampling(max_tokens=config.max_tokens), seeds)
    total = 0
    for count, completion in enumerate(done):
        total += len(completion.token_ids)
        if total >= config.tokens:
            return done[: count + 1]
    return done


def _stock(
    model: str, recipe: Recipe, folder: Path, whole: list[list[int]], used: list[list[int]], dtype: str,
    options: dict[str, Any],
) -> list[Tensor] | str:  # fmt: skip
    """Scores by vLLM without our plugin's method, or why there are none."""
    try:
        written = quantize_checkpoint(model, recipe, folder, dtype=getattr(torch, dtype))
    except ValueError as error:
        return f"no checkpoint: {error}"
    try:
        return _responses(score_stock(written.folder, whole, dtype, **options), used)
    # Whatever a kernel or loader of vLLM's raises here is the finding.
    except Exception as error:
        return f"stock vLLM does not serve it: {type(error).__name__}: {str(error).splitlines()[0][:200]}"


@torch.no_grad()
def _learner(learner: Any, used: list[list[int]], done: list[Completion]) -> list[Tensor]:
    rows = []
    for prompt, completion in zip(used, done, strict=True):
        scores, _ = response_logprobs(learner, [prompt], [list(completion.token_ids)], temperature=1.0)
        rows.append(scores[0, : len(completion.token_ids)].float().cpu())
    return rows


def _responses(scores: list[Tensor], prompts: list[list[int]]) -> list[Tensor]:
    return [row[len(prompt) - 1 :].float().cpu() for row, prompt in zip(scores, prompts, strict=True)]


def _row(name: str, behaviour: list[Tensor] | str, found: list[Tensor] | str) -> dict[str, Any]:
    if isinstance(found, str):
        return {"scorer": name, "absent": found}
    gaps = (torch.cat(list(behaviour)) - torch.cat(found)).abs()  # type: ignore[arg-type]
    return {"scorer": name, "mean": float(gaps.mean()), "max": float(gaps.max())}


def write_chain(found: dict[str, Any], out: Path, say: Say) -> Path:
    """Print the table and write engines.json."""
    say(
        f"{found['plan']}\n{found['tokens']} tokens; |difference| to the log-probabilities at sampling, in nats"
    )
    for row in found["rows"]:
        figures = row.get("absent") or f"mean {row['mean']:.6f}  max {row['max']:.4f}"
        say(f"{row['scorer']:<14} {figures}")
    out.mkdir(parents=True, exist_ok=True)
    path = out / "engines.json"
    path.write_text(json.dumps(found, indent=1))
    return path
