"""Bytes by what holds them: the learner, the rollout, and what a step moves.

One process holds weights in the compute dtype and masters beside them. Of several, each holds a shard of masters,
gradients and states, and gathers a layer at a time: docs/distributed.md. What is counted lives at the same moment in
the backward pass of a batch of several micro-batches. Not counted: the allocator's gaps, a CUDA context, and
temporaries of a single operation.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from lowbitrl.quant import Plan
from lowbitrl.sizing.request import SizeRequest
from lowbitrl.sizing.shape import Shape, itemsize
from lowbitrl.sizing.weights import Weights

FP32 = 4
INT64 = 8
LOGITS, LOGITS_WITH_ENTROPY = 3, 5
"""fp32 numbers a logit while a chunk is scored and differentiated: `trainer.logprobs`."""
GATHERED = 2
"""Layers that FSDP holds at once: the one that computes and the one that it fetches ahead."""


@dataclass(frozen=True)
class Item:
    """One holder of bytes. host: they lie in host memory."""

    name: str
    bytes: int
    host: bool = False


@dataclass(frozen=True)
class Estimate:
    """Bytes a process: `learner` and `rollout` on the GPU that each has, `step` over its links.

    Attributes:
        published: bytes of one version of the weights. unquantized: of one in the compute dtype.
    """

    learner: tuple[Item, ...]
    rollout: tuple[Item, ...]
    step: tuple[Item, ...]
    published: int
    unquantized: int

    @property
    def cache(self) -> int:
        """Of the rollout, its keys and values."""
        return self.rollout[-1].bytes

    @property
    def served(self) -> int:
        """Of the rollout, its weights."""
        return self.total(self.rollout) - self.cache

    @staticmethod
    def total(items: tuple[Item, ...]) -> int:
        """Bytes on the GPU."""
        return sum(item.bytes for item in items if not item.host)


def estimate(model: Any, shape: Shape, plan: Plan, request: SizeRequest) -> Estimate:
    """Size a run of `model`, which may be on the meta device, under `plan`.

    Raises:
        ValueError: several ranks, and the model does not name its layers.
    """
    weights = Weights.of(model, plan)
    if request.ranks > 1 and not weights.layer:
        raise ValueError(
            f"{type(model).__name__} does not name its layers, so it is not spread over ranks; ask for 1"
        )
    size = itemsize(request.config.model.dtype)
    return Estimate(
        learner=tuple(_learner(weights, shape, request, size)),
        rollout=tuple(_rollout(weights, shape, request, size)),
        step=tuple(_step(weights, request, size)),
        published=weights.encoded + size * weights.plain,
        unquantized=size * weights.total,
    )


def _learner(weights: Weights, shape: Shape, request: SizeRequest, size: int) -> Iterator[Item]:
    config, ranks = request.config, request.ranks
    own = config.optimizer.masters == "compute" or size == FP32
    master, away = (size if own else FP32), ranks > 1 and config.distributed.cpu_offload
    held = weights.shard(ranks)
    if ranks == 1:
        yield Item("weights in the compute dtype", size * held)
    if ranks > 1 or not own:
        yield Item("masters", master * held, away)
    yield Item("gradients", master * held, away)
    yield Item("optimizer states", optimizer_bytes(weights, config.optimizer.name, master, ranks), away)
    if ranks > 1:
        yield Item("layers gathered for a pass", size * (weights.root + GATHERED * weights.layer))
        # In the compute dtype as autograd leaves them, in fp32 as they are summed.
        yield Item("gradients of a layer, whole", (size + FP32) * max(weights.layer, weights.root))
    keeps = ranks == 1 or config.distributed.keep_bytes
    if weights.encoded:
        yield Item("encoded weights", weights.encoded if keeps else weights.largest)
    if ranks == 1:
        yield Item("published copy of what is not encoded", size * weights.plain)
    if config.objective.kl_coef:
        yield Item("frozen reference", size * held + (weights.encoded if keeps else 0), away)
    tokens = config.trainer.micro_batch_tokens
    yield Item(
        "activations of a micro-batch",
        activation_bytes(shape, tokens, size, config.trainer.gradient_checkpointing),
    )
    copies = LOGITS_WITH_ENTROPY if config.objective.entropy_coef else LOGITS
    yield Item(
        "logits of a chunk", copies * FP32 * min(config.trainer.logprob_chunk, tokens) * shape.vocab_size
    )


def optimizer_bytes(weights: Weights, name: str, master: int, ranks: int = 1) -> int:
    """AdamW: two moments and a step count a parameter; Muon: one moment of hidden matrices, AdamW for the rest."""
    hidden = weights.hidden if name == "muon" else frozenset[str]()
    rest = frozenset(weights.parameters) - hidden
    moments = weights.shard(ranks, hidden) + 2 * weights.shard(ranks, rest)
    return master * moments + FP32 * len(rest)


def activation_bytes(shape: Shape, tokens: int, size: int, checkpointing: bool) -> int:
    """What autograd keeps of a pass over `tokens` tokens without padding, attention in one fused operation.

    With checkpointing: the input of every layer, and one layer at a time in full.
    """
    layer, layers = _layer(shape, size), shape.num_hidden_layers
    inside = size * shape.hidden_size * layers + layer if checkpointing else layer * layers
    return tokens * (inside + _norm(shape.hidden_size, size) + size * shape.hidden_size + 4 * INT64)


def _norm(width: int, size: int, rows: int = 1) -> int:
    """Of an RMS norm: its input in fp32, its output before the weight, a root a row."""
    return (FP32 + size) * width + FP32 * rows


def _layer(shape: Shape, size: int) -> int:
    """Bytes a token that one decoder layer keeps."""
    hidden, queries, keys, heads = shape.hidden_size, shape.queries, shape.keys, shape.num_attention_heads
    norms = 2 * _norm(hidden, size)
    if shape.query_key_norms:
        norms += _norm(queries + keys, size, heads + keys // shape.head)
    attention = size * (hidden + 2 * queries + 2 * keys) + FP32 * heads
    return (
        norms
        + attention
        + (_experts(shape, size) if shape.num_experts else _mlp(hidden, shape.intermediate_size, size))
    )


def _mlp(hidden: int, inner: int, size: int) -> int:
    """Input; gate, its activation, up, and their product."""
    return size * (hidden + 4 * inner)


def _experts(shape: Shape, size: int) -> int:
    """The router's input and logits; of every choice its row, gate and up, their product, output and bookkeeping."""
    assert shape.num_experts
    chosen, inner = shape.num_experts_per_tok or 1, shape.moe_intermediate_size or shape.intermediate_size
    router = size * shape.hidden_size + FP32 * shape.num_experts + FP32
    choice = size * (2 * shape.hidden_size + 4 * inner) + 4 * INT64 + FP32 + size
    shared = (
        _mlp(shape.hidden_size, shape.shared_expert_intermediate_size, size)
        if shape.shared_expert_intermediate_size
        else 0
    )
    return router + chosen * choice + shared


def _rollout(weights: Weights, shape: Shape, request: SizeRequest, size: int) -> Iterator[Item]:
    options = request.config.rollout
    if options.engine == "embedded":
        decoded = weights.linears + weights.stacks * options.keep_decoded_experts
    else:
        decoded = weights.served_decoded
    yield Item("weights that are not encoded", size * weights.plain)
    if weights.encoded:
        yield Item("encoded weights", weights.encoded)
        yield Item("decoded beside them", size * decoded)
    cache = request.sequences * shape.cache_bytes(request.tokens, size)
    yield Item(f"KV cache, {request.sequences} x {request.tokens} tokens", cache)


def _step(weights: Weights, request: SizeRequest, size: int) -> Iterator[Item]:
    published = weights.encoded + size * weights.plain
    yield Item("published", published)
    if request.config.rollout.engine != "embedded":
        yield Item("streamed to the engine", published)
    if request.ranks > 1:
        others = (request.ranks - 1) / request.ranks
        yield Item("received to publish", int(others * size * weights.total))
        yield Item(
            "received a micro-batch: layers, forward and backward", int(others * 2 * size * weights.total)
        )
        yield Item("sent a micro-batch: gradients, fp32", int(others * FP32 * weights.total))
