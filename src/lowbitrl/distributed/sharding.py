"""FSDP2 on a prepared learner: fp32 master shards, compute-dtype layers gathered one at a time.

    master shard (fp32) -> cast -> all-gather -> layer in the compute dtype -> its published bytes
    gradient (compute dtype) -> fp32 -> summed over ranks -> added to the shard's gradient

Sums, not means: the loss's denominator is already the whole batch's.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
    register_fsdp_forward_method,
)
from transformers import PreTrainedModel

from lowbitrl.distributed import ranks
from lowbitrl.quant import attachment

T = TypeVar("T")


class DistributedConfig(BaseModel):
    """How the learner is spread over the processes of torchrun; without torchrun nothing is.

    Attributes:
        cpu_offload: keep master shards, their gradients and the optimizer's states in host memory; layers
            travel to the GPU for each pass, and the optimizer steps on the CPU.
        keep_bytes: hold the learner's encoded weights on every rank from one update to the next, about half a
            byte a weight in 4 bits; off, each layer is encoded again in every pass (use it with
            trainer.gradient_checkpointing, which lets them go between forward and backward too).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    cpu_offload: bool = False
    keep_bytes: bool = True


def shard(
    model: PreTrainedModel, config: DistributedConfig, device: torch.device, *, masters: bool = True
) -> None:
    """Spread a prepared model over the ranks in place, a layer at a time; alone, nothing.

    Args:
        model: on any device; parameters end as shards, on the host if offloaded, else on `device`.
        masters: make the shards fp32, for an optimizer to step; otherwise they stay in the compute dtype.

    Raises:
        ValueError: parameters of several dtypes, or a model that does not say what its layers are.
    """
    if not ranks.joined():
        return
    dtype = _only_dtype(model)
    options: dict[str, Any] = {
        "mesh": init_device_mesh(device.type, (ranks.size(),)),
        # The model is as it was on one process: no input is cast on the way into a layer.
        "mp_policy": MixedPrecisionPolicy(dtype, torch.float32, cast_forward_inputs=False),
        "offload_policy": _offload(config, device),
        "reshard_after_forward": True,
    }
    for module in [*_layers(model), model]:
        for parameter in module.parameters():
            if masters and not hasattr(parameter, "full_tensor"):
                parameter.data = parameter.data.float()
        fully_shard(module, **options)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)
    attachment(model).spread(device, config.keep_bytes)
    model.__dict__["lowbitrl_run"] = _run
    register_fsdp_forward_method(model, "lowbitrl_run")


def whole_pass(model: nn.Module, work: Callable[[], T]) -> T:
    """`work()`, which calls parts of `model` past its own forward, with what they share gathered.

    Only tensors in its result, a tuple, carry gradients back.
    """
    run = model.__dict__.get("lowbitrl_run")
    return work() if run is None else run(work)


def device_of(model: PreTrainedModel) -> torch.device:
    """Where the model computes, which is not where offloaded shards lie."""
    attached = model.__dict__.get("lowbitrl")
    return (attached and attached.device) or model.device


def _run(work: Callable[[], T]) -> T:
    return work()


def _offload(config: DistributedConfig, device: torch.device) -> OffloadPolicy:
    if not config.cpu_offload:
        return OffloadPolicy()
    # Pinning needs a GPU's driver.
    return CPUOffloadPolicy(pin_memory=device.type == "cuda")


def _only_dtype(model: nn.Module) -> torch.dtype:
    dtypes = {parameter.dtype: name for name, parameter in model.named_parameters()}
    if len(dtypes) > 1:
        (one, first), (other, second), *_ = ((str(d), n) for d, n in dtypes.items())
        raise ValueError(
            f"{first} is {one} and {second} {other}: a sharded learner computes in one dtype; load the model in one"
        )
    return next(iter(dtypes))


def layers_of(model: nn.Module) -> list[nn.Module]:
    """The modules that are sharded one by one; empty where the model does not say what its layers are."""
    names = set(getattr(model, "_no_split_modules", None) or ())
    return [module for module in model.modules() if type(module).__name__ in names]


def _layers(model: PreTrainedModel) -> list[nn.Module]:
    layers = layers_of(model)
    if not layers:
        raise ValueError(
            f"{type(model).__name__} does not name its layers (_no_split_modules), so there is nothing to shard by; "
            "train it in one process"
        )
    return layers
