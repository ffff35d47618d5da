"""Requests that an update of the weights may find unfinished, and the version that sampled each of their tokens.

    "finish"   an update waits until all of them have ended: a completion has one version
    "resume"   they are aborted; what they sampled stays, and goes to the new weights as a prompt: every token's
               log-probability is that of one version over the whole text before it
    "mix"      they go on over the keys and values of the old weights: a token's log-probability is that of its
               version over a cache that older ones wrote, which no learner can recompute

Tokens are handed out a step at a time by a vLLM that schedules one step at a time, so the version that is served when
a token arrives is the one that sampled it. Where vLLM stamps outputs itself, its stamps must agree.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from lowbitrl.rollout.types import Completion, Sampling
from lowbitrl.rollout.vllm import compat
from lowbitrl.rollout.vllm.requests import check_request, finish_reason, sample_params, seed_of
from lowbitrl.sync.manifest import Manifest

if TYPE_CHECKING:
    from lowbitrl.rollout.vllm.engine import VllmEngine

Policy = Literal["finish", "resume", "mix"]


@dataclass
class _Request:
    """One sample under way: all its tokens, and how many of them an earlier request of vLLM's gave."""

    prompt_index: int
    sample_index: int
    prompt: list[int]
    seed: int
    sampling: Sampling
    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    carried: int = 0

    def params(self, eos: tuple[int, ...]) -> Any:
        """What is left to sample; a resumed request draws from a stream of its own."""
        seed = seed_of(self.seed, self.sample_index, len(self.tokens))
        left = self.sampling.max_tokens - len(self.tokens)
        return sample_params(self.sampling, seed, eos, max_tokens=left, by_step=True)

    def take(self, output: Any, version: int) -> None:
        """Tokens of one step.

        Raises:
            RuntimeError: vLLM's own stamps say that another version sampled one.
        """
        self.tokens += output.token_ids
        self.logprobs += [
            row[token].logprob for row, token in zip(output.logprobs, output.token_ids, strict=True)
        ]
        self.versions += [version] * len(output.token_ids)
        for stamped, first, last in compat.stamped_versions(output) or ():
            ours = self.versions[self.carried + first : self.carried + last]
            if set(ours) - {stamped}:
                raise RuntimeError(f"vLLM stamped tokens {first}..{last} with {stamped}, we with {ours}")

    def completion(self, reason: str | None) -> Completion:
        """What it became."""
        return Completion(
            self.prompt_index, self.sample_index, tuple(self.tokens), tuple(self.logprobs), finish_reason(reason),
            self.versions[0], token_versions=tuple(self.versions),
        )  # fmt: skip


class Flight:
    """Requests under way in a `VllmEngine`, over updates, under the engine's `in_flight` policy.

    Example:
        flight = Flight(engine)
        flight.add(prompts, n=8, sampling=Sampling(max_tokens=256))
        done = flight.step()                                   # those that ended in this step
        done += flight.update(published.stream(), published.manifest)
        done += flight.drain()
    """

    def __init__(self, engine: VllmEngine) -> None:
        self.engine = engine
        self._flying: dict[str, _Request] = {}
        self._serial = itertools.count()

    def __len__(self) -> int:
        return len(self._flying)

    def add(
        self, prompts: Sequence[Sequence[int]], n: int, sampling: Sampling, seeds: Sequence[int] | None = None
    ) -> None:
        """Begin n samples of each prompt; ValueError as `Engine.generate`."""
        seeds = list(range(len(prompts))) if seeds is None else list(seeds)
        check_request(self.engine.version, prompts, n, seeds)
        for p, j in itertools.product(range(len(prompts)), range(n)):
            self._submit(_Request(p, j, list(prompts[p]), seeds[p], sampling))

    def _submit(self, request: _Request) -> None:
        name = f"flight-{next(self._serial)}"
        request.carried = len(request.tokens)
        prompt = {"prompt_token_ids": request.prompt + request.tokens}
        self.engine.llm.llm_engine.add_request(name, prompt, request.params(self.engine.eos))
        self._flying[name] = request

    def step(self) -> list[Completion]:
        """One step of vLLM's; the completions that ended in it."""
        ended = []
        for out in self.engine.llm.llm_engine.step():
            request = self._flying[out.request_id]
            request.take(out.outputs[0], self.engine.version)
            if out.finished:
                del self._flying[out.request_id]
                ended.append(request.completion(out.outputs[0].finish_reason))
        return ended

    def drain(self) -> list[Completion]:
        """Step until nothing is under way."""
        ended = []
        while self._flying:
            ended += self.step()
        return ended

    def update(self, stream: Iterable[tuple[str, Tensor]], manifest: Manifest) -> list[Completion]:
        """Serve a new version; what is under way ends first, resumes after or goes on, as the policy says.

        Returns:
            Completions that ended on the way.

        Raises:
            ValueError: as `VllmEngine.update`; what was under way then goes on under the old version.
        """
        policy = self.engine.in_flight
        ended = self.drain() if policy == "finish" else []
        grounded = self._abort() if policy == "resume" else []
        try:
            self.engine.update(stream, manifest)
        finally:
            for request in grounded:
                self._submit(request)
        return ended

    def _abort(self) -> list[_Request]:
        names, requests = list(self._flying), list(self._flying.values())
        self.engine.llm.llm_engine.abort_request(names)
        self._flying.clear()
        return requests
