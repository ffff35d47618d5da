"""Routes of whole sequences: laid out for a forward pass, taken from it, compared.

R3 replays what the rollout chose in every pass of the learner; R2 replays what the learner itself chose
when it first scored a batch. A sequence's last token predicts nothing and was never fed to the engine: it
has no route, and keeps its own.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from lowbitrl.quant import agreement
from lowbitrl.quant.routing import UNKNOWN
from lowbitrl.trainer.batch import ModelInput


@dataclass
class RoutePass:
    """Routes into one forward pass and out of it.

    Attributes:
        given: (tokens or tokens - 1, layers, k) of each sequence, or None.
        replay: whether the routers take `given`; otherwise it is only compared with.
        own: what the routers chose by themselves, (tokens, layers, k) a sequence, int16 on the CPU.
    """

    given: Sequence[Tensor] | None = None
    replay: bool = False
    own: list[Tensor] = field(default_factory=list)

    def table(self, batch: ModelInput) -> Tensor | None:
        """`given` in the order of the flattened input, -1 on padding and last tokens; None without replay.

        Raises:
            ValueError: the routes of a sequence are not those of its tokens.
        """
        if not self.replay or self.given is None:
            return None
        table = torch.full((batch.ids.numel(), *self.given[0].shape[1:]), UNKNOWN, dtype=torch.int16)
        for row, (span, routes) in enumerate(zip(batch.spans, self.given, strict=True)):
            length = span.stop - span.start
            if len(routes) not in (length, length - 1):
                raise ValueError(
                    f"sequence {row} has {length} tokens and routes of {len(routes)}: replay the routes that were "
                    "recorded when it was sampled"
                )
            table[span.start : span.start + len(routes)] = routes
        return table.to(batch.ids.device)

    def keep(self, recorded: Tensor, batch: ModelInput) -> None:
        """Cut the recorded table, (b * L, layers, k), into sequences."""
        table = recorded.cpu()
        self.own = [table[span] for span in batch.spans]

    def agreement(self) -> Tensor | None:
        """Share of the given experts that the routers chose too, (layers,); None where nothing was given."""
        if self.given is None or not self.own:
            return None
        own = torch.cat([mine[: len(given)] for mine, given in zip(self.own, self.given, strict=True)])
        return agreement(own, torch.cat(list(self.given)))


def layer_number(name: str, position: int) -> int:
    """A router's layer in the whole model, dense layers counted; its position among routers if the name has none.

    Example:
        >>> layer_number("model.layers.3.mlp.gate", 0)
        3
    """
    found = re.search(r"layers\.(\d+)\.", name)
    return int(found.group(1)) if found else position


def agreement_metrics(by_layer: Tensor, names: Sequence[str]) -> dict[str, float]:
    """routing/agreement, and routing/agreement_layer_N by the layer's number in the model."""
    metrics = {"routing/agreement": float(by_layer.mean())}
    for position, (name, value) in enumerate(zip(names, by_layer.tolist(), strict=True)):
        metrics[f"routing/agreement_layer_{layer_number(name, position)}"] = value
    return metrics
