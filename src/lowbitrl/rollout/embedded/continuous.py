"""Ragged batches through transformers' continuous batching: its scheduler, paging and sampling.

Its log-probabilities are of the processed distribution, exact in fp32. It draws all requests
from one generator, so a seed fixes a whole call and not a single request.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from transformers import GenerationConfig, PreTrainedModel
from transformers.generation.configuration_utils import ContinuousBatchingConfig

from lowbitrl.quant import real_tokens
from lowbitrl.rollout.embedded.batch import Decoded
from lowbitrl.rollout.types import Sampling
from lowbitrl.watch import beat

PAGE = 32
# Named block_size before transformers 5.17 or so; the later ones warn about that name.
_FIELDS = {field.name for field in dataclasses.fields(ContinuousBatchingConfig)}
PAGE_ARGUMENT = "page_size" if "page_size" in _FIELDS else "block_size"


def decode_continuous(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    n: int,
    seed: int,
    sampling: Sampling,
    stop: Sequence[int],
) -> list[Decoded]:
    """Sample n rows of each prompt, in the order of prompts, then samples.

    Raises:
        RuntimeError: transformers lost or failed a request (it logs the cause and returns the rest).
    """
    attention = model.config._attn_implementation or "sdpa"
    # Forked, so that sampling leaves the process's own generator where it was.
    with torch.random.fork_rng(), real_tokens(model, None):
        torch.manual_seed(seed % 2**63)
        living = model.register_forward_pre_hook(lambda *_: beat())
        try:
            results = _run(model, [list(p) for p in prompts for _ in range(n)], sampling, stop)
        finally:
            living.remove()
            model.set_attn_implementation(attention)
    if len(results) != len(prompts) * n or any(r.error is not None for r in results):
        failed = next((r.error for r in results if r.error is not None), "requests missing")
        raise RuntimeError(
            f"continuous batching returned {len(results)} of {len(prompts) * n} requests: {failed}"
        )
    return [_decoded(result, stop, greedy=sampling.temperature == 0) for result in results]


def _run(
    model: PreTrainedModel, prompts: list[list[int]], sampling: Sampling, stop: Sequence[int]
) -> list[Any]:
    longest = max(map(len, prompts)) + sampling.max_tokens
    pages: dict[str, Any] = {"num_blocks": -(-longest // PAGE) * len(prompts), PAGE_ARGUMENT: PAGE}
    run: Any = model.generate_batch
    outputs = run(
        prompts,
        generation_config=GenerationConfig(
            max_new_tokens=sampling.max_tokens,
            do_sample=sampling.temperature > 0,
            temperature=sampling.temperature or None,
            top_k=None,
            eos_token_id=list(stop),
            pad_token_id=stop[0],
        ),
        continuous_batching_config=ContinuousBatchingConfig(
            return_logprobs=True,
            **pages,
            max_batch_tokens=max(512, len(prompts), max(map(len, prompts))),
            # A CUDA graph pads its inputs with rows that a batch-scoped residual would count.
            use_cuda_graph=False,
        ),
    )
    return list(outputs.values())


def _decoded(result: Any, stop: Sequence[int], greedy: bool) -> Decoded:
    tokens = list(result.generated_tokens)
    # Greedy decoding is certain of its token; transformers reports the distribution at temperature 1.
    logprobs = [0.0 if greedy else float(value) for value in result.logprobs][: len(tokens)]
    return Decoded(tokens, logprobs, stopped=bool(tokens) and tokens[-1] in stop)
