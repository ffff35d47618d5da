"""What a worker serves of one layer's routed experts, with the learner's arithmetic.

    x^  = A13(x)                          once, before routing
    h_e = silu(x^ Wg_e^T) * (x^ Wu_e^T)   the tokens of expert e
    y   = sum_e p_e * A2(h_e) Wd_e^T      p in the compute dtype, as transformers' routers hand it over

4-bit bytes on CUDA go through `grouped_w4a16_matmul`, anything else through torch's grouped product of decoded
values. Neither looks at a value on the host, so both can be captured in a graph.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbitrl.formats import QuantizedTensor
from lowbitrl.kernels import align_experts, gate_rows, grouped_w4a16_matmul, quantize_residual, weighted_sum
from lowbitrl.quant import LayerPlan
from lowbitrl.quant.experts import Groups, quantize_rows
from lowbitrl.rollout.vllm.real_tokens import REAL_TOKENS, ServedSite
from lowbitrl.rollout.vllm.served import PARTS, Store, Write
from lowbitrl.rollout.vllm.slices import Span, cut_columns, cut_rows, join_rows

Sites = tuple[ServedSite | None, ServedSite | None]


class ServedExperts:
    """The experts of one layer, or this rank's share of their width.

    Args:
        rows: the plan's decisions for (gate_up, down). stores: their storage. span: which of the
            intermediate width this rank holds. sites: input quantizers of both products.
    """

    def __init__(
        self, prefix: str, rows: tuple[LayerPlan, LayerPlan], stores: tuple[Store, Store], span: Span, sites: Sites
    ) -> None:  # fmt: skip
        self.prefix, self.rows, self.stores, self.span, self.sites = prefix, rows, stores, span, sites

    def product(self, x: Tensor, weights: Tensor, ids: Tensor) -> Tensor:
        """(T, H), (T, k), (T, k) -> (T, H); under tensor parallelism this rank's share of the sum."""
        site = self.sites[0]
        quantized = x if site is None else site(x)
        by_bytes = all(store.decoded is None for store in self.stores)
        run = self._by_bytes if by_bytes else self._by_values
        return weighted_sum(run(quantized, ids), weights.to(x.dtype))

    def _by_bytes(self, x: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = (store.encoded for store in self.stores)
        assert w13 is not None
        assert w2 is not None
        blocks = align_experts(ids, w13)
        h = gate_rows(grouped_w4a16_matmul(x, w13, blocks))
        return grouped_w4a16_matmul(self._quantize_inner(h, ids), w2, blocks)

    def _by_values(self, x: Tensor, ids: Tensor) -> Tensor:
        w13, w2 = (store.decoded for store in self.stores)
        assert w13 is not None
        assert w2 is not None
        expert, order = torch.sort(ids.reshape(-1).long(), stable=True)
        counts = torch.zeros(w13.shape[0], dtype=torch.int64, device=x.device)
        ends = counts.scatter_add_(0, expert, torch.ones_like(expert)).cumsum(0).int()
        h = gate_rows(F.grouped_mm(x[order // ids.shape[-1]], w13.transpose(-1, -2), offs=ends))
        back = torch.argsort(order)
        inner = self._quantize_inner(h[back], ids)[order]
        return F.grouped_mm(inner, w2.transpose(-1, -2), offs=ends)[back]

    def _quantize_inner(self, h: Tensor, ids: Tensor) -> Tensor:
        """The input of the down projection, (T * k, I) in (token, choice) order."""
        site = self.sites[1]
        if site is None:
            return h
        if not site.pools:
            return quantize_residual(h, site.residual, format=site.format, scope="token")
        groups = Groups.of(ids, "grouped_mm")
        real = REAL_TOKENS.mask(ids.shape[0], h.device)[groups.order // ids.shape[-1]]
        return quantize_rows(site, h[groups.order], real, groups)[torch.argsort(groups.order)]

    @property
    def kernel(self) -> str:
        """What multiplies, for the report."""
        decoded = any(store.decoded is not None for store in self.stores)
        name = "grouped, decoded" if decoded else f"grouped, bytes of {self.rows[0].weight}"
        return name if self.sites[0] is None else f"{name}, activations emulated"

    def writes(self, arrived: Mapping[str, Tensor]) -> Iterator[Write]:
        """What an update writes where; raises before the first write."""
        width = self.rows[1].shape[-1]
        start, stop = self.span
        gate_up = _stack(self.rows[0], arrived)
        halves = [(start, stop), (width + start, width + stop)]
        down = _stack(self.rows[1], arrived)
        if isinstance(gate_up, Tensor):
            w13: Tensor | QuantizedTensor = torch.cat([gate_up[:, slice(*half)] for half in halves], 1)
        elif self.span == (0, width):
            w13 = gate_up
        else:
            w13 = join_rows([cut_rows(gate_up, half, self.rows[0].name) for half in halves], ["gate", "up"])
        w2 = (
            down[..., start:stop]
            if isinstance(down, Tensor)
            else cut_columns(down, self.span, self.rows[1].name)
        )
        yield from self.stores[0].writes(w13, self.rows[0].name)
        yield from self.stores[1].writes(w2, self.rows[1].name)

    def reads(self, arrived: Mapping[str, Tensor]) -> list[str]:
        """Published names that `writes` takes."""
        named = [f"{row.name}.{part}" for row in self.rows for part in PARTS]
        return [n for n in (*named, *(row.name for row in self.rows if row.weight is None)) if n in arrived]


def _stack(row: LayerPlan, arrived: Mapping[str, Tensor]) -> QuantizedTensor | Tensor:
    if row.weight is None:
        return arrived[row.name]
    parts = {part: arrived[f"{row.name}.{part}"] for part in PARTS if f"{row.name}.{part}" in arrived}
    return QuantizedTensor.from_tensors(parts, row.shape, row.weight)
