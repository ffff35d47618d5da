"""The engine protocol over HTTP: a `vllm serve` that we start and watch, or one that is running already.

Buckets travel as files in shared memory, so the server's workers run on this host. vLLM shows the routes that
updates need in its development mode only, where whoever reaches the port controls the server: it is bound to
this host.

A server of ours that dies, stops answering its health check, or keeps a request longer than `seconds` is killed
and started again, is given the version that it served, and gets the unanswered requests once more. A request's seed
goes with it, so its tokens are those it would have had.
"""

from __future__ import annotations

import http.client
import json
import sys
import tempfile
import urllib.error
import urllib.request
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor

from lowbitrl.quant import Plan
from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm.engine import EXTENSION, refuse_static, summary
from lowbitrl.rollout.vllm.planned import QUANT_METHOD, to_file
from lowbitrl.rollout.vllm.process import Server, flags, is_healthy
from lowbitrl.rollout.vllm.requests import check_request, finish_reason, sampling_fields, seed_of
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.rollout.vllm.sending import BUCKET_BYTES, send
from lowbitrl.sync.manifest import Manifest
from lowbitrl.sync.publisher import Publication, changed_codes

START_SECONDS = 900.0  # A first start compiles kernels and captures graphs.
REQUEST_SECONDS = 600.0
RESTARTS = 3
CONNECTIONS = 64
HEALTH_EVERY = 10.0  # seconds without an answer after which health is asked for
UNHEALTHY = 3

T = TypeVar("T")


class EngineLostError(RuntimeError):
    """A served engine died or hangs, and is not ours to restart, or was restarted too often."""


class VllmServer(Server):
    """A `vllm serve` process of ours.

    Args:
        model: checkpoint folder or hub id. plan: the learner's. arguments: further flags of `vllm serve`.

    Raises:
        RuntimeError: it ends, or does not answer in time; the end of its log is in the message.
    """

    def __init__(
        self, model: str | Path, plan: Plan, dtype: str = "bfloat16", arguments: Sequence[str] = (),
        seconds: float = START_SECONDS, environment: Mapping[str, str] | None = None,
    ) -> None:  # fmt: skip
        refuse_static(plan)
        self._folder = tempfile.TemporaryDirectory(prefix="lowbitrl-plan-")
        config = to_file(plan, Path(self._folder.name) / "plan.json")
        options = {
            "model": str(model),
            "host": "127.0.0.1",
            "dtype": dtype,
            "quantization": QUANT_METHOD,
            "hf-overrides": {"quantization_config": config},
            "weight-transfer-config": {"backend": QUANT_METHOD},
            "worker-extension-cls": EXTENSION,
            "logprobs-mode": "processed_logprobs",
            "served-model-name": "policy",
        }
        on_cpu = [] if torch.cuda.is_available() else ["--enforce-eager", "--no-enable-chunked-prefill"]
        # Not the command `vllm serve`: it asks for the version of a distribution called vllm, which a CPU build is not.
        command = [
            sys.executable,
            "-m",
            "vllm.entrypoints.openai.api_server",
            *flags(options),
            *on_cpu,
            *arguments,
        ]
        super().__init__(
            lambda port: [*command, "--port", str(port)],
            seconds,
            {"VLLM_SERVER_DEV_MODE": "1", **(environment or {})},
        )

    def close(self) -> None:
        """End the process."""
        super().close()
        self._folder.cleanup()


class VllmServerEngine:
    """Samples from a vLLM server under a plan.

    Args:
        server: one of ours, which is restarted when it is lost, or the url of one that was started with the plan by
            hand, with the flags of `VllmServer`.
        stop_token_ids: what ends a completion where `Sampling` names none; the model's own.
        model: the name it is served by.
        seconds: longest wait for the answer to a request; None waits for ever.
        restarts: of a call; the next loss raises.

    Raises:
        ConnectionError: no healthy server is there. ValueError: it wears another plan.
    """

    def __init__(
        self, server: Server | str, plan: Plan, stop_token_ids: Sequence[int], model: str = "policy",
        bucket_bytes: int = BUCKET_BYTES, seconds: float | None = REQUEST_SECONDS, restarts: int = RESTARTS,
    ) -> None:  # fmt: skip
        self.server = server if isinstance(server, Server) else None
        self.url = server.url if isinstance(server, Server) else server.rstrip("/")
        self.plan, self.model, self.bucket_bytes = plan, model, bucket_bytes
        self.seconds, self.restarts = seconds, restarts
        self.version = -1
        self.losses: list[str] = []
        self.source: object = None  # what must live as long as this engine: a folder that it was loaded from
        self._lost: dict[str, str] = {}  # urls that nobody need wait for any more, and why
        self._eos = tuple(stop_token_ids)
        # References, no copies: a publication's tensors are never written to.
        self._served: tuple[dict[str, Tensor], Manifest] | None = None
        self.report: dict[str, Any] = self._surely(self._meet)

    def summary(self) -> str:
        """What vLLM wears, as one line."""
        return summary(self.report)

    def generate(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> list[Completion]:
        """Sample n completions of each prompt, ordered by prompt, then sample; see `Engine.generate`.

        Raises:
            EngineLostError: the server was lost more than `restarts` times.
        """
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        check_request(self.version, prompts, n, seeds)
        pairs = [(p, j) for p in range(len(prompts)) for j in range(n)]
        done: dict[tuple[int, int], Completion] = {}

        def one(pair: tuple[int, int]) -> None:
            prompt, sample = pair
            fields = sampling_fields(sampling, seed_of(seeds[prompt], sample), self._eos)
            del fields["detokenize"]
            choice = self._complete(list(prompts[prompt]), fields | {"return_token_ids": True})
            tokens, logprobs = tuple(choice["token_ids"]), tuple(choice["logprobs"]["token_logprobs"])
            reason = finish_reason(choice["finish_reason"])
            done[pair] = Completion(prompt, sample, tokens, logprobs, reason, self.version)

        self._surely(lambda: self._all(one, [pair for pair in pairs if pair not in done]))
        return [done[pair] for pair in pairs]

    def _all(self, one: Callable[[tuple[int, int]], None], pairs: list[tuple[int, int]]) -> None:
        """Send every request; EngineLostError with the first that is lost, or when health checks fail."""
        pool = ThreadPoolExecutor(CONNECTIONS)
        try:
            waiting, unhealthy = {pool.submit(one, pair) for pair in pairs}, 0
            while waiting:
                ended, waiting = wait(waiting, HEALTH_EVERY, FIRST_EXCEPTION)
                for future in ended:
                    future.result()
                unhealthy = 0 if ended or is_healthy(self.url) else unhealthy + 1
                if unhealthy == UNHEALTHY:
                    raise self._loss(self.url, f"/health failed {UNHEALTHY} times in a row")
        finally:
            # Requests that hang end with the server; nobody waits for them.
            pool.shutdown(wait=False, cancel_futures=True)

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
        rows = self._surely(lambda: [self._complete(list(s), fields)["prompt_logprobs"] for s in sequences])
        return [
            torch.tensor([row[str(token)]["logprob"] for row, token in zip(found[1:], s[1:], strict=True)])
            for found, s in zip(rows, sequences, strict=True)
        ]

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> None:
        """Serve a new version, whole or not at all; the prefix cache goes with the old one.

        Raises:
            ValueError: what a worker refuses it for; the old version is then still served.
            EngineLostError: the server was lost more than `restarts` times.
        """
        tensors = dict(stream)
        self._surely(lambda: self._send(tensors, manifest))
        self._served = (tensors, manifest)

    def receive(
        self, pieces: Iterable[dict[str, Tensor]], version: int, plan_digest: str
    ) -> tuple[Manifest, float]:
        """Serve a version that comes a fused group or a parameter at a time.

        Each goes to the host as it comes: a server that is restarted needs the version once more.

        Returns, Raises:
            as `EmbeddedEngine.receive`; and as `update`, which leaves the old version served.
        """
        tensors = {n: t.detach().to("cpu", copy=True) for piece in pieces for n, t in piece.items()}
        before = Publication(*self._served) if self._served else None
        arrived = Publication(tensors, Manifest.of(version, plan_digest, tensors))
        self.update(arrived.stream(), arrived.manifest)
        return arrived.manifest, changed_codes(before, arrived)

    def _send(self, tensors: dict[str, Tensor], manifest: Manifest) -> None:
        data = manifest_data(manifest)
        send(_OverHttp(self), tensors.items(), data, by_file=True, bucket_bytes=self.bucket_bytes)
        self.version = manifest.version
        self._post("/reset_prefix_cache", {})

    def close(self) -> None:
        """End the server, if it is ours."""
        if self.server is not None:
            self.server.close()

    def _surely(self, call: Callable[[], T]) -> T:
        """`call`, again after a restart for each time that the server is lost in it."""
        for attempt in range(self.restarts + 1):
            try:
                if attempt:
                    self._restart()
                return call()
            except EngineLostError as error:
                self.losses.append(str(error))
                if self.server is None or attempt == self.restarts:
                    error.add_note(f"rollout.restarts is {self.restarts}; the server's own log may say why")
                    raise
        raise AssertionError("unreachable")

    def _restart(self) -> None:
        """Another server, with the version that was served."""
        assert self.server is not None
        try:
            self.server.restart()
            self.url = self.server.url
            self._lost.pop(self.url, None)
            self.report = self._meet()
        # Lost while it starts, which is a loss like any other.
        except RuntimeError as error:
            raise EngineLostError(str(error)) from error
        if self._served is not None:
            self._send(*self._served)

    def _meet(self) -> dict[str, Any]:
        """Ask the server what it wears."""
        if not is_healthy(self.url):
            if self.server is not None:
                raise self._loss(self.url, "/health gave no answer")
            raise ConnectionError(
                f"no healthy vLLM answers at {self.url}/health; start one, or give another url"
            )
        report = self._rpc("lowbitrl_report")
        if report["digest"] != self.plan.digest:
            raise ValueError(
                f"the server at {self.url} wears plan {report['digest']}, the learner {self.plan.digest}; restart it "
                "with the learner's plan"
            )
        return report

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
        url = self.url
        if url in self._lost:
            raise EngineLostError(self._lost[url])
        request = urllib.request.Request(
            url + route, json.dumps(body).encode(), {"Content-Type": "application/json"}
        )
        try:
            with urllib.request.urlopen(request, timeout=self.seconds) as answer:
                text = answer.read()
        except urllib.error.HTTPError as error:
            detail = error.read().decode(errors="replace")[:1000]
            answer_said = f"{route} answered {error.code}: {detail}"
            if error.code < 500 or is_healthy(url):
                raise RuntimeError(f"{url}{answer_said}") from error
            raise self._loss(url, answer_said) from error
        # Refused, reset, cut off, or silent for too long.
        except (OSError, http.client.HTTPException) as error:
            raise self._loss(url, f"{route} gave no answer: {error!r}") from error
        return json.loads(text) if text else None

    def _loss(self, url: str, why: str) -> EngineLostError:
        return EngineLostError(self._lost.setdefault(url, f"{url}{why}"))


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
