"""Peak GPU memory of a rollout's experts in a forward pass: bytes decoded expert by expert, or a BF16 copy of all.

One Qwen3-30B-A3B experts block by default (128 experts, hidden 2048, intermediate 768), `--layers` of them, as a
Qwen3-MoE model with random weights; memory is what torch's allocator held at most, above nothing.

    python benchmarks/expert_memory.py --out results/expert-memory/h200.json
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowbitrl.assemble import pick_device
from lowbitrl.quant import Recipe, prepare
from lowbitrl.runs import environment


def model_of(arguments: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    """A Qwen3-MoE model of the given shape, BF16, random."""
    config = AutoConfig.for_model(
        "qwen3_moe",
        vocab_size=1024,
        hidden_size=arguments.hidden,
        intermediate_size=arguments.hidden,
        moe_intermediate_size=arguments.intermediate,
        num_hidden_layers=arguments.layers,
        num_attention_heads=16,
        num_key_value_heads=4,
        head_dim=arguments.hidden // 16,
        num_experts=arguments.experts,
        num_experts_per_tok=8,
        norm_topk_prob=True,
    )
    with device:
        return AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()


def peak(arguments: argparse.Namespace, device: torch.device, recipe: Recipe, keep: bool) -> dict[str, float]:
    """GiB held by the prepared model, and at most during one forward pass."""
    torch.manual_seed(0)
    model = model_of(arguments, device)
    prepare(model, recipe, "rollout", keep_decoded_experts=keep)
    ids = torch.randint(3, 1000, (arguments.tokens // 32, 32), device=device)
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    held = torch.cuda.memory_allocated() / 2**30
    with torch.no_grad():
        model(input_ids=ids, use_cache=False)
    return {"held": round(held, 3), "peak": round(torch.cuda.max_memory_allocated() / 2**30, 3)}


def main() -> None:
    """Measure three ways, print and write."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for name, value in (
        ("experts", 128),
        ("hidden", 2048),
        ("intermediate", 768),
        ("layers", 4),
        ("tokens", 512),
    ):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--out", type=Path, default=Path("results/expert-memory/h200.json"))
    arguments = parser.parse_args()
    device = pick_device("cuda")
    rows = {
        "bf16": peak(arguments, device, Recipe(), False),
        "nvfp4, decoded expert by expert": peak(
            arguments, device, Recipe(rollout="nvfp4", residual=0.5), False
        ),
        "nvfp4, decoded copy kept": peak(arguments, device, Recipe(rollout="nvfp4", residual=0.5), True),
    }
    for name, row in rows.items():
        print(f"{name:34} held {row['held']:.3f} GiB  peak {row['peak']:.3f} GiB")
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    setup = {k: str(v) if isinstance(v, Path) else v for k, v in vars(arguments).items()}
    found = {"rows": rows, "setup": setup, "environment": environment(device)}
    arguments.out.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
