"""What is particular about the mismatch of a mixture of experts: its routes, and its MoE blocks layer by layer.

    d_t = (learner - learner under the rollout's routes) + (learner under the rollout's routes - rollout)
           routing                                          arithmetic

The two terms sum to the mismatch by construction. The routing term is what R3 takes away.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from lowbitrl.diagnose.mismatch import Mismatch, compare
from lowbitrl.quant import attachment
from lowbitrl.quant.topology import expert_stacks
from lowbitrl.rollout import Completion
from lowbitrl.trainer.batch import micro_batches
from lowbitrl.trainer.logprobs import response_logprobs
from lowbitrl.trainer.routes import RoutePass, agreement_metrics, layer_number


@dataclass(frozen=True)
class RoutingTerm:
    """A mismatch in its two terms.

    Attributes:
        total: learner against rollout. arithmetic: the same with the rollout's routes replayed.
        routing: learner against itself under the rollout's routes.
        agreement: share of the rollout's experts that the learner chooses too when every layer before was
            replayed, by routing/* metric name.
    """

    total: Mismatch
    arithmetic: Mismatch
    routing: Mismatch
    agreement: dict[str, float]


@torch.no_grad()
def routing_term(
    learner: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    temperature: float = 1.0,
    micro_batch_tokens: int = 8192,
) -> RoutingTerm:
    """Score an engine's completions with the learner's own routes and with the engine's.

    Args:
        learner: a mixture prepared with side="learner".
        completions: of an engine with record_routing=True.

    Raises:
        ValueError: nothing to compare, or completions without routes.
    """
    if any(c.routes is None for c in completions):
        raise ValueError("completions carry no routes; sample with EmbeddedEngine(..., record_routing=True)")
    scored: dict[bool, dict[int, Tensor]] = {False: {}, True: {}}
    seen = RoutePass([], replay=True)
    lengths = [len(prompts[c.prompt_index]) + len(c.token_ids) for c in completions]
    for rows in micro_batches(lengths, micro_batch_tokens, "padded"):
        chosen = [completions[i] for i in rows]
        for replay in scored:
            routes = (
                RoutePass([c.routes for c in chosen if c.routes is not None], replay=True) if replay else None
            )
            logprobs, _ = response_logprobs(
                learner,
                [prompts[c.prompt_index] for c in chosen],
                [c.token_ids for c in chosen],
                temperature=temperature,
                routes=routes,
            )
            if routes is not None:
                seen = RoutePass([*(seen.given or ()), *(routes.given or ())], True, [*seen.own, *routes.own])
            scored[replay] |= {
                i: row[: len(completions[i].token_ids)] for i, row in zip(rows, logprobs, strict=True)
            }
    own, replayed = ([scored[replay][i] for i in range(len(completions))] for replay in (False, True))
    rollout = [torch.tensor(c.rollout_logprobs) for c in completions]
    by_layer = seen.agreement()
    assert by_layer is not None
    return RoutingTerm(
        compare(own, rollout),
        compare(replayed, rollout),
        compare(own, replayed),
        agreement_metrics(by_layer, attachment(learner).routing.names),
    )


@dataclass(frozen=True)
class BlockDistance:
    """One MoE block on both sides: mean L2 distance of a token's input and output, and the learner's mean norms."""

    layer: int
    input: float
    output: float
    input_norm: float
    output_norm: float


@torch.no_grad()
def block_distances(
    learner: nn.Module, rollout: nn.Module, run: Callable[[nn.Module], object], real: Tensor
) -> list[BlockDistance]:
    """Distances of the inputs and outputs of every MoE block (QUADS figures 7 and 4b).

    Args:
        run: one forward pass of the same tokens through a model.
        real: (batch, length) bool; padding does not count.
    """
    ours, theirs = _traces(learner, run), _traces(rollout, run)
    rows = real.flatten()
    return [
        _block_distance(layer_number(name, position), ours[name], theirs[name], rows)
        for position, name in enumerate(ours)
    ]


def _block_distance(
    layer: int, ours: tuple[Tensor, Tensor], theirs: tuple[Tensor, Tensor], rows: Tensor
) -> BlockDistance:
    norms = [t[rows.to(t.device)].norm(dim=-1).mean().item() for t in ours]
    gaps = [
        (a - b.to(a.device))[rows.to(a.device)].norm(dim=-1).mean().item()
        for a, b in zip(ours, theirs, strict=True)
    ]
    return BlockDistance(layer, *gaps, *norms)


def _traces(model: nn.Module, run: Callable[[nn.Module], object]) -> dict[str, tuple[Tensor, Tensor]]:
    """Input and output of every experts module, (tokens, H) fp32, by its whole name."""
    traces: dict[str, tuple[Tensor, Tensor]] = {}

    def record(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], output: Tensor) -> None:
            traces[name] = inputs[0].flatten(0, -2).float(), output.flatten(0, -2).float()

        return hook

    modules = {stack.rpartition(".")[0]: module for stack, module in expert_stacks(model).items()}
    with ExitStack() as stack:
        for name, module in modules.items():
            handle = module.register_forward_hook(record(name))
            stack.callback(handle.remove)
        run(model)
    return traces
