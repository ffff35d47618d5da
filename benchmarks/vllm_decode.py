"""Decode speed of vLLM on Qwen3-30B-A3B's shape with random weights, ours beside stock, for an H200 and vLLM 0.26.

    python benchmarks/vllm_decode.py                       every variant, each in a process of its own
    python benchmarks/vllm_decode.py --tiny --sequences 2  the same code on a tiny shape, on a CPU: no results written

A step's time is the slope between two lengths of output, so that prefill and scheduling at the start cancel. The byte
limit is what one step must read of the weights, experts by the share that uniform routing hits, over the device's copy
bandwidth.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowbitrl.bench.ceilings import copy_bandwidth
from lowbitrl.formats import get_format
from lowbitrl.quant import Plan, Recipe, resolve
from lowbitrl.runs import environment

SHAPE = {
    "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 48,
    "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "num_experts": 128, "num_experts_per_tok": 8,
    "moe_intermediate_size": 768, "norm_topk_prob": True, "max_position_embeddings": 4096, "eos_token_id": 2,
}  # fmt: skip
TINY = {
    "vocab_size": 128, "hidden_size": 128, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 32, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 64,
}  # fmt: skip
OURS = {
    "ours nvfp4-w4a16": Recipe(rollout="nvfp4-w4a16"),
    "ours nvfp4": Recipe(rollout="nvfp4"),
    "ours nvfp4 residual 0.5": Recipe(rollout="nvfp4", residual=0.5),
    "ours nvfp4 residual 1.0": Recipe(rollout="nvfp4", residual=1.0),
}
STOCK = {"stock bf16": "bf16", "stock fp8": "fp8", "stock nvfp4": "nvfp4-w4a16"}
PROMPT, SHORT, LONG = 64, 16, 80


def main() -> None:
    """Run one variant, or all of them and write the summary."""
    arguments = parse()
    if arguments.variant:
        arguments.rows.write_text(json.dumps(measure(arguments)))
        return
    rows: list[dict[str, Any]] = []
    for name in (*STOCK, *OURS):
        # Through a file: vLLM writes to the standard output too.
        with tempfile.NamedTemporaryFile(suffix=".json") as file:
            command = [sys.executable, __file__, "--variant", name, "--rows", file.name, *sys.argv[1:]]
            code = subprocess.run(command, check=False).returncode
            found = Path(file.name).read_text()
        rows += json.loads(found) if code == 0 else [{"variant": name, "failed": code}]
        print(json.dumps(rows[-1]), flush=True)
    if not arguments.tiny:
        write(rows, arguments.out)


def measure(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """A row for every number of sequences."""
    from vllm import SamplingParams

    shape = SHAPE | (TINY if arguments.tiny else {})
    recipe = OURS.get(arguments.variant) or Recipe(rollout=STOCK[arguments.variant])
    plan = plan_of(shape, recipe)
    with tempfile.TemporaryDirectory() as folder:
        llm = start(Path(folder), shape, arguments, plan)
        rows = []
        for count in arguments.sequences:
            generator = torch.Generator().manual_seed(count)
            ids = torch.randint(3, shape["vocab_size"], (count, PROMPT), generator=generator)
            prompts = [{"prompt_token_ids": row} for row in ids.tolist()]

            def seconds(tokens: int, prompts: list[dict[str, Any]] = prompts) -> float:
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=None)
                begun = time.perf_counter()
                llm.generate(prompts, params, use_tqdm=False)
                return time.perf_counter() - begun

            seconds(SHORT)
            step = min(seconds(LONG) - seconds(SHORT) for _ in range(arguments.repeats)) / (LONG - SHORT)
            limit = step_bytes(plan, shape, count) / copy_bandwidth(
                "cuda" if torch.cuda.is_available() else "cpu"
            )
            rows.append(
                {"variant": arguments.variant, "sequences": count, "tokens_per_second": count / step,
                 "step_ms": step * 1e3, "share_of_byte_limit": limit / step}
            )  # fmt: skip
    return rows


def plan_of(shape: dict[str, Any], recipe: Recipe) -> Plan:
    """The recipe on the shape, without weights."""
    with torch.device("meta"):
        return resolve(
            recipe,
            AutoModelForCausalLM.from_config(
                AutoConfig.for_model("qwen3_moe", **shape), dtype=torch.bfloat16
            ),
        )


def start(folder: Path, shape: dict[str, Any], arguments: argparse.Namespace, plan: Plan) -> Any:
    """A vLLM with random weights: ours, or stock under what it calls the same precision."""
    config = AutoConfig.for_model(
        "qwen3_moe", architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16", **shape
    )
    config.save_pretrained(folder)
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 256,
        "enable_prefix_caching": False, "seed": 0,
    }  # fmt: skip
    if not torch.cuda.is_available():
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
    if arguments.variant in OURS:
        from lowbitrl.rollout.vllm.engine import VllmEngine

        return VllmEngine(folder, plan, **options).llm
    from vllm import LLM

    if arguments.variant == "stock fp8":
        options["quantization"] = "fp8"
    if arguments.variant == "stock nvfp4":
        from lowbitrl.checkpoints.config import compressed_tensors_config

        options["hf_overrides"] = {"quantization_config": compressed_tensors_config(plan)}
    return LLM(model=str(folder), **options)


def step_bytes(plan: Plan, shape: dict[str, Any], sequences: int) -> float:
    """Bytes of weights that one decode step reads when routing is uniform."""
    hit = 1 - (1 - shape["num_experts_per_tok"] / shape["num_experts"]) ** sequences
    total = 0.0
    for layer in plan.layers:
        if layer.name.endswith("embed_tokens"):
            continue  # A few rows.
        count = torch.Size(layer.shape).numel()
        bits = get_format(layer.weight).bits_per_element if layer.weight else 16
        total += count * bits / 8 * (hit if layer.layout is not None else 1)
    return total


def write(rows: list[dict[str, Any]], out: Path) -> None:
    """All rows, and the summary's figures next to their goals."""
    out.mkdir(parents=True, exist_ok=True)
    (out / "decode.json").write_text(
        json.dumps({"rows": rows, "environment": environment(torch.device("cuda"))}, indent=1)
    )
    rate = {(r["variant"], r["sequences"]): r["tokens_per_second"] for r in rows if "sequences" in r}
    ratios = [("ours nvfp4-w4a16", "stock nvfp4", 1.0, (16, 64, 256))]
    ratios += [("ours nvfp4 residual 0.5", "ours nvfp4", 0.91, (16, 64, 256))]
    ratios += [("ours nvfp4 residual 0.5", "stock fp8", 1.16, (16, 64))]
    summary = [
        {
            "what": f"{ours} over {other}, tokens/s at {count} sequences",
            "figure": round(rate[ours, count] / rate[other, count], 4),
            "goal": f">= {goal}",
            "met": rate[ours, count] / rate[other, count] >= goal,
            "command": "python benchmarks/vllm_decode.py",
        }
        for ours, other, goal, counts in ratios
        for count in counts
        if (ours, count) in rate and (other, count) in rate
    ]
    (out / "summary.json").write_text(json.dumps(summary, indent=1) + "\n")


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--variant", choices=[*STOCK, *OURS], help="one alone")
    parser.add_argument("--rows", type=Path, default=Path("rows.json"), help="where one variant's rows go")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/h200-vllm"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
