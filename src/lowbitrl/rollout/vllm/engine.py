"""VllmEngine: the engine protocol on a vLLM in this process ("colocated"), fed live with published bytes.

log-probabilities   vLLM's processed ones: after temperature, of the sampled token
versions            generate() ends before an update begins, so a completion has one version; vLLM's own
                    stamps, where it keeps them, are checked against it
prefix cache        reset by every update, since its keys know tokens and not weights
process             vLLM's engine core runs inside this process; what it changes here (torch's thread setting,
                    the random states) is put back
"""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lowbitrl.quant import Plan
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm import compat
from lowbitrl.rollout.vllm.inflight import Policy
from lowbitrl.rollout.vllm.planned import QUANT_METHOD, to_config
from lowbitrl.rollout.vllm.requests import (
    check_request,
    completion_of,
    prompt_logprobs,
    sample_params,
    score_params,
    seed_of,
)
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.rollout.vllm.sending import BUCKET_BYTES, send
from lowbitrl.sync.manifest import Manifest
from lowbitrl.watch import beat

EXTENSION = "lowbitrl.rollout.vllm.transfer.WorkerExtension"


# vLLM rewinds the generator of a seeded request whose prefill is cut in two, which CPU generators cannot.
CPU = {"enforce_eager": True, "enable_chunked_prefill": False}
# A step that is scheduled before the one before it has ended would sample by weights it was not counted to. A cache
# that running requests hold cannot be reset.
IN_FLIGHT: dict[Policy, dict[str, Any]] = {
    "finish": {},
    "resume": {"async_scheduling": False},
    "mix": {"async_scheduling": False, "enable_prefix_caching": False},
}


class VllmEngine:
    """Samples with vLLM under a plan.

    Args:
        model: checkpoint folder or hub id, as vLLM loads it.
        plan: the learner's; resolved on the same model.
        dtype: compute dtype of both sides.
        bucket_bytes: about how much one message of an update holds.
        in_flight: what an update does to requests under way in an `inflight.Flight`; `generate` leaves none.
        options: further arguments of `vllm.LLM`, such as max_model_len or gpu_memory_utilization.

    Raises:
        ImportError: vLLM is not installed.
        ValueError: the plan is not this model's as vLLM builds it, or vLLM does not wear it.
    """

    def __init__(
        self,
        model: str | Path,
        plan: Plan,
        dtype: str = "bfloat16",
        bucket_bytes: int = BUCKET_BYTES,
        in_flight: Policy = "finish",
        **options: Any,
    ) -> None:
        refuse_static(plan)
        self.plan, self.in_flight = plan, in_flight
        self.version = -1
        self.bucket_bytes = bucket_bytes
        self.source: object = None  # what must live as long as this engine: a folder that it was loaded from
        self._spread = options.get("tensor_parallel_size", 1) > 1
        with _undisturbed():
            from vllm import LLM

            self.llm = LLM(model=str(model), dtype=dtype, **(_options(plan) | IN_FLIGHT[in_flight] | options))
        _beating(self.llm.llm_engine)
        self.eos = _stop_tokens(self.llm)
        self.llm.init_weight_transfer_engine({"init_info": {"digest": plan.digest}})
        self.report: dict[str, Any] = self.llm.collective_rpc("lowbitrl_report")[0]

    def summary(self) -> str:
        """What vLLM wears, as one line."""
        return summary(self.report)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Sample n completions of each prompt, ordered by prompt, then sample; see `Engine.generate`.

        Raises:
            ValueError: before the first update; an empty prompt; n < 1; a seed count that does not match.
            RuntimeError: vLLM stamped a completion with another version than is served.
        """
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        check_request(self.version, prompts, n, seeds)
        pairs = [(p, j) for p in range(len(prompts)) for j in range(n)]
        requests = [{"prompt_token_ids": list(prompts[p])} for p, _ in pairs]
        params = [sample_params(sampling, seed_of(seeds[p], j), self.eos) for p, j in pairs]
        outputs = self.llm.generate(requests, params, use_tqdm=False)
        return [
            completion_of(p, j, out.outputs[0], self.version)
            for (p, j), out in zip(pairs, outputs, strict=True)
        ]

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Log-probability of each token after the first, (len - 1,) fp32, by a prefill pass."""
        requests = [{"prompt_token_ids": list(s)} for s in sequences]
        outputs = self.llm.generate(requests, score_params(temperature), use_tqdm=False)
        return [
            prompt_logprobs(out.prompt_logprobs, s, temperature)
            for out, s in zip(outputs, sequences, strict=True)
        ]

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Serve a new version, whole or not at all; the prefix cache goes with the old one.

        Raises:
            ValueError: another plan's version, or a stream that is not exactly the manifest's; the old
                version is then still served.
        """
        control = _AcrossWorkers(self.llm) if self._spread else _InProcess(self.llm)
        send(control, stream, manifest_data(manifest), by_file=self._spread, bucket_bytes=self.bucket_bytes)
        self.version = manifest.version
        if self.in_flight != "mix" and not self.llm.reset_prefix_cache():
            raise RuntimeError("vLLM kept its prefix cache across an update: requests are still running")

    def state(self) -> dict[str, int]:
        """Checksums of everything that is served, by the first rank."""
        return self.states()[0]

    def states(self) -> list[dict[str, int]]:
        """Checksums of everything that each rank serves."""
        return self.llm.collective_rpc("lowbitrl_state")

    def sleep(self, level: int = 1) -> None:
        """Give memory to the learner: 1 keeps weights on the host, 2 drops them (an update must follow).

        vLLM on a CPU has nothing to give and only says so in its log.
        """
        self.llm.sleep(level=level)
        if level > 1:
            self.version = -1

    def wake(self) -> None:
        """Take the memory back."""
        self.llm.wake_up()

    def close(self) -> None:
        """Shut vLLM down and let its memory go."""
        self.llm.llm_engine.engine_core.shutdown()
        del self.llm


def score_stock(
    checkpoint: str | Path, sequences: Sequence[Sequence[int]], dtype: str, **options: Any
) -> list[Tensor]:
    """`VllmEngine.score` at temperature 1 by vLLM alone, on a quantized checkpoint, through its own kernels."""
    with _undisturbed():
        from vllm import LLM

        eager = {"enforce_eager": not torch.cuda.is_available()}
        llm = LLM(model=str(checkpoint), dtype=dtype, **(eager | options))
    outputs = llm.generate(
        [{"prompt_token_ids": list(s)} for s in sequences], score_params(1.0), use_tqdm=False
    )
    scores = [prompt_logprobs(o.prompt_logprobs, s, 1.0) for o, s in zip(outputs, sequences, strict=True)]
    llm.llm_engine.engine_core.shutdown()
    return scores


class _InProcess:
    """`sending.Control` over an LLM object."""

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def start(self) -> None:
        self._llm.start_weight_update()

    def update(self, info: dict[str, Any]) -> None:
        self._llm.update_weights({"update_info": info})

    def finish(self, version: int) -> None:
        compat.finish_weight_update(self._llm, version)


class _AcrossWorkers:
    """`sending.Control` over an LLM object with several workers.

    Their refusals come back as text: an exception of one worker leaves the others' answers in vLLM's queues, and the
    next call would read those.
    """

    def __init__(self, llm: Any) -> None:
        self._llm = llm

    def _call(self, step: str, **arguments: Any) -> None:
        answers = self._llm.collective_rpc("lowbitrl_control", args=(step, arguments))
        for answer in answers:
            if answer["error"]:
                raise ValueError(answer["error"])

    def start(self) -> None:
        self._call("start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self._call("update_weights", update_info=info)

    def finish(self, version: int) -> None:
        self._call("finish_weight_update")
        compat.stamp(self._llm, version)


def summary(report: dict[str, Any]) -> str:
    """How many of vLLM's modules wear what, and what multiplies."""
    kinds = Counter(
        f"{w or 'bf16'}/{a or 'bf16'} by {kernel}" for w, a, _, kernel in report["modules"].values()
    )
    return f"vLLM wears plan {report['digest']}: " + ", ".join(f"{n} x {kind}" for kind, n in kinds.items())


def refuse_static(plan: Plan) -> None:
    """Raise where a plan has calibrated activation scales, which these workers do not take; ValueError."""
    static = [layer.name for layer in plan.layers if layer.static]
    if static:
        raise ValueError(
            f"{static[0]} has a static activation scale, which vLLM is not fed here; use activation_scale='token' or "
            "the embedded engine"
        )


def _options(plan: Plan) -> dict[str, Any]:
    return {
        "quantization": QUANT_METHOD,
        "hf_overrides": {"quantization_config": to_config(plan)},
        "weight_transfer_config": {"backend": QUANT_METHOD},
        "worker_extension_cls": EXTENSION,
        "logprobs_mode": "processed_logprobs",
        "max_logprobs": -1,
        "disable_log_stats": True,
        **({} if torch.cuda.is_available() else CPU),
    }


def _beating(engine: Any) -> None:
    """A sign of life for every step of vLLM's loop."""
    step = engine.step

    def beating_step() -> Any:
        beat()
        return step()

    engine.step = beating_step


def _stop_tokens(llm: Any) -> tuple[int, ...]:
    config = llm.llm_engine.model_config
    eos = config.try_get_generation_config().get("eos_token_id")
    eos = config.hf_text_config.eos_token_id if eos is None else eos
    return () if eos is None else (eos,) if isinstance(eos, int) else tuple(eos)


@contextmanager
def _undisturbed() -> Iterator[None]:
    """Start vLLM in this process, and put back what it changes of it."""
    threads, states = torch.set_num_threads, (random.getstate(), np.random.get_state(), torch.get_rng_state())
    before = os.environ.get("VLLM_ENABLE_V1_MULTIPROCESSING")
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"
    try:
        yield
    finally:
        torch.set_num_threads = threads
        random.setstate(states[0])
        np.random.set_state(states[1])
        torch.set_rng_state(states[2])
        if before is None:
            os.environ.pop("VLLM_ENABLE_V1_MULTIPROCESSING", None)
        else:
            os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = before
