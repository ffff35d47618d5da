"""Decoding without the host: one token of a whole batch is one CUDA graph, replayed.

A step of `batch.decode` launches thousands of small kernels, and waits for the host after each token to
see who has stopped. Here keys, values, masks, positions, random numbers and results live in buffers that
never move; forward, sampling and bookkeeping are captured once and replayed, and the host looks up every
`LOOK` tokens. Finished rows go on idly until then; they are never real tokens.

A captured graph holds the addresses of the weights. Updates therefore write into the weights in place
(`RolloutLinear.adopt`), and a graph captured before an update serves what came after it.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache, PreTrainedModel

from lowbitrl.quant import attachment, real_tokens
from lowbitrl.quant.products import why_experts_wait
from lowbitrl.rollout.embedded.batch import Decoded, cache_argument, pad_left, prefill
from lowbitrl.rollout.embedded.sampler import sample
from lowbitrl.rollout.types import Sampling
from lowbitrl.watch import beat

LOOK = 8
COLUMNS = 32  # buffer lengths are multiples of this, so that few graphs serve many prompts
KEPT = 4  # graphs; each holds the keys and values of its rows
WARM_UPS = 2


def why_unavailable(model: PreTrainedModel) -> str:
    """Why this model cannot decode from fixed buffers, or "" if it can."""
    config = model.config.get_text_config()
    kinds = set(getattr(config, "layer_types", None) or ("full_attention",)) - {"full_attention"}
    window = getattr(config, "sliding_window", None) and getattr(config, "use_sliding_window", True)
    if kinds or window:
        return f"its attention is not full in every layer ({', '.join(sorted(kinds)) or 'sliding window'})"
    if attachment(model).stacks and (reason := why_experts_wait(model)):
        return f"its experts are dispatched by the host ({reason})"
    if config._attn_implementation not in ("sdpa", "eager"):
        return f"attn_implementation={config._attn_implementation!r} takes no explicit mask"
    return ""


class FixedCache:
    """Keys and values in buffers of `columns` tokens a row; all rows write the same column.

    Stands in for transformers' Cache in a decoding step, which calls `update` alone.
    """

    is_compileable = False

    def __init__(self, like: DynamicCache, rows: int, columns: int, column: Tensor) -> None:
        self.column = column
        pairs = [_pair(layer) for layer in like.layers]
        self.keys = [_buffer(keys, rows, columns) for keys, _ in pairs]
        self.values = [_buffer(values, rows, columns) for _, values in pairs]

    def load(self, prompts: DynamicCache, n: int) -> None:
        """The prompts' keys and values, each repeated for its n rows."""
        for index, layer in enumerate(prompts.layers):
            for buffers, given in zip((self.keys, self.values), _pair(layer), strict=True):
                buffers[index][:, :, : given.shape[2]] = given.repeat_interleave(n, 0)

    def update(self, keys: Tensor, values: Tensor, layer: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        """Write (rows, heads, 1, width) at the current column; returns the whole buffers."""
        return (
            self.keys[layer].index_copy_(2, self.column, keys),
            self.values[layer].index_copy_(2, self.column, values),
        )

    def get_seq_length(self, layer: int = 0) -> int:
        """Length of the buffers: what the mask covers."""
        return self.keys[layer].shape[2]


def _pair(layer: Any) -> tuple[Tensor, Tensor]:
    return layer.keys, layer.values


def _buffer(like: Tensor, rows: int, columns: int) -> Tensor:
    return like.new_zeros(rows, like.shape[1], columns, like.shape[3])


class Step:
    """One decoding step over fixed buffers; captured as a CUDA graph where there is a GPU.

    Args:
        rows, columns: size of the buffers. temperature, stop: constants of the captured step.
    """

    def __init__(
        self, model: PreTrainedModel, like: DynamicCache, rows: int, columns: int, temperature: float,
        stop: Sequence[int],
    ) -> None:  # fmt: skip
        device = model.device
        self.model, self.temperature, self.rows = model, temperature, rows
        self.stop = torch.tensor(list(stop), device=device)
        self.column = torch.zeros(1, dtype=torch.long, device=device)
        self.count = torch.zeros(1, dtype=torch.long, device=device)
        self.cache = FixedCache(like, rows, columns, self.column)
        # Additive, in the compute dtype: what both eager attention and SDPA take.
        self.mask = torch.zeros(rows, 1, 1, columns, dtype=model.dtype, device=device)
        self.last = torch.zeros(rows, dtype=torch.long, device=device)
        self.positions = torch.zeros(rows, 1, dtype=torch.long, device=device)
        self.running = torch.zeros(rows, 1, dtype=torch.bool, device=device)
        self.uniform = torch.zeros(columns, rows, device=device)
        self.tokens = torch.zeros(columns, rows, dtype=torch.long, device=device)
        self.logprobs = torch.zeros(columns, rows, device=device)
        self.total = torch.zeros(columns, rows, device=device)
        self._graph: torch.cuda.CUDAGraph | None = None

    def load(self, prompts: DynamicCache, mask: Tensor, n: int, uniform: Tensor) -> None:
        """Start n rows of each prompt, (P, L) bool `mask` of their tokens, (rows, T) uniforms."""
        real = mask.repeat_interleave(n, 0)
        length = mask.shape[1]
        self.cache.load(prompts, n)
        self.mask.fill_(torch.finfo(self.mask.dtype).min)
        self.mask[:, 0, 0, :length].masked_fill_(real, 0.0)
        self.positions.copy_(real.sum(1, keepdim=True))
        self.column.fill_(length)
        self.count.zero_()
        self.running.fill_(True)
        self.total.zero_()
        self.uniform[: uniform.shape[1]] = uniform.T.to(self.uniform)

    def draw(self, logits: Tensor) -> None:
        """Sample from (rows, V) logits and write the result down."""
        uniform = self.uniform.index_select(0, self.count)[0]
        tokens, logprobs, total = sample(logits, self.temperature, uniform)
        self.tokens.index_copy_(0, self.count, tokens[None])
        self.logprobs.index_copy_(0, self.count, logprobs[None])
        self.total.index_copy_(0, self.count, total[None])
        # A row of broken logits is no real token from here on: it must not move a residual's channels.
        ended = torch.isin(tokens, self.stop) | ~torch.isfinite(total)
        self.running.logical_and_(~ended[:, None])
        self.last.copy_(tokens)
        self.count.add_(1)

    def forward(self) -> None:
        """Feed the last tokens and draw the next ones."""
        self.mask.index_fill_(3, self.column, 0.0)
        with real_tokens(self.model, self.running):
            out = self.model(
                input_ids=self.last[:, None],
                attention_mask=self.mask,
                position_ids=self.positions,
                use_cache=True,
                logits_to_keep=1,
                **{cache_argument(type(self.model)): self.cache},
            )
        self.draw(out.logits[:, -1])
        self.positions.add_(1)
        self.column.add_(1)

    def capture(self) -> None:
        """Record `forward` on a GPU; the buffers hold nothing of use before or after."""
        if self.last.device.type != "cuda":
            return
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(WARM_UPS):
                self.forward()
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(self._graph):
            self.forward()

    def __call__(self) -> None:
        """One step: the graph where it was captured, the same code elsewhere."""
        if self._graph is not None:
            self._graph.replay()
        else:
            self.forward()


class GraphDecoder:
    """`batch.decode` from fixed buffers, with the last few captured steps kept."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.model = model
        self._steps: OrderedDict[tuple[Any, ...], Step] = OrderedDict()

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        n: int,
        uniform: Tensor,
        sampling: Sampling,
        stop: Sequence[int],
    ) -> list[Decoded]:
        """Sample n rows of each prompt; arguments, order and result as `batch.decode`."""
        ids, mask = pad_left(prompts, self.model.device)
        logits, cache = prefill(self.model, ids, mask)
        step = self._step(cache, len(prompts) * n, ids.shape[1] + sampling.max_tokens, sampling, stop)
        step.load(cache, mask, n, uniform)
        step.draw(logits.repeat_interleave(n, 0))
        for done in range(1, sampling.max_tokens):
            if done % LOOK == 0 and not bool(step.running.any()):
                break
            step()
            beat()
        return _rows(step, stop)

    def _step(
        self, cache: DynamicCache, rows: int, length: int, sampling: Sampling, stop: Sequence[int]
    ) -> Step:
        columns = -(-length // COLUMNS) * COLUMNS
        key = (rows, columns, sampling.temperature, tuple(stop))
        if key not in self._steps:
            while len(self._steps) >= KEPT:
                self._steps.popitem(last=False)
            step = Step(self.model, cache, rows, columns, sampling.temperature, stop)
            step.capture()
            self._steps[key] = step
        self._steps.move_to_end(key)
        return self._steps[key]


def _rows(step: Step, stop: Sequence[int]) -> list[Decoded]:
    """Each row up to and with its first stop token, or up to its first broken logits."""
    drawn = int(step.count)
    tokens, logprobs, total = (t[:drawn].T.cpu() for t in (step.tokens, step.logprobs, step.total))
    stops, broken = torch.isin(tokens, torch.tensor(list(stop))), ~torch.isfinite(total)
    ended = stops | broken
    last = torch.where(ended.any(1), ended.int().argmax(1), drawn - 1).tolist()
    rows = []
    for row, end in enumerate(last):
        length = end if (lost := bool(broken[row, end])) else end + 1
        stopped = bool(stops[row, end]) and not lost
        rows.append(Decoded(tokens[row, :length].tolist(), logprobs[row, :length].tolist(), stopped, lost))
    return rows
