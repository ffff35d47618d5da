"""The learner in verl: its FSDP2 engine, wearing the plan and publishing the plan's bytes.

    _build_module          prepare(model, plan) before anything is sharded
    _build_fsdp_module     verl's; the bytes that a layer's pass was made with go when the pass is over
    _build_optimizer       Muon for hidden matrices, AdamW for the rest, where the recipe says so
    forward_step           the whole loss with the sampler's log-probabilities in reach
    prepare_model_outputs  log-probabilities from fp32 logits, as the rollout takes them
    get_per_tensor_param   full tensors in the compute dtype, encoded group by group, closed by a manifest

A frozen reference (`forward_only`) is the plain model: it stands for the policy before any quantization.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from verl.utils.device import get_device_id
from verl.workers.engine import EngineRegistry
from verl.workers.engine.fsdp.transformer_impl import FSDPEngineWithLMHead

from lowbitrl.integrations.verl.losses import with_rollout_logprobs
from lowbitrl.integrations.verl.muon import build_muon
from lowbitrl.integrations.verl.settings import LearnerSettings
from lowbitrl.integrations.verl.stream import sealed_stream
from lowbitrl.integrations.verl.watch import Watch
from lowbitrl.quant import attachment, prepare
from lowbitrl.quant.wearing import compute_in

VENDOR = "lowbitrl"
DEVICES = ["cuda", "cpu"]


def register() -> None:
    """Make `VERL_ENGINE_VENDOR=lowbitrl` mean this engine; idempotent."""
    if ("cuda", VENDOR) in EngineRegistry._engines.get("language_model", {}).get("fsdp2", {}):
        return
    EngineRegistry.register("language_model", ["fsdp", "fsdp2"], DEVICES, vendor=VENDOR)(LowbitEngine)


class LowbitEngine(FSDPEngineWithLMHead):
    """verl's engine under a plan.

    Raises:
        ValueError: `lowbitrl` settings are missing, or something beside them that the plan cannot be worn under.
    """

    def __init__(
        self, model_config: Any, engine_config: Any, optimizer_config: Any, checkpoint_config: Any
    ) -> None:
        super().__init__(model_config, engine_config, optimizer_config, checkpoint_config)
        self.settings = None if engine_config.forward_only else checked(model_config, engine_config)
        self.plan = self.settings and self.settings.load()
        self.version = -1
        self.watch = Watch(self, self.settings, self.plan.recipe) if self.settings and self.plan else None

    def _build_module(self) -> nn.Module:
        module = super()._build_module()
        if self.plan is not None:
            prepare(module, self.plan, "learner")
            module.register_forward_pre_hook(_name_real_tokens, with_kwargs=True)
        return module

    def _build_fsdp_module(self, module: nn.Module) -> nn.Module:
        module = super()._build_fsdp_module(module)
        if self.plan is not None:
            # Masters are fp32 when `prepare` sees them; passes compute in what FSDP gathers.
            compute_in(module, self._autocast_dtype)
            forget_after_passes(module)
        return module

    def _build_optimizer(self, module: nn.Module) -> torch.optim.Optimizer:
        if self.plan is not None and self.optimizer_config.optimizer == "Muon":
            return build_muon(module, self.optimizer_config)
        return super()._build_optimizer(module)

    def forward_step(
        self, micro_batch: Any, loss_function: Callable[..., Any] | None, forward_only: bool
    ) -> Any:
        """verl's, with the sampler's log-probabilities in reach of the loss."""
        whole = with_rollout_logprobs(loss_function) if loss_function is not None else None
        return super().forward_step(micro_batch, loss_function=whole, forward_only=forward_only)

    def prepare_model_outputs(self, output: Any, *rest: Any, **options: Any) -> Any:
        """verl's, from fp32 logits: in BF16 it would round temperature and, without flash-attn, log-probabilities."""
        if self.plan is not None and getattr(output, "logits", None) is not None:
            output.logits = output.logits.float()
        return super().prepare_model_outputs(output, *rest, **options)

    def infer_batch(self, data: Any, loss_function: Callable[..., Any] | None = None) -> Any:
        """verl's; a batch that brings the sampler's log-probabilities is compared with them."""
        output = super().infer_batch(data, loss_function)
        if self.watch is not None:
            self.watch.compare(data, output)
        return output

    def score(self, data: Any) -> Tensor:
        """Log-probabilities of whole sequences, nested; for passes under another arithmetic."""
        return super().infer_batch(data, None)["model_output"]["log_probs"]

    def train_batch(self, data: Any, loss_function: Callable[..., Any]) -> Any:
        """verl's, with what was seen since the last update among the metrics."""
        output = super().train_batch(data, loss_function)
        if self.watch is not None and self.is_mp_src_rank_with_outputs():
            output["metrics"].update(self.watch.collect())
        return output

    def get_per_tensor_param(self, **options: Any) -> tuple[Iterator[tuple[str, Tensor]], None]:
        """The published bytes of the current weights, and their manifest last; no adapter."""
        if self.plan is None:
            return super().get_per_tensor_param(**options)
        self.version += 1
        return sealed_stream(self._full_tensors(), self.plan, self.version), None

    def get_per_tensor_param_shard(self, **options: Any) -> Any:
        """Refused: shards and their deltas are of BF16 weights, which no rollout of ours takes."""
        raise ValueError(
            "rollout.checkpoint_engine.backend=delta_sharded ships shards of BF16 weights; published bytes go through "
            "'naive' or a backend that takes full tensors"
        )

    @torch.no_grad()
    def _full_tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Parameters in the compute dtype, one gathered at a time; every rank takes part in each."""
        for name, parameter in self.module.named_parameters():
            # Cast before it travels: what FSDP gathers for a pass. Bytes of the fp32 master would be others.
            cast = parameter.detach().to(get_device_id()).to(self._autocast_dtype)
            yield name, cast.full_tensor() if isinstance(cast, DTensor) else cast


def checked(model_config: Any, engine_config: Any) -> LearnerSettings:
    """The engine's settings, once nothing stands against them; ValueError."""
    settings = getattr(engine_config, "settings", None)
    if settings is None:
        raise ValueError(
            "VERL_ENGINE_VENDOR=lowbitrl, but actor.fsdp_config has no lowbitrl settings; start with the overrides "
            "that `lowbitrl verl overrides recipe.toml` prints, or unset the variable"
        )
    if engine_config.strategy != "fsdp2":
        raise ValueError(
            f"actor.strategy={engine_config.strategy!r}: flattened weights hold no bytes; use 'fsdp2'"
        )
    if getattr(engine_config.qat, "enable", False):
        raise ValueError("actor.fsdp_config.qat.enable=true would quantize a second time; set it to false")
    if model_config.lora_rank > 0:
        raise ValueError(
            f"model.lora_rank={model_config.lora_rank}: adapters are not published as bytes; use 0"
        )
    return settings


def forget_after_passes(module: nn.Module) -> None:
    """Drop a layer's bytes when its pass is over.

    Gathers write past the version counters that bytes are cached against, and a sharded model should not
    keep a low-bit copy of itself whole on every rank.
    """
    blocks = [(name, m) for name, m in module.named_modules() if isinstance(m, FSDPModule)]
    for group in attachment(module).groups:
        inside = [
            (len(name), m) for name, m in blocks if group.names[0].startswith(f"{name}." if name else "")
        ]
        owner = max(inside, key=lambda pair: pair[0])[1]
        owner.register_forward_hook(lambda *_, g=group: g.invalidate(), always_call=True)


def _name_real_tokens(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Padding is named by its mask; packed rows have none. Left set: backward may run a layer again."""
    mask = kwargs.get("attention_mask")
    attachment(module).tokens.real = mask.bool() if isinstance(mask, Tensor) and mask.ndim == 2 else None
