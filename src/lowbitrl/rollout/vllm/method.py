"""vLLM's quantization method "lowbitrl": which module wears which row of the plan.

Weights are loaded as BF16 by vLLM's own loaders, encoded once, and from then on only written by the
weight-transfer backend. Modules that the plan leaves alone get plain methods of ours too: vLLM's own pack their
weights on a CPU, where no update could reach them.
"""

from __future__ import annotations

from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.linear import LinearBase, UnquantizedLinearMethod
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig
from vllm.model_executor.layers.vocab_parallel_embedding import (
    UnquantizedEmbeddingMethod,
    VocabParallelEmbedding,
)
from vllm.model_executor.utils import set_weight_attrs

from lowbitrl.formats import get_format
from lowbitrl.quant import LayerPlan, Plan
from lowbitrl.quant.stacks import encode_stack
from lowbitrl.rollout.vllm import compat
from lowbitrl.rollout.vllm.experts import ServedExperts
from lowbitrl.rollout.vllm.names import Names
from lowbitrl.rollout.vllm.planned import QUANT_METHOD, from_config
from lowbitrl.rollout.vllm.real_tokens import REAL_TOKENS, ServedSite
from lowbitrl.rollout.vllm.served import Member, Run, ServedLinear, Store, keeps_decoded, multiply
from lowbitrl.rollout.vllm.slices import column_span, row_spans


class LowbitConfig(QuantizationConfig):
    """The plan, as vLLM's quantization config."""

    def __init__(self, plan: Plan) -> None:
        super().__init__()
        self.plan = plan
        self.names = Names(plan)

    def __repr__(self) -> str:
        return f"LowbitConfig({self.plan.summary()})"

    def get_name(self) -> str:  # type: ignore[override]
        """As `register_quantization_config` knows it."""
        return QUANT_METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        """What the formats are defined for."""
        return [torch.bfloat16, torch.float32]

    @classmethod
    def get_min_capability(cls) -> int:
        """Compute capability 8.0: the kernels' oldest."""
        return 80

    @staticmethod
    def get_config_filenames() -> list[str]:
        """None: the plan comes through hf_overrides."""
        return []

    @classmethod
    def from_config(cls, config: dict[str, Any]) -> LowbitConfig:
        """From `planned.to_config`; ValueError where the plan did not arrive whole."""
        return cls(from_config(config))

    def get_quant_method(self, layer: nn.Module, prefix: str) -> Any:
        """Our method for every module that has weights; None for those without (attention)."""
        for runner in compat.model_runners():
            REAL_TOKENS.watch(runner)
        if isinstance(layer, LinearBase):
            return ServedLinearMethod(
                prefix, self.names.members(prefix, self.packed_modules_mapping), self.plan
            )
        if isinstance(layer, VocabParallelEmbedding):
            return PlainEmbeddingMethod()
        if isinstance(layer, compat.routed_experts_class()):
            return ServedExpertsMethod(layer.moe_config, prefix, self.names.stacks(prefix), self.plan)  # type: ignore[attr-defined]
        return None


class ServedLinearMethod(UnquantizedLinearMethod):
    """Linears, fused or not, quantized or not."""

    def __init__(self, prefix: str, rows: tuple[LayerPlan, ...], plan: Plan) -> None:
        super().__init__()
        self.prefix, self.rows, self.scope = prefix, rows, plan.recipe.scope

    def create_weights(
        self, layer: nn.Module, input_size_per_partition: int, *args: Any, **kwargs: Any
    ) -> None:
        """As unquantized: BF16 weights that vLLM's loaders fill."""
        super().create_weights(layer, input_size_per_partition, *args, **kwargs)
        self.width = input_size_per_partition

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Encode what was loaded, into storage that later updates write to."""
        refuse_second_load(layer, self.prefix)
        spans = row_spans(layer)
        if len(spans) != len(self.rows):
            raise ValueError(
                f"{self.prefix} fuses {len(spans)} matrices, the plan knows {[r.name for r in self.rows]}"
            )
        weight = layer.weight.data  # type: ignore[union-attr]
        del layer.weight
        site = site_of(self.rows[0], self.scope, weight.device)
        members = [Member(row, span) for row, span in zip(self.rows, spans, strict=True)]
        parts = zip(members, weight.split([m.height for m in members]), strict=True)
        together = [list(part) for _, part in groupby(parts, key=lambda part: part[0].row.weight)]
        runs = tuple(
            _run(layer, f"run{i}_" if len(together) > 1 else "", part, site)
            for i, part in enumerate(together)
        )
        bias = getattr(layer, "bias", None)
        layer.__dict__["lowbitrl"] = ServedLinear(
            self.prefix, runs, column_span(layer, self.width), site, None if bias is None else bias.data
        )

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """(T, K) -> (T, N)."""
        return multiply(layer.__dict__["lowbitrl"], x, bias)


def _run(layer: nn.Module, name: str, parts: list[tuple[Member, Tensor]], site: ServedSite | None) -> Run:
    members, weight = tuple(m for m, _ in parts), torch.cat([w for _, w in parts])
    row = members[0].row
    encoded = get_format(row.weight).quantize(weight, name=row.name) if row.weight else None
    return Run(
        members,
        Store(layer, name, encoded, weight, keeps_decoded(weight.device, weight.dtype, encoded, site)),
    )


class ServedExpertsMethod(FusedMoEMethodBase):
    """Routed experts with SwiGLU."""

    def __init__(self, moe: Any, prefix: str, rows: tuple[LayerPlan, LayerPlan], plan: Plan) -> None:
        super().__init__(moe)
        self.prefix, self.rows, self.scope = prefix, rows, plan.recipe.scope

    def create_weights(
        self, layer: nn.Module, num_experts: int, hidden_size: int, intermediate_size_per_partition: int,
        params_dtype: torch.dtype, **extra: Any,
    ) -> None:  # fmt: skip
        """BF16 stacks that vLLM's loaders fill."""
        count, width = self.rows[1].shape[0], intermediate_size_per_partition
        if num_experts != count:
            raise ValueError(
                f"{self.prefix}: this rank holds {num_experts} of {count} experts; turn expert parallelism off"
            )
        if self.moe.has_bias or "silu" not in str(getattr(layer, "activation", "silu")).lower():
            raise ValueError(f"{self.prefix}: experts with biases or another gate than SwiGLU are not served")
        shapes = {"w13_weight": (count, 2 * width, hidden_size), "w2_weight": (count, hidden_size, width)}
        for name, shape in shapes.items():
            weight = nn.Parameter(torch.empty(shape, dtype=params_dtype), requires_grad=False)
            layer.register_parameter(name, weight)
            set_weight_attrs(weight, extra)

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Encode what was loaded, expert by expert, into storage that later updates write to."""
        refuse_second_load(layer, self.prefix)
        width = layer.w2_weight.shape[-1]  # type: ignore[union-attr]
        rank = self.moe.moe_parallel_config.tp_rank
        sites = tuple(site_of(row, self.scope, layer.w2_weight.device) for row in self.rows)  # type: ignore[union-attr]
        if sites[1] is not None and sites[1].pools and layer.w2_weight.is_cuda:  # type: ignore[union-attr]
            raise ValueError(
                f"{self.prefix}: a batch-wide residual at w2 looks at each expert's rows on the host, which no "
                "captured graph can; use residual_scope='token', or leave w2 out of residual_sites"
            )
        stores = tuple(
            self._store(layer, name, row, site)
            for name, row, site in zip(("w13_", "w2_"), self.rows, sites, strict=True)
        )
        layer.__dict__["lowbitrl"] = ServedExperts(
            self.prefix,
            self.rows,
            stores,
            (rank * width, (rank + 1) * width),
            sites,  # type: ignore[arg-type]
        )

    def _store(self, layer: nn.Module, name: str, row: LayerPlan, site: ServedSite | None) -> Store:
        weight = getattr(layer, f"{name}weight").data
        delattr(layer, f"{name}weight")
        encoded = encode_stack(weight, get_format(row.weight), row.name) if row.weight else None
        # Experts multiply 4-bit bytes or decoded values: never 8-bit codes.
        return Store(layer, name, encoded, weight, keeps_decoded(weight.device, weight.dtype, encoded, None))

    def get_fused_moe_quant_config(self, layer: nn.Module) -> None:
        """None: vLLM's modular kernels are not used."""

    def apply(
        self, layer: nn.Module, x: Tensor, topk_weights: Tensor, topk_ids: Tensor, *shared: Any, **kwargs: Any
    ) -> Tensor:  # type: ignore[override]
        """(T, H) -> (T, H)."""
        return layer.__dict__["lowbitrl"].product(x, topk_weights, topk_ids)


class PlainEmbeddingMethod(UnquantizedEmbeddingMethod):
    """Embeddings and heads as they are, unpacked, so that an update in place is served."""

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        """Leave the weight alone."""

    def apply(self, layer: nn.Module, x: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits."""
        return F.linear(x, layer.weight, bias)  # type: ignore[arg-type]


def site_of(row: LayerPlan, scope: str, device: torch.device) -> ServedSite | None:
    """The input quantizer that a row asks for."""
    return ServedSite(row.activation, row.residual, scope, device) if row.activation else None


def refuse_second_load(layer: nn.Module, prefix: str) -> None:
    """Raise where vLLM would load weights over served bytes, which would serve other weights than published."""
    if "lowbitrl" in layer.__dict__:
        raise RuntimeError(
            f"{prefix}: load_weights and reload_weights do not reach served bytes; send updates through the "
            "weight-transfer backend 'lowbitrl'"
        )
