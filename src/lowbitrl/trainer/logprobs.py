"""Log-probabilities of responses without a (tokens x vocabulary) matrix.

The output head runs over chunks of hidden states; each chunk's fp32 logits live only while that
chunk is reduced, in forward and again in backward.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint
from transformers import PreTrainedModel

from lowbitrl.distributed.sharding import device_of, whole_pass
from lowbitrl.quant import real_tokens, routing
from lowbitrl.trainer.batch import Layout, ModelInput, arrange
from lowbitrl.trainer.routes import RoutePass

UNSUPPORTED_HEADS = ("final_logit_softcapping", "logit_scale", "logits_scaling")


def response_logprobs(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    responses: Sequence[Sequence[int]],
    *,
    temperature: float = 1.0,
    layout: Layout = "padded",
    chunk: int = 1024,
    routes: RoutePass | None = None,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """Score responses under the learner.

    Args:
        prompts / responses: b sequences of token ids; every prompt has at least one token.
        temperature: divides the logits in fp32, as the engine did when it sampled.
        chunk: hidden states scored at once; peak extra memory is about 3 * chunk * vocabulary
            fp32 numbers, 5 with `entropy_gradient`.
        routes: experts to replay, and where to put those that the learner chose.
        entropy_gradient: let the entropies carry a gradient; off, they are detached.

    Returns:
        log-probabilities and entropies, each (b, T) fp32 with zeros after a
        response's end; T is the longest response.

    Raises:
        ValueError: the model transforms its logits after the head in a way not reproduced here.
    """
    check_head(model)
    batch = arrange(prompts, responses, layout, device_of(model))
    logprobs, entropies = whole_pass(
        model, lambda: _score_batch(model, batch, routes, temperature or 1.0, chunk, entropy_gradient)
    )
    counts = [len(r) for r in responses]
    return _pad(logprobs, counts), _pad(entropies, counts)


def _score_batch(
    model: PreTrainedModel,
    batch: ModelInput,
    routes: RoutePass | None,
    temperature: float,
    chunk: int,
    entropy_gradient: bool,
) -> tuple[Tensor, Tensor]:
    """(N,) log-probabilities and entropies of the batch's targets."""
    given = None if routes is None else routes.table(batch)
    with real_tokens(model, batch.real), routing(model, given) if routes else nullcontext() as seen:
        hidden = model.base_model(
            input_ids=batch.ids,
            attention_mask=batch.attention_mask,
            position_ids=batch.positions,
            use_cache=False,
        ).last_hidden_state
        if routes is not None and seen is not None:
            routes.keep(seen.recorded(), batch)
    states = hidden.flatten(0, 1)[batch.predicts]
    head = model.get_output_embeddings()
    assert isinstance(head, nn.Module)
    return chunked_logprobs(states, head, batch.targets, temperature, chunk, entropy_gradient)


def chunked_logprobs(
    states: Tensor,
    head: nn.Module,
    targets: Tensor,
    temperature: float,
    chunk: int,
    entropy_gradient: bool = False,
) -> tuple[Tensor, Tensor]:
    """log softmax(head(states) / temperature) at `targets`, and the entropies.

    Args:
        states: (N, H); targets: (N,).

    Returns:
        (N,) fp32 log-probabilities and (N,) fp32 entropies, these with a gradient only if asked for.
    """
    parts = [
        checkpoint(_score, s, head, t, temperature, entropy_gradient, use_reentrant=False)
        for s, t in zip(states.split(chunk), targets.split(chunk), strict=True)
    ]
    logprobs, entropies = zip(*parts, strict=True)
    return torch.cat(logprobs), torch.cat(entropies)


def _score(
    states: Tensor, head: nn.Module, targets: Tensor, temperature: float, entropy_gradient: bool
) -> tuple[Tensor, Tensor]:
    logits = head(states).float() / temperature
    total = logits.logsumexp(-1)
    chosen = logits.gather(-1, targets[:, None]).squeeze(-1) - total
    with torch.set_grad_enabled(entropy_gradient and torch.is_grad_enabled()):
        # H = log sum exp(z) - E[z]
        entropy = total - ((logits - total[:, None]).exp() * logits).sum(-1)
    return chosen, entropy


def check_head(model: PreTrainedModel) -> None:
    """Refuse models whose logits are not simply head(hidden).

    Raises:
        ValueError: naming the config field that says so.
    """
    for field in UNSUPPORTED_HEADS:
        value = getattr(model.config, field, None)
        if value not in (None, 1.0):
            raise ValueError(
                f"{field}={value} changes the logits after the output head, which chunked log-probabilities "
                "do not reproduce; this model family is not supported"
            )


def _pad(flat: Tensor, counts: list[int]) -> Tensor:
    return nn.utils.rnn.pad_sequence(list(flat.split(counts)), batch_first=True)
