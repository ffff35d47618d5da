"""A weight that may be spread over processes, as one tensor."""

from __future__ import annotations

import torch
from torch import Tensor


def whole(weight: Tensor, dtype: torch.dtype, device: torch.device | None = None) -> Tensor:
    """The full weight without gradient; one that is not spread comes as it is.

    A shard (a DTensor) is cast, moved to `device` and gathered: all ranks must ask, in the same order. What
    is cast before it travels is what FSDP computes with; bytes of the fp32 master would be others.
    """
    if not hasattr(weight, "full_tensor"):
        return weight.detach()
    from torch.distributed.tensor import DTensor

    assert isinstance(weight, DTensor)
    local = weight.to_local().detach().to(device or weight.device, dtype)
    shape, stride = weight.shape, weight.stride()
    return DTensor.from_local(
        local, weight.device_mesh, weight.placements, run_check=False, shape=shape, stride=stride
    ).full_tensor()
