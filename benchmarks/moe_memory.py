"""Experts on a GPU: memory of a rollout by dispatch, and bits of learner and rollout.

memory   a few layers of a Qwen3-30B-A3B's shapes, random weights, wearing NVFP4 W4A16 and W4A4: resident
         bytes after `prepare`, and peak of a decode step (--rows tokens) and of a prefill (rows x --length),
         against the same model in BF16 and against decoded experts kept (rollout.keep_decoded_experts)
bits     torch.equal of learner and rollout logits on the same bytes, each dispatch, each recipe

python benchmarks/moe_memory.py --out results/moe-memory
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from lowbitrl.quant import Recipe, prepare
from lowbitrl.quant.topology import expert_stacks
from lowbitrl.runs import environment

DISPATCHES = ("eager", "grouped_mm", "batched_mm")
RECIPES = {
    "w4a16 weights": Recipe(rollout="nvfp4-w4a16", learner="weights"),
    "w4a4 full": Recipe(rollout="nvfp4", learner="full"),
    "w4a4 full + residual 0.5": Recipe(rollout="nvfp4", learner="full", residual=0.5),
}
GIB = 2**30


def build(arguments: argparse.Namespace, dispatch: str, layers: int) -> PreTrainedModel:
    """Random weights of the shapes asked for, BF16; the same for every call."""
    torch.manual_seed(0)
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=4096,
        hidden_size=arguments.hidden,
        moe_intermediate_size=arguments.intermediate,
        intermediate_size=arguments.intermediate,
        num_hidden_layers=layers,
        num_attention_heads=32,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 16,
        num_experts=arguments.experts,
        num_experts_per_tok=arguments.top_k,
        norm_topk_prob=True,
    )
    with torch.device(arguments.device):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    # from_config may leave stacks uninitialized.
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.normal_(std=0.02)
    model.set_experts_implementation(dispatch)
    return model.eval()


class Memory:
    """Bytes that torch holds on the device; on a CPU nothing is counted."""

    def __init__(self, device: str) -> None:
        self.device = device
        self.counts = device.startswith("cuda")

    def held(self) -> float:
        """GiB allocated now."""
        gc.collect()
        return torch.cuda.memory_allocated() / GIB if self.counts else 0.0

    @torch.no_grad()
    def peak(self, model: PreTrainedModel, ids: torch.Tensor) -> tuple[float, float]:
        """GiB above what is held before a forward pass of `ids`, and its milliseconds, the second time."""
        for _ in range(2):
            before = self.held()
            if self.counts:
                torch.cuda.synchronize()
                torch.cuda.reset_peak_memory_stats()
            started = time.perf_counter()
            model(input_ids=ids, use_cache=False, logits_to_keep=1)
            if self.counts:
                torch.cuda.synchronize()
            seconds = time.perf_counter() - started
        return (torch.cuda.max_memory_allocated() / GIB if self.counts else 0.0) - before, 1000 * seconds


def memory(arguments: argparse.Namespace) -> list[dict]:
    """One row a dispatch and way to keep experts."""
    meter, rows = Memory(arguments.device), []
    ids = torch.randint(3, 4000, (arguments.rows, arguments.length), device=arguments.device)
    for recipe in (None, "nvfp4-w4a16", "nvfp4"):
        for dispatch in DISPATCHES:
            for keep in (False, True):
                if recipe is None and keep:
                    continue
                base = meter.held()
                model = build(arguments, dispatch, arguments.layers)
                stacks = sum(
                    getattr(m, name.rpartition(".")[2]).nbytes for name, m in expert_stacks(model).items()
                )
                if recipe:
                    prepare(model, Recipe(rollout=recipe), "rollout", keep_decoded_experts=keep)
                row = {"rollout": recipe or "bf16", "dispatch": dispatch, "keep_decoded_experts": keep}
                row |= {"experts_bf16": stacks / GIB, "resident": meter.held() - base}
                row["decode_peak"], row["decode_ms"] = meter.peak(model, ids[:, :1])
                # A matrix a token: a prefill of it is out of the question.
                if dispatch != "batched_mm":
                    row["prefill_peak"], row["prefill_ms"] = meter.peak(model, ids)
                rows.append(row)
                print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                      flush=True)  # fmt: skip
                del model
    return rows


@torch.no_grad()
def bits(arguments: argparse.Namespace) -> list[dict]:
    """Whether learner and rollout logits are the same bits; the largest difference where they are not."""
    rows = []
    ids = torch.randint(3, 4000, (3, 17), device=arguments.device)
    for dispatch in DISPATCHES:
        for name, recipe in RECIPES.items():
            sides = [build(arguments, dispatch, 2) for _ in range(2)]
            for model, side in zip(sides, ("learner", "rollout"), strict=True):
                prepare(model, recipe, side)
            ours, theirs = (model(input_ids=ids, use_cache=False).logits for model in sides)
            row = {"dispatch": dispatch, "recipe": name, "equal": torch.equal(ours, theirs)}
            row |= {"largest": float((ours.float() - theirs.float()).abs().max())}
            row |= {"finite": bool(ours.isfinite().all())}
            rows.append(row)
            print(row, flush=True)
            del sides, ours, theirs
    return rows


def main() -> None:
    """results.json; written anew after either part."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--intermediate", type=int, default=768)
    parser.add_argument("--experts", type=int, default=128)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--rows", type=int, default=32)
    parser.add_argument("--length", type=int, default=64)
    parser.add_argument("--out", type=Path, required=True)
    arguments = parser.parse_args()
    results = {
        "setup": vars(arguments) | {"out": str(arguments.out)},
        "environment": environment(torch.device(arguments.device)),
    }
    arguments.out.mkdir(parents=True, exist_ok=True)
    for part, measure in (("bits", bits), ("memory", memory)):
        results[part] = measure(arguments)
        (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
