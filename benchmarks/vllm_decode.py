"""Decode speed of vLLM on Qwen3-30B-A3B's shape with random weights, ours beside stock, for an H200 and vLLM 0.26.

    python benchmarks/vllm_decode.py                       every variant, each in a process of its own
    python benchmarks/vllm_decode.py --tiny --sequences 2  the same code on a tiny shape, on a CPU: no results written

A step's time is the slope between two lengths of output, so that prefill and scheduling at the start cancel. The byte
limit is what one step must read of the weights over the device's copy bandwidth. Experts count by the share of them
that as many tokens hit, measured on the routing of prompts: they are drawn as decoded tokens come. Weights are drawn
here: vLLM's own dummies leave every token with the same experts (or NaN) in quantized models. CUDA graphs, of the
measured numbers of sequences alone, serve decoding, and no compiler runs, for every variant. Results are written as
each variant ends, in an order of worth.
"""

from __future__ import annotations

import argparse
import csv
import fcntl
import json
import math
import os
import subprocess
import sys
import tempfile
import time
import traceback
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowbitrl.bench.ceilings import copy_bandwidth
from lowbitrl.bench.record import Bench, Finding, merge_findings
from lowbitrl.formats import get_format
from lowbitrl.quant import Plan, Recipe, resolve
from lowbitrl.quant.stacks import encode_stack
from lowbitrl.rollout.types import Sampling
from lowbitrl.runs import environment
from lowbitrl.sync.manifest import Manifest, entries_of

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
BY_WORTH = [
    "stock nvfp4", "ours nvfp4-w4a16", "ours nvfp4", "ours nvfp4 residual 0.5", "stock fp8", "stock bf16",
    "ours nvfp4 residual 1.0",
]  # fmt: skip
DEVIATION, CODES_RMS = 0.02, 2.93
"""Of random weights; of uniform draws among FP4's values."""
UPDATED = "ours nvfp4-w4a16"
"""The variant whose bytes are also updated live."""
UPDATE = "live update of all bytes of Qwen3-30B-A3B's shape, share of the bus limit"
COMMAND = "python benchmarks/vllm_decode.py"
PROMPT, SHORT, LONG = 64, 16, 64
# The first two are compiled at a first start: minutes, and neither is in this model's decoding. In this process: ours
# and stock are then scheduled alike, and routing is seen.
ENVIRONMENT = {
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_NO_USAGE_STATS": "1",
}
COLUMNS = ("variant", "sequences", "tokens_per_second", "step_ms", "share_of_byte_limit", "experts_share", "busiest",
           "start_seconds", "kernels")  # fmt: skip


def main() -> None:
    """Run one variant, or all of them and write the summary."""
    arguments = parse()
    if arguments.unmeasured:
        say_unmeasured(arguments.out)
        return
    if arguments.variant:
        os.environ.update(ENVIRONMENT)
        code = alone(arguments)
        sys.stdout.flush()
        os._exit(code)  # vLLM's threads may keep a process that has said all.
    rows: list[dict[str, Any]] = []
    with tempfile.TemporaryDirectory() as scratch:
        starts = [start_child(name, Path(scratch)) for name in arguments.variants[:1]]
        for i in range(len(arguments.variants)):
            if i + 1 < len(arguments.variants):  # The next one's imports take as long as this one's loading.
                starts.append(start_child(arguments.variants[i + 1], Path(scratch)))
            found = finish_child(*starts[i], arguments.limit)
            for row in found:
                print(json.dumps(row), flush=True)
            rows += found
            if not arguments.tiny:
                write(rows, arguments.out)


def alone(arguments: argparse.Namespace) -> int:
    """One variant in this process; its rows, or the error beside those that it had."""
    rows: list[dict[str, Any]] = []
    try:
        measure(arguments, rows)
    except BaseException as error:
        traceback.print_exc()
        said = f"{type(error).__name__}: {error}"[:400]
        rows.append({"variant": arguments.variant, "failed": said})
    arguments.rows.write_text(json.dumps(rows))
    return 0


def start_child(name: str, scratch: Path) -> tuple[str, subprocess.Popen[bytes], Path]:
    """Begin one variant in a process of its own; it waits for the device until the one before has ended."""
    # Through a file: vLLM writes to the standard output too.
    rows = scratch / f"{name}.json"
    own = ["--variant", name, "--rows", str(rows), "--lock", str(scratch / "device")]
    return name, subprocess.Popen([sys.executable, __file__, *sys.argv[1:], *own]), rows


def finish_child(name: str, child: subprocess.Popen[bytes], rows: Path, limit: float) -> list[dict[str, Any]]:
    """Its rows, and why it ended if it did not end well."""
    try:
        why = child.wait(limit)
    except subprocess.TimeoutExpired:
        child.kill()
        child.wait()
        why = f"no end within {limit:.0f} seconds"
    found = json.loads(rows.read_text()) if rows.exists() else []
    return [*found, {"variant": name, "failed": why}] if why else found


def wait_for_device(lock: Path | None) -> None:
    """Hold the device until this process ends."""
    if lock is not None:
        held = lock.open("w")
        fcntl.flock(held, fcntl.LOCK_EX)
        _kept.append(held)
        time.sleep(1.0)  # The process before lets its memory go as it ends.


_kept: list[Any] = []


def measure(arguments: argparse.Namespace, rows: list[dict[str, Any]]) -> None:
    """Append a row for every number of sequences."""
    shape = SHAPE | (TINY if arguments.tiny else {})
    plan, model = plan_of(shape, OURS.get(arguments.variant) or Recipe(rollout=STOCK[arguments.variant]))
    with tempfile.TemporaryDirectory() as folder:
        options = engine_options(Path(folder), shape, arguments, plan, model)
        wait_for_device(arguments.lock)
        draw_weights()
        begun = time.perf_counter()
        engine, kernels = start(Path(folder), arguments, plan, options)
        llm = getattr(engine, "llm", engine)
        started = time.perf_counter() - begun
        hits = routing(llm, shape, arguments.sequences)
        # After the engine took what it needs.
        bandwidth = copy_bandwidth("cuda" if torch.cuda.is_available() else "cpu")
        for count in arguments.sequences:
            step = step_seconds(llm, random_prompts(shape, count), arguments.repeats)
            hit = hits.get(count, {})
            limit = step_bytes(plan, hit["experts_share"]) / bandwidth if hit else None
            rows.append(
                {"variant": arguments.variant, "sequences": count, "tokens_per_second": count / step,
                 "step_ms": step * 1e3, "share_of_byte_limit": limit and limit / step, **hit,
                 "start_seconds": started, "kernels": kernels}
            )  # fmt: skip
            arguments.rows.write_text(json.dumps(rows))
        if arguments.variant == UPDATED:
            rows.append({"variant": arguments.variant, **live_updates(engine, plan, bandwidth)})


def live_updates(engine: Any, plan: Plan, bandwidth: float) -> dict[str, Any]:
    """A whole random version of the model's bytes, served five times: seconds, and what a copy would take."""
    tensors = random_version(plan, "cuda" if torch.cuda.is_available() else "cpu")
    manifest = Manifest(0, plan.digest, entries_of(tensors))
    seconds, held = [], []
    for version in range(5):
        begun = time.perf_counter()
        engine.update(tensors.items(), replace(manifest, version=version))
        if torch.cuda.is_available():
            torch.cuda.synchronize()
            held.append(torch.cuda.memory_allocated())
        seconds.append(time.perf_counter() - begun)
    size = sum(t.nbytes for t in tensors.values())
    done = engine.generate([[5, 6, 7]], 1, Sampling(max_tokens=8))
    return {
        "update_seconds": seconds, "update_bytes": size, "update_limit_seconds": 2 * size / bandwidth,
        "allocated": held, "served_after": done[0].version,
    }  # fmt: skip


@torch.no_grad()
def random_version(plan: Plan, device: str) -> dict[str, torch.Tensor]:
    """Published tensors of a model that `plan` describes, of random weights."""
    tensors: dict[str, torch.Tensor] = {}
    for row in plan.layers:
        weight = torch.empty(row.shape, dtype=torch.bfloat16, device=device).uniform_(-0.05, 0.05)
        if row.weight is None:
            tensors[row.parameter] = weight
            continue
        weight.view(-1)[0] = 0.05  # Members of a fused matrix share their largest value.
        fmt = get_format(row.weight)
        encoded = encode_stack(weight, fmt, row.name) if row.layout is not None else fmt.quantize(weight)
        tensors |= {f"{row.name}.{part}": value for part, value in encoded.tensors().items()}
    return tensors


def step_seconds(llm: Any, prompts: list[dict[str, Any]], repeats: int) -> float:
    """One decode step of these sequences: the least slope between a short and a long output."""
    from vllm import SamplingParams

    def seconds(tokens: int) -> float:
        params = SamplingParams(max_tokens=tokens, ignore_eos=True, detokenize=False, seed=None)
        begun = time.perf_counter()
        llm.generate(prompts, params, use_tqdm=False)
        return time.perf_counter() - begun

    seconds(SHORT)
    return min(seconds(LONG) - seconds(SHORT) for _ in range(repeats)) / (LONG - SHORT)


def random_prompts(shape: dict[str, Any], count: int) -> list[dict[str, Any]]:
    """Prompts of uniformly drawn tokens, the same for every variant."""
    generator = torch.Generator().manual_seed(count)
    ids = torch.randint(3, shape["vocab_size"], (count, PROMPT), generator=generator)
    return [{"prompt_token_ids": row} for row in ids.tolist()]


def routing(llm: Any, shape: dict[str, Any], counts: list[int]) -> dict[int, dict[str, float]]:
    """Which experts `count` tokens hit, by the routing of a prefill of 16 prompts, which no graph hides.

    Returns:
        By count: "experts_share" of a layer's experts that are hit, mean over layers and draws; "busiest", the
        most chosen expert's share of a layer's choices over the mean share, over all tokens.
    """
    from vllm.model_executor.layers.fused_moe.router.base_router import BaseRouter

    from vllm import SamplingParams

    seen: list[torch.Tensor] = []
    select = BaseRouter.select_experts

    def noted(self: Any, *args: Any, **kwargs: Any) -> Any:
        weights, ids = select(self, *args, **kwargs)
        seen.append(ids.detach().clone())
        return weights, ids

    BaseRouter.select_experts = noted
    try:
        params = SamplingParams(max_tokens=1, logprobs=0, detokenize=False)
        outputs = llm.generate(random_prompts(shape, 16), params, use_tqdm=False)
    finally:
        BaseRouter.select_experts = select
    said = [entry.logprob for out in outputs for entry in out.outputs[0].logprobs[0].values()]
    if not all(map(math.isfinite, said)):
        raise ValueError(f"the model says {said[:3]}...: its activations are not finite")
    layers = [ids.cpu().long() for ids in seen if len(ids) >= max(counts)]
    if not layers:
        return {}  # Routed inside one kernel, as stock vLLM does on a CPU.
    experts, generator = shape["num_experts"], torch.Generator().manual_seed(0)
    busiest = sum(float(i.flatten().bincount(minlength=experts).max()) * experts / i.numel() for i in layers)
    found = {}
    for count in counts:
        draws = [i[torch.randperm(len(i), generator=generator)[:count]] for i in layers for _ in range(4)]
        share = sum(len(draw.unique()) for draw in draws) / len(draws) / experts
        found[count] = {"experts_share": share, "busiest": busiest / len(layers)}
    return found


def plan_of(shape: dict[str, Any], recipe: Recipe) -> tuple[Plan, torch.nn.Module]:
    """The recipe on the shape, and the shape's model without weights."""
    with torch.device("meta"):
        config = AutoConfig.for_model("qwen3_moe", **shape)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    return resolve(recipe, model), model


def draw_weights() -> None:
    """From now on vLLM's dummy loader draws weights that a model could have, in every precision alike."""
    from vllm.model_executor.model_loader import dummy_loader

    dummy_loader.initialize_dummy_weights = lambda model, *_: [
        draw(value, name) for name, value in model.state_dict().items()
    ]
    dummy_loader.initialize_single_dummy_weight = draw


@torch.no_grad()
def draw(value: torch.Tensor, name: str = "") -> None:
    """Matrices N(0, 0.02^2), norms and scales 1, 4-bit codes of any value under scales that make them 0.02 too."""
    if value.is_meta:
        return  # Drawn when vLLM makes it, layer by layer.
    if value.dtype == torch.uint8:
        value.random_(0, 256)
    elif name.endswith("weight_global_scale"):
        value.fill_(CODES_RMS / DEVIATION)  # A divisor.
    elif value.dim() < 2 or name.endswith("scale"):
        value.fill_(1.0)
    elif value.dtype == torch.float8_e4m3fn:
        # What vLLM has encoded already and comes by again, as another module's: its scales are 1 by now.
        value.copy_(torch.empty_like(value, dtype=torch.float32).normal_(0.0, DEVIATION))
    elif value.is_floating_point():
        value.normal_(0.0, DEVIATION)


def engine_options(
    folder: Path, shape: dict[str, Any], arguments: argparse.Namespace, plan: Plan, model: torch.nn.Module
) -> dict[str, Any]:
    """Arguments of vLLM's LLM for random weights of the shape, whose config is written to `folder`."""
    config = AutoConfig.for_model(
        "qwen3_moe", architectures=["Qwen3MoeForCausalLM"], dtype="bfloat16", **shape
    )
    config.save_pretrained(folder)
    options: dict[str, Any] = {
        "load_format": "dummy", "skip_tokenizer_init": True, "max_model_len": 256, "max_num_seqs": 256,
        "enable_prefix_caching": False, "seed": 0, "max_num_batched_tokens": 4096,
    }  # fmt: skip
    if torch.cuda.is_available():
        graphs = {
            "mode": 0,
            "cudagraph_mode": "FULL_DECODE_ONLY",
            "cudagraph_capture_sizes": arguments.sequences,
        }
        options |= {"compilation_config": graphs, "kernel_config": {"enable_flashinfer_autotune": False},
                    "kv_cache_memory_bytes": 4 << 30, "gpu_memory_utilization": 0.1}  # fmt: skip
    else:
        options |= {"enforce_eager": True, "kv_cache_memory_bytes": 1 << 27}
    if arguments.variant == "stock fp8":
        options["quantization"] = "fp8"
    if arguments.variant == "stock nvfp4":
        from lowbitrl.checkpoints.config import compressed_tensors_config

        options["hf_overrides"] = {"quantization_config": compressed_tensors_config(plan, model)}
    return options


def start(
    folder: Path, arguments: argparse.Namespace, plan: Plan, options: dict[str, Any]
) -> tuple[Any, str]:
    """A vLLM, ours or stock, and what multiplies in it as far as it says."""
    if arguments.variant in OURS:
        from lowbitrl.rollout.vllm.engine import VllmEngine

        engine = VllmEngine(folder, plan, **options)
        return engine, engine.summary()
    from vllm import LLM

    return LLM(model=str(folder), **options), "stock"


def step_bytes(plan: Plan, hit: float) -> float:
    """Bytes of weights that one decode step reads when it hits this share of each layer's experts."""
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
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    (out / "decode.json").write_text(json.dumps({"rows": rows, "environment": environment(device)}, indent=1))
    with (out / "decode.csv").open("w", newline="") as file:
        writer = csv.DictWriter(file, COLUMNS, extrasaction="ignore")
        writer.writeheader()
        writer.writerows(row for row in rows if "sequences" in row)
    rate = {(r["variant"], r["sequences"]): r["tokens_per_second"] for r in rows if "sequences" in r}
    bench = Bench("vllm", COMMAND)
    for what, ours, other, goal in goals():
        if ours in rate and other in rate:
            bench.find(what, rate[ours] / rate[other], at_least=goal)
    for row in rows:
        if "update_seconds" in row:
            least, limit = min(row["update_seconds"]), row["update_limit_seconds"]
            bench.find(UPDATE, limit / least, at_least=0.5)
    merge_findings(out / "summary.json", bench.findings)


def goals() -> list[tuple[str, tuple[str, int], tuple[str, int], float]]:
    """(what, ours, other, least ratio of their tokens a second); ours and other with their number of sequences."""
    pairs = [
        ("ours nvfp4-w4a16", "stock nvfp4", 1.0, (16, 64, 256)),
        ("ours nvfp4 residual 0.5", "ours nvfp4", 0.91, (16, 64, 256)),
        ("ours nvfp4 residual 0.5", "stock fp8", 1.16, (16, 64)),
    ]
    return [
        (f"{ours} over {other}, tokens/s at {count} sequences", (ours, count), (other, count), goal)
        for ours, other, goal, counts in pairs
        for count in counts
    ]


def say_unmeasured(out: Path) -> None:
    """Rows for the goals that no call has measured."""
    wanted = {what: f"at least {goal:g}" for what, _, _, goal in goals()} | {UPDATE: "at least 0.5"}
    there = {row["what"] for row in json.loads((out / "summary.json").read_text())}
    missing = [
        Finding(what, "not run", goal, False, COMMAND) for what, goal in wanted.items() if what not in there
    ]
    merge_findings(out / "summary.json", missing)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*STOCK, *OURS]
    parser.add_argument("--variant", choices=names, help="one alone, in this process")
    parser.add_argument("--variants", nargs="+", choices=names, default=BY_WORTH, help="in this order")
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for one variant")
    parser.add_argument("--unmeasured", action="store_true", help="only say which goals no call has measured")
    parser.add_argument("--lock", type=Path, help="file to lock while on the device")
    parser.add_argument("--rows", type=Path, default=Path("rows.json"), help="where one variant's rows go")
    parser.add_argument("--sequences", type=int, nargs="+", default=[16, 64, 256])
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=Path("results/h200-vllm"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
