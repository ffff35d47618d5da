"""Batched decoding: each prompt is read once, its samples share the cache, finished rows leave.

Built on the model's own forward and transformers' cache. Prompts of one batch are padded on the
left; a padded or finished row is never a real token.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowbitrl.quant import attachment, real_tokens, routing
from lowbitrl.rollout.embedded.sampler import sample
from lowbitrl.rollout.types import Sampling
from lowbitrl.watch import beat

COMPACT_SHARE = 0.25


@dataclass
class Decoded:
    """What one row has sampled so far; `routes` of the tokens fed, (tokens, layers, k) a piece.

    broken: its next logits were not finite, so it ends here.
    """

    tokens: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    stopped: bool = False
    broken: bool = False
    routes: list[Tensor] = field(default_factory=list)

    @property
    def ended(self) -> bool:
        """Whether nothing more is sampled for it."""
        return self.stopped or self.broken


def decode(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    n: int,
    uniform: Tensor,
    sampling: Sampling,
    stop: Sequence[int],
    record: bool = False,
) -> list[Decoded]:
    """Sample n rows of each prompt.

    Args:
        uniform: (len(prompts) * n, max_tokens) numbers in [0, 1), rows by prompt, then sample.
        stop: token ids that end a row.
        record: keep the experts that every token fed was routed to.

    Returns:
        One `Decoded` a row, in the order of `uniform`.
    """
    ids, mask = pad_left(prompts, model.device)
    cache = DynamicCache(config=model.config)
    logits, routes = _forward(model, ids, mask, mask, cache, record)
    logits = logits.repeat_interleave(n, 0)
    cache.batch_repeat_interleave(n)
    mask = mask.repeat_interleave(n, 0)
    rows = [Decoded(routes=_of_prompt(routes, mask, i * n)) for i in range(len(prompts)) for _ in range(n)]
    alive = torch.arange(len(rows))
    stop_ids = torch.tensor(list(stop), device=model.device)
    for step in range(sampling.max_tokens):
        beat()
        tokens, logprobs, total = sample(logits, sampling.temperature, uniform[alive, step].to(model.device))
        _record(rows, alive, tokens, logprobs, torch.isin(tokens, stop_ids), torch.isfinite(total))
        running = torch.tensor([not rows[i].ended for i in alive.tolist()])
        if step + 1 == sampling.max_tokens or not running.any():
            break
        if (~running).float().mean() >= COMPACT_SHARE:
            keep = running.nonzero().squeeze(-1)
            alive, keep = alive[keep], keep.to(model.device)
            cache.batch_select_indices(keep)
            tokens, mask, running = tokens[keep], mask[keep], running[running]
        mask = torch.cat([mask, mask.new_ones(len(mask), 1)], 1)
        real = running[:, None].to(model.device)
        logits, routes = _forward(model, tokens[:, None], mask, real, cache, record)
        if routes is not None:
            for index, fed in zip(alive.tolist(), routes, strict=True):
                if not rows[index].ended:
                    rows[index].routes.append(fed)
    return rows


def _of_prompt(routes: Tensor | None, mask: Tensor, row: int) -> list[Tensor]:
    """The routes of a prompt's real tokens; they stand on the right."""
    if routes is None:
        return []
    n = len(mask) // len(routes)
    return [routes[row // n, -int(mask[row].sum()) :]]


def pad_left(prompts: Sequence[Sequence[int]], device: torch.device) -> tuple[Tensor, Tensor]:
    """(P, L) token ids with zeros on the left, and the bool mask of real ones."""
    longest = max(len(p) for p in prompts)
    ids = torch.zeros(len(prompts), longest, dtype=torch.long)
    mask = torch.zeros(len(prompts), longest, dtype=torch.bool)
    for row, prompt in enumerate(prompts):
        ids[row, longest - len(prompt) :] = torch.tensor(list(prompt), dtype=torch.long)
        mask[row, longest - len(prompt) :] = True
    return ids.to(device), mask.to(device)


def prefill(model: PreTrainedModel, ids: Tensor, mask: Tensor) -> tuple[Tensor, DynamicCache]:
    """(P, V) logits after each left-padded prompt, and the prompts' cache."""
    cache = DynamicCache(config=model.config)
    return _forward(model, ids, mask, mask, cache, False)[0], cache


def _forward(
    model: PreTrainedModel, ids: Tensor, mask: Tensor, real: Tensor, cache: DynamicCache, record: bool
) -> tuple[Tensor, Tensor | None]:
    """Logits of the last position, and the routes of all, (rows, length, layers, k), when recorded."""
    positions = (mask.cumsum(1) - 1).clamp(min=0)[:, -ids.shape[1] :]
    routes = None
    with _tokens_of_pass(model, real), routing(model) if record else nullcontext() as seen:
        out = model(
            input_ids=ids,
            # Without padding a plain causal mask is implied, and cheaper.
            attention_mask=None if bool(mask.all()) else mask.long(),
            position_ids=positions,
            use_cache=True,
            logits_to_keep=1,
            **{cache_argument(type(model)): cache},
        )
        if seen is not None:
            routes = seen.recorded().unflatten(0, ids.shape).cpu()
    return out.logits[:, -1], routes


@contextmanager
def _tokens_of_pass(model: PreTrainedModel, real: Tensor) -> Iterator[None]:
    """Real tokens of a pass whose output head, where it is quantized, is given the last position alone."""
    head = model.get_output_embeddings()
    if head is None or getattr(head, "site", None) is None:
        with real_tokens(model, real):
            yield
        return
    tokens = attachment(model).tokens
    with real_tokens(model, real):
        handle = head.register_forward_pre_hook(lambda *_: setattr(tokens, "real", real[:, -1:]))
        try:
            yield
        finally:
            handle.remove()


@functools.cache
def cache_argument(model_type: type[PreTrainedModel]) -> str:
    """What this model's forward calls its key/value cache."""
    # transformers 5.24 renamed past_key_values to cache and warns about the old name.
    return "cache" if "cache" in inspect.signature(model_type.forward).parameters else "past_key_values"


def _record(
    rows: list[Decoded], alive: Tensor, tokens: Tensor, logprobs: Tensor, stopped: Tensor, sound: Tensor
) -> None:
    columns = (t.tolist() for t in (alive, tokens, logprobs, stopped, sound))
    for index, token, logprob, stop, finite in zip(*columns, strict=True):
        row = rows[index]
        if row.ended:
            continue
        row.broken = not finite
        if finite:
            row.tokens.append(token)
            row.logprobs.append(logprob)
            row.stopped = stop
