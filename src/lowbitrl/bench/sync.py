"""A weight update part by part, in GB/s beside copy bandwidth: encode, checksum, transport, apply.

    encode      weights of all quantized linears to bytes, once
    publish     encode, a copy of what stays in BF16, checksums of everything: the publisher's whole part
    checksum    of the published tensors, where they lie; an engine does it once more to verify
    transport   by a file in shared memory, as vLLM's workers in other processes take it, and back to the device;
                the embedded engine takes tensors by reference and moves none
    apply       the embedded engine's update: verify, bytes to the addresses that graphs hold, decoded weights

Bytes are the fewest of each part: inputs read once, outputs written once. Host work and waits are in the times.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from safetensors.torch import load_file
from transformers import LlamaForCausalLM

from lowbitrl.quant import Recipe, attachment, forget_bytes, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.rollout.vllm.sending import send
from lowbitrl.sync.manifest import Manifest
from lowbitrl.sync.publisher import publish

from . import policy
from .record import Bench
from .timing import time_whole

FORMATS = ("nvfp4", "fp8", "int4")
LEAST_SHARE = 0.5
SAMPLES = 5


def run(bench: Bench) -> None:
    """Rows of each format's parts; publishing held to its share of copy bandwidth."""
    base = policy.build(bench.device)
    for rollout in FORMATS:
        time_update(bench, base, rollout)


def time_update(bench: Bench, base: LlamaForCausalLM, rollout: str) -> None:
    """Five rows of one format."""
    learner, served = policy.copies(base, 2)
    plan = prepare(learner, Recipe(rollout=rollout), "learner")
    prepare(served, plan, "rollout")
    engine, published = EmbeddedEngine(served), publish(learner, 0)
    quantized = sum(
        learner.get_parameter(name).nbytes for name in plan.by_parameter if _is_planned(plan, name)
    )
    whole = sum(p.nbytes for p in learner.parameters())
    out = sum(t.nbytes for t in published.tensors.values())
    codes = out - (whole - quantized)

    def row(part: str, nbytes: int, call: Callable[[], Any], backend: str = "auto") -> float:
        timing = time_whole(call, samples=SAMPLES)
        kept = bench.keep(
            f"{part} {rollout}", policy.shape_name(bench.device), timing, nbytes=nbytes, backend=backend,
            note=f"{nbytes / timing.p50 / 1e3:.1f} GB/s",
        )  # fmt: skip
        return kept.ratio

    row("encode", quantized + codes, lambda: _encode(learner))
    share = row("publish", whole + out, lambda: (forget_bytes(learner), publish(learner, 0)))
    row("checksum", out, lambda: Manifest.of(0, plan.digest, published.tensors))
    receiver = Receiver(bench.device)
    described = manifest_data(published.manifest)
    row("transport", 2 * out, lambda: send(receiver, published.stream(), described, by_file=True), "file")
    row("apply", 2 * out + quantized, lambda: engine.update(published.stream(), published.manifest))
    if bench.device == "cuda":
        what = f"publish 1B {rollout}, whole version: share of copy bandwidth"
        bench.find(what, share, at_least=LEAST_SHARE)


class Receiver:
    """The far end of a transport: loads what arrives to its device, keeps nothing."""

    def __init__(self, device: str) -> None:
        self.device = device

    def start(self) -> None:
        """Nothing to prepare."""

    def update(self, info: dict[str, Any]) -> None:
        """A bucket's file, or the manifest."""
        if "path" in info:
            load_file(Path(info["path"]), device=self.device)

    def finish(self, version: int) -> None:
        """Nothing to serve."""


def _encode(learner: LlamaForCausalLM) -> None:
    forget_bytes(learner)
    for group in attachment(learner).groups:
        group.encoded()


def _is_planned(plan: Any, name: str) -> bool:
    return bool(plan.by_parameter[name].weight)
