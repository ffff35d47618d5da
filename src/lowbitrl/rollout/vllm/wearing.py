"""Everything a worker serves, as one table: who takes which published tensor, and whether all is covered."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lowbitrl.quant import Plan
from lowbitrl.rollout.vllm.experts import ServedExperts
from lowbitrl.rollout.vllm.names import Names
from lowbitrl.rollout.vllm.real_tokens import REAL_TOKENS, ServedSite
from lowbitrl.rollout.vllm.served import ServedLinear, Write, checked
from lowbitrl.rollout.vllm.slices import one_look
from lowbitrl.sync.manifest import Manifest, entries_of


@dataclass(frozen=True)
class PlainParameter:
    """A parameter served as it is published: norms, embeddings, an untied head.

    Attributes:
        rows: of a vocabulary shard, which published rows it holds; None for all.
    """

    name: str
    storage: Tensor
    rows: tuple[int, int] | None

    def writes(self, arrived: Mapping[str, Tensor]) -> Iterator[Write]:
        """What an update writes where."""
        value = arrived[self.name]
        if self.rows is None:
            yield checked(self.storage, value, self.name)
            return
        # Vocabularies are padded at their end; padding is never read.
        start, stop = self.rows
        yield checked(self.storage[: stop - start], value[start:stop], self.name)

    def reads(self, arrived: Mapping[str, Tensor]) -> list[str]:
        """Published names that `writes` takes."""
        return [self.name]


class Wearing:
    """What one worker's model serves.

    Raises:
        ValueError: a row of the plan that says a weight or its input is low-bit is worn by no module.
    """

    def __init__(self, model: nn.Module, plan: Plan) -> None:
        self.plan = plan
        self.modules: list[ServedLinear | ServedExperts] = []
        self.plain: list[PlainParameter] = []
        taken: set[int] = set()
        for module in model.modules():
            served = module.__dict__.get("lowbitrl")
            if served is not None:
                self.modules.append(served)
                taken.update(id(p) for p in module.parameters(recurse=False))
        names = Names(plan)
        owners = dict(model.named_modules())
        for name, parameter in model.named_parameters():
            if id(parameter) not in taken:
                shard = getattr(owners[name.rpartition(".")[0]], "shard_indices", None)
                rows = None if shard is None else (shard.org_vocab_start_index, shard.org_vocab_end_index)
                self.plain.append(PlainParameter(names.published(name), parameter.data, rows))
        self._check_covered()

    def _check_covered(self) -> None:
        worn = {row.name for row in self._rows()}
        for row in self.plan.quantized:
            if row.name not in worn:
                raise ValueError(
                    f"{row.name} is planned with {row.weight or 'bf16'} weights and {row.activation or 'bf16'} inputs, "
                    "but no module of vLLM's wears it: the plugin is not active for this model"
                )
        if any(site.pools for site in self._sites()) and not REAL_TOKENS.watched:
            raise ValueError(
                "a batch-wide residual must know the real tokens of a batch, and no model runner of this vLLM "
                "version tells them; use residual_scope='token'"
            )

    def _rows(self) -> Iterator[Any]:
        for module in self.modules:
            yield from module.rows if isinstance(module, ServedExperts) else (m.row for m in module.members)

    def _sites(self) -> Iterator[ServedSite]:
        for module in self.modules:
            sites = module.sites if isinstance(module, ServedExperts) else (module.site,)
            yield from (site for site in sites if site is not None)

    def writes(self, arrived: Mapping[str, Tensor], manifest: Manifest) -> list[Write]:
        """Everything that serving a version writes; nothing is written yet.

        Raises:
            ValueError: another plan's version; a tensor missing, unexpected, of other bytes than published,
                or of a shape that the worker does not serve; the first one is named.
        """
        if manifest.plan_digest != self.plan.digest:
            raise ValueError(
                f"version {manifest.version} was published under plan {manifest.plan_digest}, the engine wears "
                f"{self.plan.digest}; start it with the learner's plan (Plan.diff shows where they part)"
            )
        manifest.verify(arrived)
        takers = (*self.modules, *self.plain)
        unread = dict.fromkeys(arrived)
        for taker in takers:
            for name in taker.reads(arrived):
                if name not in arrived:
                    raise ValueError(f"version {manifest.version} has no {name}, which vLLM serves")
                unread.pop(name, None)
        for name in unread:
            raise ValueError(f"{name} of version {manifest.version} is served by no module of vLLM's")
        with one_look():
            return [write for taker in takers for write in taker.writes(arrived)]

    def report(self) -> dict[str, Any]:
        """What is active: the plan's digest and, by module, formats, residual and what multiplies."""
        rows = {}
        for module in self.modules:
            row = next(
                iter(module.rows if isinstance(module, ServedExperts) else (m.row for m in module.members))
            )
            rows[module.prefix] = [row.weight, row.activation, row.residual, module.kernel]
        return {"digest": self.plan.digest, "modules": rows, "watched": list(REAL_TOKENS.watched)}

    def state(self) -> dict[str, int]:
        """Checksums of everything served, by module and storage."""
        tensors: dict[str, Tensor] = {}
        for module in self.modules:
            stores = (
                module.stores
                if isinstance(module, ServedExperts)
                else tuple(run.store for run in module.runs)
            )
            for i, store in enumerate(stores):
                parts = {} if store.encoded is None else store.encoded.tensors()
                parts |= {} if store.decoded is None else {"weight": store.decoded}
                tensors |= {f"{module.prefix}.{i}.{key}": part for key, part in parts.items()}
        tensors |= {p.name: p.storage for p in self.plain}
        return {name: entry.checksum for name, entry in entries_of(tensors).items()}


@torch.no_grad()
def write_all(writes: list[Write]) -> None:
    """Serve a version: copies into storage that keeps its addresses."""
    for storage, value in writes:
        storage.copy_(value if isinstance(value, Tensor) else value.dequantize(storage.dtype))
