"""The engine protocol over HTTP: a `vllm serve` that we start and watch, or one that is running already.

Buckets travel as files in shared memory, so the server's workers run on this host. vLLM shows the routes that
updates need in its development mode only, where whoever reaches the port controls the server: it is bound to
this host.
"""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbitrl.quant import Plan
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm.engine import EXTENSION, check_request, refuse_static
from lowbitrl.rollout.vllm.planned import QUANT_METHOD, to_file
from lowbitrl.rollout.vllm.requests import finish_reason, sampling_fields, seed_of
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.rollout.vllm.sending import BUCKET_BYTES, send
from lowbitrl.sync.manifest import Manifest

START_SECONDS = 900.0  # A first start compiles kernels and captures graphs.
CONNECTIONS = 64


class VllmServer:
    """A `vllm serve` process of ours.

    Args:
        model: checkpoint folder or hub id. plan: the learner's. arguments: further flags of `vllm serve`.

    Raises:
        RuntimeError: it ends, or does not answer in time; the end of its log is in the message.
    """

    def __init__(
        self, model: str | Path, plan: Plan, dtype: str = "bfloat16", arguments: Sequence[str] = (),
        seconds: float = START_SECONDS,
    ) -> None:  # fmt: skip
        refuse_static(plan)
        self._scratch = tempfile.TemporaryDirectory(prefix="lowbitrl-serve-")
        folder = Path(self._scratch.name)
        self.log = folder / "log.txt"
        port = _free_port()
        self.url = f"http://127.0.0.1:{port}"
        flags = {
            "--host": "127.0.0.1",
            "--port": str(port),
            "--dtype": dtype,
            "--quantization": QUANT_METHOD,
            "--hf-overrides": json.dumps({"quantization_config": to_file(plan, folder / "plan.json")}),
            "--weight-transfer-config": json.dumps({"backend": QUANT_METHOD}),
            "--worker-extension-cls": EXTENSION,
            "--logprobs-mode": "processed_logprobs",
            "--served-model-name": "policy",
        }
        on_cpu = [] if torch.cuda.is_available() else ["--enforce-eager", "--no-enable-chunked-prefill"]
        # Not the command `vllm serve`: it asks for the version of a distribution called vllm, which a CPU build is not.
        command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", "--model", str(model)]
        command += [part for pair in flags.items() for part in pair] + on_cpu + list(arguments)
        with self.log.open("w") as log:
            self.process = subprocess.Popen(
                command, stdout=log, stderr=log, env=os.environ | {"VLLM_SERVER_DEV_MODE": "1"}
            )
        try:
            self._wait(seconds)
        except BaseException:
            self.close()
            raise

    def _wait(self, seconds: float) -> None:
        last = time.monotonic() + seconds
        while not is_healthy(self.url):
            if self.process.poll() is not None or time.monotonic() > last:
                state = "runs but does not answer" if self.process.poll() is None else "ended"
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"vllm serve {state} after at most {seconds:.0f} s; the end of its log:\n{tail}"
                )
            time.sleep(0.5)

    def close(self) -> None:
        """End the process."""
        self.process.terminate()
        try:
            self.process.wait(30)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._scratch.cleanup()


def is_healthy(url: str) -> bool:
    """Whether a server answers and says that its engine lives."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return answer.status == 200
    except OSError:
        return False


class VllmServerEngine:
    """Samples from a vLLM server under a plan.

    Args:
        url: of a server started with the plan, by `VllmServer` or by hand with the same flags.
        stop_token_ids: what ends a completion where `Sampling` names none; the model's own.
        model: the name it is served by.

    Raises:
        ConnectionError: no healthy server is there. ValueError: it wears another plan.
    """

    def __init__(
        self, url: str, plan: Plan, stop_token_ids: Sequence[int], model: str = "policy",
        bucket_bytes: int = BUCKET_BYTES,
    ) -> None:  # fmt: skip
        if not is_healthy(url):
            raise ConnectionError(f"no healthy vLLM answers at {url}/health; start one, or give another url")
        self.url, self.plan, self.model, self.bucket_bytes = url.rstrip("/"), plan, model, bucket_bytes
        self.version = -1
        self._eos = tuple(stop_token_ids)
        self.report: dict[str, Any] = self._rpc("lowbitrl_report")
        if self.report["digest"] != plan.digest:
            raise ValueError(
                f"the server at {url} wears plan {self.report['digest']}, the learner {plan.digest}; restart it with "
                "the learner's plan"
            )

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Sample n completions of each prompt, ordered by prompt, then sample; see `Engine.generate`."""
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        check_request(self.version, prompts, n, seeds)

        def one(pair: tuple[int, int]) -> Completion:
            prompt, sample = pair
            fields = sampling_fields(sampling, seed_of(seeds[prompt], sample), self._eos)
            del fields["detokenize"]
            choice = self._complete(list(prompts[prompt]), fields | {"return_token_ids": True})
            tokens, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
            return Completion(
                prompt, sample, tokens, logprobs, finish_reason(choice["finish_reason"]), self.version
            )

        with ThreadPoolExecutor(CONNECTIONS) as pool:
            return list(pool.map(one, [(p, j) for p in range(len(prompts)) for j in range(n)]))

    def score(self, sequences: Sequence[Sequence[int]], temperature: float = 1.0) -> list[Tensor]:
        """Log-probability of each token after the first, (len - 1,) fp32, by a prefill pass.

        Raises:
            ValueError: a temperature: vLLM scores prompts without, and whole rows are too much for HTTP.
        """
        if temperature not in (0.0, 1.0):
            raise ValueError(
                f"temperature={temperature}: a server scores prompts at 1 only; score in process"
            )
        fields = {"max_tokens": 1, "temperature": 0.0, "prompt_logprobs": 0}
        rows = [self._complete(list(s), fields)["prompt_logprobs"] for s in sequences]
        return [
            torch.tensor([row[str(token)]["logprob"] for row, token in zip(found[1:], s[1:], strict=True)])
            for found, s in zip(rows, sequences, strict=True)
        ]

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Serve a new version, whole or not at all; the prefix cache goes with the old one.

        Raises:
            ValueError: what a worker refuses it for; the old version is then still served.
        """
        send(_OverHttp(self), stream, manifest_data(manifest), by_file=True, bucket_bytes=self.bucket_bytes)
        self.version = manifest.version
        self._post("/reset_prefix_cache", {})

    def state(self) -> dict[str, int]:
        """Checksums of everything that is served."""
        return self._rpc("lowbitrl_state")

    def control(self, method: str, **arguments: Any) -> None:
        """Call one of vLLM's update methods on every worker; ValueError with what it refuses."""
        answer = self._rpc("lowbitrl_control", step=method, arguments=arguments)
        if answer["error"]:
            raise ValueError(answer["error"])

    def _rpc(self, name: str, **kwargs: Any) -> dict[str, Any]:
        answers = self._post("/collective_rpc", {"method": name, "kwargs": kwargs})["results"]
        # One a worker: an error of any is an error.
        return next((a for a in answers if a.get("error")), answers[0])

    def _complete(self, prompt: list[int], fields: dict[str, Any]) -> dict[str, Any]:
        return self._post("/v1/completions", {"model": self.model, "prompt": prompt, **fields})["choices"][0]

    def _post(self, route: str, body: dict[str, Any]) -> Any:
        request = urllib.request.Request(
            self.url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:1000]
            raise RuntimeError(f"{self.url}{route} answered {error.code}: {detail}") from error
        return json.loads(text) if text else None


class _OverHttp:
    """`sending.Control` over a server."""

    def __init__(self, engine: VllmServerEngine) -> None:
        self._engine = engine

    def start(self) -> None:
        self._engine.control("start_weight_update")

    def update(self, info: dict[str, Any]) -> None:
        self._engine.control("update_weights", update_info=info)

    def finish(self, version: int) -> None:
        self._engine.control("finish_weight_update")


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
