"""Our sampling in vLLM's words, and vLLM's outputs in ours."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from lowbitrl.rollout.types import Completion, FinishReason, Sampling
from lowbitrl.rollout.vllm import compat


def seed_of(seed: int, sample: int, begun: int = 0) -> int:
    """The seed of sample j of a prompt, whatever else is in the batch; `begun` tokens came from another stream."""
    name = f"{seed}/{sample}/{begun}" if begun else f"{seed}/{sample}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:8], "big") >> 2


def sampling_fields(sampling: Sampling, seed: int, eos: tuple[int, ...]) -> dict[str, Any]:
    """Fields of vLLM's SamplingParams, of its constructor and its HTTP requests alike."""
    return {
        "max_tokens": sampling.max_tokens,
        "temperature": sampling.temperature,
        "top_p": 1.0,
        "top_k": 0,
        "min_p": 0.0,
        "seed": seed,
        "logprobs": 0,
        # Ours alone: what a generation config adds would end completions that the recipe does not.
        "ignore_eos": True,
        "stop_token_ids": list(sampling.stop_token_ids or eos),
        "detokenize": False,
    }


def sample_params(
    sampling: Sampling,
    seed: int,
    eos: tuple[int, ...],
    *,
    max_tokens: int | None = None,
    by_step: bool = False,
) -> Any:
    """One request's SamplingParams; `by_step` asks for each step's new tokens, not for all at the end."""
    from vllm.sampling_params import RequestOutputKind

    from vllm import SamplingParams

    fields = sampling_fields(sampling, seed, eos) | ({"max_tokens": max_tokens} if max_tokens else {})
    kind = RequestOutputKind.DELTA if by_step else RequestOutputKind.FINAL_ONLY
    return SamplingParams(**fields, output_kind=kind)


def check_request(version: int, prompts: Sequence[Sequence[int]], n: int, seeds: Sequence[int]) -> None:
    """Refuse what no engine can sample from; ValueError."""
    if version < 0:
        raise ValueError("no version was published to this engine yet; call update(stream, manifest) first")
    if n < 1:
        raise ValueError(f"n={n} samples nothing; give at least 1")
    if len(seeds) != len(prompts):
        raise ValueError(f"{len(seeds)} seeds for {len(prompts)} prompts; give one a prompt")
    for i, prompt in enumerate(prompts):
        if not len(prompt):
            raise ValueError(f"prompt {i} is empty; give at least one token")


def score_params(temperature: float) -> Any:
    """A prefill that says its tokens' log-probabilities: all of a position's where a temperature must be applied."""
    from vllm import SamplingParams

    wanted = 0 if temperature in (0.0, 1.0) else -1
    return SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=wanted, detokenize=False)


def prompt_logprobs(rows: Any, sequence: Sequence[int], temperature: float) -> Tensor:
    """(len - 1,) fp32 from vLLM's rows of {token: logprob}; the first row is None.

    vLLM's prompt log-probabilities ignore temperature, so it is applied to whole rows here.
    """
    if temperature in (0.0, 1.0):
        return torch.tensor([row[token].logprob for row, token in zip(rows[1:], sequence[1:], strict=True)])
    scores = []
    for row, token in zip(rows[1:], sequence[1:], strict=True):
        values = torch.tensor([entry.logprob for entry in row.values()]) / temperature
        scores.append(row[token].logprob / temperature - values.logsumexp(0))
    return torch.stack(scores) if scores else torch.empty(0)


def completion_of(prompt: int, sample: int, output: Any, version: int) -> Completion:
    """A CompletionOutput of vLLM's as ours.

    Raises:
        RuntimeError: it was sampled, in part, by another version than `version`.
    """
    for stamped, first, last in compat.stamped_versions(output) or ():
        if stamped != version:
            raise RuntimeError(
                f"tokens {first}..{last} of sample {sample} of prompt {prompt} were sampled by version {stamped}, "
                f"{version} is served; finish requests before an update"
            )
    tokens = tuple(output.token_ids)
    logprobs = tuple(row[token].logprob for row, token in zip(output.logprobs, tokens, strict=True))
    return Completion(prompt, sample, tokens, logprobs, finish_reason(output.finish_reason), version)


def finish_reason(name: str | None) -> FinishReason:
    """vLLM's name of why a completion ended; an unknown one is an abort."""
    return name if name in ("stop", "length") else "abort"  # type: ignore[return-value]
