"""Experts on a GPU: memory of a rollout by dispatch, and bits of learner and rollout.

memory   a few layers of a Qwen3-30B-A3B's shapes, random weights, wearing NVFP4 W4A16 and W4A4: resident
         bytes after `prepare`, and peak of a decode step (--rows tokens) and of a prefill (rows x --length):
         the learner's products (rollout.kernels' default), low-bit kernels, decoded experts kept
         (rollout.keep_decoded_experts), and the same model in BF16
bits     torch.equal of learner and rollout logits on the same bytes, each dispatch, recipe and choice of kernels

python benchmarks/moe_memory.py --out results/moe-memory
"""

from __future__ import annotations

import argparse
import gc
import json
import time
from collections.abc import Iterator
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
WAYS = {
    "learner's products": {},
    "low-bit kernels": {"kernels": "low-bit"},
    "decoded experts kept": {"keep_decoded_experts": True},
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


def ways(device: str, dispatch: str) -> Iterator[tuple[str, dict]]:
    """What a rollout can be prepared with: low-bit kernels are CUDA's, and know one dispatch."""
    for name, options in WAYS.items():
        if "kernels" not in options or (device.startswith("cuda") and dispatch == DISPATCHES[0]):
            yield name, options


def memory(arguments: argparse.Namespace) -> Iterator[dict]:
    """One row a dispatch and way to serve experts."""
    meter = Memory(arguments.device)
    ids = torch.randint(3, 4000, (arguments.rows, arguments.length), device=arguments.device)
    for dispatch in DISPATCHES:
        for recipe in (None, "nvfp4-w4a16", "nvfp4"):
            for way, options in ways(arguments.device, dispatch) if recipe else [("BF16", {})]:
                base = meter.held()
                model = build(arguments, dispatch, arguments.layers)
                stacks = sum(
                    getattr(m, name.rpartition(".")[2]).nbytes for name, m in expert_stacks(model).items()
                )
                if recipe:
                    prepare(model, Recipe(rollout=recipe), "rollout", **options)
                row = {"rollout": recipe or "bf16", "dispatch": dispatch, "way": way}
                row |= {"experts_bf16": stacks / GIB, "resident": meter.held() - base}
                row["decode_peak"], row["decode_ms"] = meter.peak(model, ids[:, :1])
                # A matrix a token: a prefill of it is out of the question.
                if dispatch != "batched_mm":
                    row["prefill_peak"], row["prefill_ms"] = meter.peak(model, ids)
                yield row
                del model


@torch.no_grad()
def bits(arguments: argparse.Namespace) -> Iterator[dict]:
    """Whether learner and rollout logits are the same bits; the largest difference where they are not."""
    ids = torch.randint(3, 4000, (3, 17), device=arguments.device)
    for dispatch in DISPATCHES:
        for name, recipe in RECIPES.items():
            learner = build(arguments, dispatch, 2)
            prepare(learner, recipe, "learner")
            ours = learner(input_ids=ids, use_cache=False).logits
            del learner
            gc.collect()
            for way, options in ways(arguments.device, dispatch):
                rollout = build(arguments, dispatch, 2)
                prepare(rollout, recipe, "rollout", **options)
                theirs = rollout(input_ids=ids, use_cache=False).logits
                yield {
                    "dispatch": dispatch,
                    "recipe": name,
                    "way": way,
                    "equal": torch.equal(ours, theirs),
                    "largest": float((ours.float() - theirs.float()).abs().max()),
                    "finite": bool(ours.isfinite().all()),
                }
                del rollout
                gc.collect()


def main() -> None:
    """results.json; written anew after every row."""
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
        results[part] = []
        for row in measure(arguments):
            print(" ".join(f"{k}={v:.3f}" if isinstance(v, float) else f"{k}={v}" for k, v in row.items()),
                  flush=True)  # fmt: skip
            results[part].append(row)
            (arguments.out / "results.json").write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
