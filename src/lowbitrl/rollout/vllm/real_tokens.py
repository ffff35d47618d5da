"""Which rows of a forward pass are requests' tokens: the first `count` of them.

vLLM pads a batch to the size of a captured graph and runs dummy batches; a residual that chose its channels
over those rows would depend on them. The count lives in device memory, so that a graph captured once reads
the value of each replay. It is written before every forward pass that serves requests; no other writes it.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lowbitrl.quant.sites import ActivationSite, TokenContext


class RealTokens:
    """One a process: a worker runs one batch at a time.

    Attributes:
        watched: classes of vLLM's model runner that keep the count.
    """

    def __init__(self) -> None:
        self.watched: list[str] = []
        self._counts: dict[torch.device, Tensor] = {}

    def count_on(self, device: torch.device) -> Tensor:
        """The int64 scalar that graphs read."""
        if device not in self._counts:
            self._counts[device] = torch.zeros((), dtype=torch.int64, device=device)
        return self._counts[device]

    def set(self, count: int) -> None:
        """Tokens of the forward pass to come."""
        for scalar in self._counts.values():
            scalar.fill_(count)

    def mask(self, rows: int, device: torch.device) -> Tensor:
        """(rows,) bool."""
        return torch.arange(rows, device=device) < self.count_on(device)

    def watch(self, runner: type) -> None:
        """Keep the count before every batch that a model runner executes. Idempotent."""
        name = f"{runner.__module__}.{runner.__qualname__}"  # vLLM has two runners of one name
        if name in self.watched:
            return
        execute = runner.execute_model  # type: ignore[attr-defined]

        @functools.wraps(execute)
        def counted(this: object, scheduler_output: object, *args: object, **kwargs: object) -> object:
            self.set(scheduler_output.total_num_scheduled_tokens)  # type: ignore[attr-defined]
            return execute(this, scheduler_output, *args, **kwargs)

        runner.execute_model = counted  # type: ignore[attr-defined]
        self.watched.append(name)


REAL_TOKENS = RealTokens()


class ServedSite(ActivationSite):
    """An input quantizer whose real tokens are vLLM's."""

    def __init__(self, format_name: str, residual: float, scope: str, device: torch.device) -> None:
        super().__init__(format_name, residual, scope, TokenContext())  # type: ignore[arg-type]
        if self.pools:
            REAL_TOKENS.count_on(device)

    @property
    def pools(self) -> bool:
        """Whether channels are chosen over the whole batch."""
        return 0 < self.residual < 1 and self.scope == "batch"

    def _real(self, x: Tensor) -> Tensor | None:
        return REAL_TOKENS.mask(x[..., 0].numel(), x.device) if self.pools else None
