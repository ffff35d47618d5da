"""What the engine on vLLM promises, case by case on the device at hand; for an H200 and vLLM 0.26.

    python benchmarks/vllm_cases.py --model M          every case, several at once, each in a process of its own
    python benchmarks/vllm_cases.py --case graphs      one, here

    updates          eager, W4A16: three versions at the floor, refusals, buckets, memory, requests in flight resumed
    graphs           the same with CUDA graphs, requests in flight mixed
    experts          the same on a small mixture of experts
    fp8              FP8 on both sides
    residual         W4A4 with a residual: eager and graph-padded batches sample the same
    experts-residual the same on the mixture
    sleep            levels 1 and 2: what they free, and what is sampled afterwards
    server           `vllm serve`: updates over HTTP and shared memory

A step that fails is said and the next one goes on. Gaps are |log-probability at sampling - learner's|, (mean, max).
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowbitrl.bench.record import Bench, merge_findings
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm.engine import VllmEngine
from lowbitrl.rollout.vllm.inflight import Flight
from lowbitrl.rollout.vllm.server import VllmServer, VllmServerEngine
from lowbitrl.runs import environment
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.logprobs import response_logprobs

CUDA = torch.cuda.is_available()
DEVICE = "cuda" if CUDA else "cpu"
PROMPTS = [[5, 6, 7], [(7 * i) % 120 + 3 for i in range(70)], [9, 8, 7, 6], [44, 55], [101, 102, 103]]
KERNELS = {"enable_flashinfer_autotune": False}
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16]}
LIMITS = {"max_model_len": 256, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 28, "seed": 0}
if CUDA:
    LIMITS |= {"gpu_memory_utilization": 0.05, "kernel_config": KERNELS}
else:
    LIMITS |= {"block_size": 32}
EAGER: dict[str, Any] = {"enforce_eager": True}
WITH_GRAPHS: dict[str, Any] = {"enforce_eager": False, "compilation_config": GRAPHS} if CUDA else {}
EXPERTS = {
    "vocab_size": 1024, "hidden_size": 256, "intermediate_size": 256, "num_hidden_layers": 2, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 64, "num_experts": 16, "num_experts_per_tok": 4, "moe_intermediate_size": 128,
    "norm_topk_prob": True, "max_position_embeddings": 512, "eos_token_id": 2, "initializer_range": 0.1,
}  # fmt: skip
W4A16, W4A4 = Recipe(rollout="nvfp4-w4a16"), Recipe(rollout="nvfp4", residual=0.5)
UPDATES = 30
CASES = "cases"
"""Folder of their findings, beside the summary."""


class Case:
    """One case under way: a learner and an engine, and what was found of them."""

    def __init__(self, name: str, model: str, out: Path) -> None:
        self.name, self.model, self.out = name, model, out
        self.found: dict[str, Any] = {
            "case": name,
            "failed": {},
            "environment": environment(torch.device(DEVICE)),
        }
        self.began = time.perf_counter()
        self.done: list[Completion] = []

    def step(self, name: str, call: Callable[..., Any], *arguments: Any, **options: Any) -> bool:
        """Do one thing, keep what it returns; False where it failed, with the reason kept."""
        try:
            self.found[name] = call(*arguments, **options)
            said = json.dumps(self.found[name], default=str)[:400]
        except BaseException as error:
            self.found["failed"][name] = traceback.format_exc()[-3000:]
            said = f"FAILED: {type(error).__name__}: {str(error)[:600]}"
        self.found["seconds"] = time.perf_counter() - self.began
        print(f"[{self.name} {self.found['seconds']:.1f}] {name} {said}", flush=True)
        (self.out / CASES / f"{self.name}.json").write_text(json.dumps(self.found, indent=1, default=str))
        return name not in self.found["failed"]

    def start(self, recipe: Recipe, **options: Any) -> str:
        """A learner and an engine that wears its plan."""
        self.load(recipe)
        self.engine = VllmEngine(self.model, self.plan, **(LIMITS | options))
        return self.engine.summary()

    def load(self, recipe: Recipe) -> None:
        """The learner and its plan."""
        model = AutoModelForCausalLM.from_pretrained(self.model, dtype=torch.bfloat16)
        self.learner = model.to(DEVICE).eval()  # type: ignore[arg-type]
        self.plan = prepare(self.learner, recipe, "learner")

    @torch.no_grad()
    def train(self) -> None:
        """Stands for an optimizer step."""
        for parameter in self.learner.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.003)

    def push(self, version: int) -> dict[str, float]:
        """Publish, serve; seconds of the update alone."""
        published = publish(self.learner, version)
        began = _now()
        self.engine.update(published.stream(), published.manifest)
        size = sum(t.nbytes for t in published.tensors.values())
        return {"seconds": _now() - began, "bytes": size}

    def gap(self, temperature: float = 1.0) -> dict[str, float]:
        """Sample 24 tokens of every prompt and score them by the learner."""
        self.done = self.engine.generate(PROMPTS, 1, Sampling(max_tokens=24, temperature=temperature))
        return self.against(self.done, temperature)

    @torch.no_grad()
    def against(
        self, done: Sequence[Completion], temperature: float = 1.0, version: int | None = None
    ) -> dict[str, float]:
        """Gap to the learner, of tokens that `version` sampled (None: all)."""
        prompts = [PROMPTS[c.prompt_index] for c in done]
        rows, _ = response_logprobs(
            self.learner, prompts, [list(c.token_ids) for c in done], temperature=temperature
        )
        gaps = []
        for row, c in zip(rows, done, strict=True):
            apart = (row[: len(c.token_ids)].float().cpu() - torch.tensor(c.rollout_logprobs)).abs()
            kept = [version is None or v == version for v in c.token_versions or [c.version] * len(apart)]
            gaps.append(apart[torch.tensor(kept)])
        every = torch.cat(gaps)
        return {"mean": float(every.mean()), "max": float(every.max()), "tokens": every.numel()}

    def prefill(self) -> dict[str, float]:
        """Gap of the engine's own score of what it sampled last."""
        whole = [PROMPTS[c.prompt_index] + list(c.token_ids) for c in self.done]
        rows = zip(self.engine.score(whole), self.done, strict=True)
        apart = torch.cat(
            [row[-len(c.token_ids) :].cpu() - torch.tensor(c.rollout_logprobs) for row, c in rows]
        )
        return {"mean": float(apart.abs().mean()), "max": float(apart.abs().max())}

    def refusal(self, kind: str) -> str:
        """Send a broken version: what is said, once the state is seen to be the old one."""
        before, published = self.engine.state(), publish(self.learner, 99)
        tensors, manifest = dict(published.tensors), published.manifest
        name = next(n for n in tensors if n.endswith("qdata") or "mlp" in n)
        if kind == "missing":
            del tensors[name]
        elif kind == "checksum":
            tensors[name] = tensors[name].clone()
            tensors[name].view(-1).view(torch.uint8)[0] ^= 1
        elif kind == "digest":
            manifest = dataclasses.replace(manifest, plan_digest="0" * 16)
        stream = _dying(tensors) if kind == "killed" else iter(tensors.items())
        try:
            self.engine.update(stream, manifest)
        except (ValueError, RuntimeError, KeyboardInterrupt) as error:
            if self.engine.state() != before:
                raise AssertionError(f"{kind}: refused, but the state has changed") from error
            return str(error)[:200]
        raise AssertionError(f"{kind}: served")

    def buckets(self) -> bool:
        """Whether a version in buckets of one tensor leaves the state that one bucket left."""
        before, self.engine.bucket_bytes = self.engine.state(), 1
        self.push(3)
        self.engine.bucket_bytes = 1 << 30
        if self.engine.state() != before:
            raise AssertionError("one bucket and many leave different states")
        return True

    def memory(self) -> dict[str, float]:
        """Growth of the device's allocated memory over updates, and their seconds."""
        held, seconds = [], []
        for version in range(UPDATES):
            seconds.append(self.push(100 + version)["seconds"])
            held.append(torch.cuda.memory_allocated() if CUDA else 0)
        return {"grown": held[-1] - held[5], "median seconds": sorted(seconds)[UPDATES // 2]}

    def flight(self) -> dict[str, Any]:
        """An update over requests under way."""
        flight = Flight(self.engine)
        flight.add(PROMPTS, 1, Sampling(max_tokens=16))
        done = [c for _ in range(6) for c in flight.step()]
        self.train()
        published = publish(self.learner, 200)
        done += flight.update(published.stream(), published.manifest) + flight.drain()
        versions = sorted({tuple(sorted(set(c.token_versions or ()))) for c in done})
        return {
            "policy": self.engine.in_flight,
            "versions": versions,
            "new": self.against(done, version=200),
        }

    def nap(self, level: int) -> int:
        """Bytes that sleep frees."""
        before = torch.cuda.mem_get_info()[0] if CUDA else 0
        self.engine.sleep(level)
        freed = (torch.cuda.mem_get_info()[0] if CUDA else 0) - before
        self.engine.wake()
        return freed


def _dying(tensors: dict[str, torch.Tensor]) -> Iterator[tuple[str, torch.Tensor]]:
    yield from list(tensors.items())[: len(tensors) // 2]
    raise KeyboardInterrupt("the publisher dies here")


def _now() -> float:
    if CUDA:
        torch.cuda.synchronize()
    return time.perf_counter()


def life(case: Case, recipe: Recipe, **options: Any) -> None:
    """Versions, refusals, buckets, memory, and requests in flight where a policy is asked for."""
    if not case.step("start", case.start, recipe, **options):
        return
    for version in range(3):
        case.step(f"update {version}", case.push, version)
        case.step(f"gap {version}", case.gap)
        case.train()
    case.step("update", case.push, 3)
    case.step("gap at temperature 0.7", case.gap, 0.7)
    case.step("gap", case.gap)
    case.step("prefill", case.prefill)
    for kind in ("missing", "checksum", "digest", "killed"):
        case.step(f"refusal: {kind}", case.refusal, kind)
    case.step("buckets", case.buckets)
    case.step("memory", case.memory)
    case.step("gap after all", case.gap)
    if "in_flight" in options:
        case.step("flight", case.flight)


def padded(case: Case, recipe: Recipe) -> None:
    """Five requests, eager and in graphs of eight: the residual's channels, hence the samples, are the same."""
    kept = []
    for name, options in (("eager", EAGER), ("graph", WITH_GRAPHS)):
        if not case.step(f"{name}: start", case.start, recipe, **options):
            continue
        case.step(f"{name}: update", case.push, 0)
        if case.step(f"{name}: gap", case.gap):
            kept.append(case.done)
        case.train()
        case.step(f"{name}: update again", case.push, 1)
        case.step(f"{name}: gap again", case.gap)
        case.step(f"{name}: close", case.engine.close)
    if len(kept) == 2:
        case.step("eager against graph", _between, *kept)


def _between(one: Sequence[Completion], other: Sequence[Completion]) -> dict[str, Any]:
    apart = []
    for a, b in zip(one, other, strict=True):
        rows = zip(a.token_ids, b.token_ids, a.rollout_logprobs, b.rollout_logprobs, strict=False)
        for i, j, x, y in rows:
            apart.append(abs(x - y))
            if i != j:
                break  # From here on the texts differ.
    same = [a.token_ids == b.token_ids for a, b in zip(one, other, strict=True)]
    return {"same samples": same, "mean": sum(apart) / len(apart), "max": max(apart), "tokens": len(apart)}


def sleeping(case: Case) -> None:
    """Both levels; after the second the weights are gone until an update."""
    if not case.step("start", case.start, W4A16, enable_sleep_mode=CUDA, **WITH_GRAPHS):
        return
    case.step("update", case.push, 0)
    case.step("gap", case.gap)
    before = case.done
    for level in (1, 2):
        case.step(f"bytes freed at level {level}", case.nap, level)
        if level == 2:
            case.step("update after it", case.push, 1)
        if case.step(f"gap after level {level}", case.gap):
            case.step(f"level {level} against before", _between, before, case.done)


def served(case: Case) -> None:
    """The engine over HTTP."""
    case.load(W4A16)
    options = {k.replace("_", "-"): v for k, v in (LIMITS | WITH_GRAPHS).items() if k != "enforce_eager"}
    flags = [f for k, v in options.items() for f in (f"--{k}", v if isinstance(v, str) else json.dumps(v))]
    with contextlib.ExitStack() as stack:

        def serve() -> float:
            began = time.perf_counter()
            server = VllmServer(case.model, case.plan, "bfloat16", flags, seconds=150)
            stack.callback(server.close)
            case.engine = VllmServerEngine(server, case.plan, (2,))  # type: ignore[assignment]
            return time.perf_counter() - began

        if case.step("start", serve):
            for version in range(2):
                case.step(f"update {version}", case.push, version)
                case.step(f"gap {version}", case.gap)
                case.train()
            case.step("refusal: digest", case.refusal, "digest")


DENSE: dict[str, Callable[[Case], None]] = {
    "updates": lambda c: life(c, W4A16, in_flight="resume", **EAGER),
    "graphs": lambda c: life(c, W4A16, in_flight="mix", **WITH_GRAPHS),
    "fp8": lambda c: life(c, Recipe(rollout="fp8"), **WITH_GRAPHS),
    "residual": lambda c: padded(c, W4A4),
    "sleep": sleeping,
    "server": served,
}
MIXTURE: dict[str, Callable[[Case], None]] = {
    "experts": lambda c: life(c, W4A16, skip_tokenizer_init=True, **WITH_GRAPHS),
    "experts-residual": lambda c: padded(c, W4A4),
}


def main() -> None:
    """Run one case, or all of them beside each other, and hold what they found to its goals."""
    arguments = parse()
    (arguments.out / CASES).mkdir(parents=True, exist_ok=True)
    if arguments.judge:
        judge(arguments.out)
    elif arguments.case:
        with tempfile.TemporaryDirectory() as folder:
            model = mixture(Path(folder)) if arguments.case in MIXTURE else arguments.model
            case = Case(arguments.case, model, arguments.out)
            case.step("all", (DENSE | MIXTURE)[arguments.case], case)
        sys.stdout.flush()
        os._exit(bool(case.found["failed"]))  # vLLM's threads may keep a process that has said all.
    else:
        with ThreadPoolExecutor(arguments.at_once) as pool:
            list(pool.map(lambda name: child(name, arguments), arguments.cases))
        judge(arguments.out)


def child(name: str, arguments: argparse.Namespace) -> None:
    """One case in a process of its own; its words in a file beside its findings."""
    command = [
        sys.executable,
        __file__,
        "--case",
        name,
        "--model",
        arguments.model,
        "--out",
        str(arguments.out),
    ]
    with (
        (arguments.out / CASES / f"{name}.log").open("w") as log,
        contextlib.suppress(subprocess.TimeoutExpired),
    ):
        subprocess.run(command, stdout=log, stderr=log, check=False, timeout=arguments.limit)
    for line in (arguments.out / CASES / f"{name}.log").read_text().splitlines():
        if line.startswith(f"[{name} "):
            print(line[:300], flush=True)


def mixture(folder: Path) -> str:
    """A small random mixture of experts on disk."""
    torch.manual_seed(0)
    config = AutoConfig.for_model("qwen3_moe", **EXPERTS)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(folder)
    return str(folder)


def judge(out: Path) -> None:
    """How many of the cases ended with nothing failed, into `out`'s summary."""
    cases = {path.stem: json.loads(path.read_text()) for path in sorted((out / CASES).glob("*.json"))}
    whole = sum("all" in case and not case["failed"] for case in cases.values())
    bench = Bench("vllm", "python benchmarks/vllm_cases.py")
    bench.find("cases of the vLLM engine that ended with every step as it should be", whole,
               at_least=len(DENSE | MIXTURE))  # fmt: skip
    for name, case in cases.items():
        if "memory" in case:
            size, memory = case["update"]["bytes"] / 1e6, case["memory"]
            what = f"{name}: {UPDATES} live updates of {size:.0f} MB"
            bench.find(f"{what}, seconds (median)", memory["median seconds"], at_most=1.0, unit="s")
            bench.find(f"{what}, growth of allocated memory, bytes", memory["grown"], at_most=0)
    merge_findings(out / "summary.json", bench.findings)


def parse() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    names = [*DENSE, *MIXTURE]
    parser.add_argument(
        "--model",
        required="--judge" not in sys.argv,
        help="folder of a small dense checkpoint with its tokenizer",
    )
    parser.add_argument("--case", choices=names)
    parser.add_argument("--cases", nargs="+", choices=names, default=names)
    parser.add_argument("--at-once", type=int, default=1)
    parser.add_argument("--limit", type=float, default=300.0, help="seconds for a case")
    parser.add_argument("--judge", action="store_true", help="only count what an earlier call found")
    parser.add_argument("--out", type=Path, default=Path("results/h200-vllm"))
    return parser.parse_args()


if __name__ == "__main__":
    main()
