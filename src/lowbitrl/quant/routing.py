"""Which experts each token took: recorded in one forward pass, replayed in another.

A mixture of experts is a different function for every choice of experts, so a token that a rollout sent
to one expert and the learner sends to another is scored by other weights. Replaying the rollout's choice
in the learner (R3), or the learner's own first choice in its later passes (R2), takes that term away:
indices are given, the weights of the chosen experts come from the router's own logits and keep their
gradient.

Routes are (tokens, layers, k) int16: expert indices in the order of the model's routers (dense layers have
none, and take no number), -1 where nothing was recorded and a replay leaves the router its choice.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from lowbitrl.quant.topology import routers

UNKNOWN = -1


class RoutingContext:
    """The choices of the current forward pass; one object shared by a model's routers.

    Attributes:
        names: routers by whole name, in model order.
        given: (tokens, layers, k) to replay, or None.
        chosen: each router's own choice by its number, while one records.
    """

    def __init__(self, names: tuple[str, ...]) -> None:
        self.names = names
        self.given: Tensor | None = None
        self.chosen: dict[int, Tensor] | None = None

    @contextmanager
    def state(self, given: Tensor | None, chosen: dict[int, Tensor] | None) -> Iterator[None]:
        """Hold this state for the forward passes inside."""
        previous = self.given, self.chosen
        self.given, self.chosen = given, chosen
        try:
            yield
        finally:
            self.given, self.chosen = previous

    def recorded(self) -> Tensor:
        """What the routers chose by themselves, (tokens, layers, k) int16.

        Raises:
            ValueError: a router chose nothing, or not by `topk` over its experts.
        """
        chosen = self.chosen or {}
        for index, name in enumerate(self.names):
            if index not in chosen:
                raise ValueError(
                    f"{name} did not choose by topk over its experts; its routing cannot be recorded"
                )
        return torch.stack([chosen[i] for i in range(len(self.names))], 1).to(torch.int16)


def wear_routers(model: nn.Module) -> RoutingContext:
    """Make a model's routers ask a context; nothing changes while it is idle."""
    found = routers(model)
    context = RoutingContext(tuple(found))
    for index, module in enumerate(found.values()):
        module.__class__ = _routed(type(module))
        module.__dict__.update(lowbitrl_routing=context, lowbitrl_number=index)
    return context


@functools.cache
def _routed(cls: type[nn.Module]) -> type[nn.Module]:
    """A subclass of a router's class: transformers' own hooks look for the class, and find it."""
    return type(cls.__name__, (_Routed, cls), {})


class _Routed(nn.Module):
    lowbitrl_routing: RoutingContext
    lowbitrl_number: int

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        context = self.lowbitrl_routing
        if context.given is None and context.chosen is None:
            return super().forward(*args, **kwargs)
        with _Choice(self, context):
            return super().forward(*args, **kwargs)


class _Choice(TorchFunctionMode):
    """Watches a router's forward for its choice, the topk over all experts, and replaces it by a given one."""

    def __init__(self, router: Any, context: RoutingContext) -> None:
        super().__init__()
        self.router, self.context = router, context

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func not in (torch.topk, Tensor.topk):
            return out
        scores = args[0] if args else (kwargs or {})["input"]
        wanted = (scores.shape[0], self.router.top_k)
        is_choice = scores.shape[1:] == (self.router.num_experts,) and out.indices.shape == wanted
        return self._choose(scores, out) if is_choice else out

    def _choose(self, scores: Tensor, own: Any) -> Any:
        number = self.router.lowbitrl_number
        if self.context.chosen is not None:
            self.context.chosen[number] = own.indices.detach()
        if self.context.given is None:
            return own
        given = self.context.given[:, number].to(scores.device, torch.long)
        if given.shape != own.indices.shape:
            raise ValueError(
                f"{self.context.names[number]} routes {tuple(own.indices.shape)} (tokens, k), the replay holds "
                f"{tuple(given.shape)}: give the routes of exactly these tokens, {UNKNOWN} where there are none"
            )
        chosen = torch.where(given < 0, own.indices, given)
        return torch.return_types.topk((scores.gather(-1, chosen), chosen))


@contextmanager
def routing(model: nn.Module, given: Tensor | None = None) -> Iterator[RoutingContext]:
    """Record the routes of the forward pass inside, and replay `given` in it.

    Args:
        given: (tokens, layers, k), tokens in the order of the flattened input; None replays nothing.

    Raises:
        ValueError: the model has no routers, or is not prepared.
    """
    attached = model.__dict__.get("lowbitrl")
    if attached is None or not attached.routing.names:
        raise ValueError(
            "no routers to record: give a mixture of experts prepared with lowbitrl.quant.prepare"
        )
    with attached.routing.state(given, {}):
        yield attached.routing


def recomputation(model: nn.Module) -> Callable[[], tuple[AbstractContextManager, AbstractContextManager]]:
    """`context_fn` for `torch.utils.checkpoint`: a layer run again in backward routes as it did in forward."""

    def contexts() -> tuple[AbstractContextManager, AbstractContextManager]:
        attached = model.__dict__.get("lowbitrl")
        if attached is None:
            return nullcontext(), nullcontext()
        return nullcontext(), _restored(attached, attached.tokens.real, attached.routing.given)

    return contexts


@contextmanager
def _restored(attached: Any, real: Tensor | None, given: Tensor | None) -> Iterator[None]:
    with attached.tokens.real_tokens(real), attached.routing.state(given, None):
        yield


def agreement(own: Tensor, given: Tensor) -> Tensor:
    """Share of the experts in `given` that `own` chose too, by layer, over the tokens that were recorded.

    Args:
        own / given: (tokens, layers, k) indices; the order within k does not matter.

    Returns:
        (layers,) fp32; NaN for a layer without a recorded token.
    """
    known = given[..., 0] >= 0
    common = (own[..., :, None] == given[..., None, :]).any(-2).float().mean(-1)
    return torch.where(known, common, 0.0).sum(0) / known.sum(0)
