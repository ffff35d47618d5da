"""fp32 masters for whatever optimizer TRL makes: BF16 weights lose steps below half their ulp."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

HALF = (torch.bfloat16, torch.float16)
KEY = "masters"


def keep_masters(optimizer: torch.optim.Optimizer, fp32_gradients: bool = True) -> None:
    """Let `optimizer` step fp32 copies of its half-precision parameters; it must not have stepped yet.

        parameter.grad (accumulated over micro-batches) -> master.grad (fp32) -> step -> parameter = master

    Clipping and gradient norms of the training loop see the parameters' gradients as before. Masters are part of
    the optimizer's state dict, under "masters".

    Args:
        fp32_gradients: micro-batches add up in fp32. Not under DDP, whose buckets have the parameters' dtype.

    Raises:
        ValueError: on loading a state dict without as many masters.
    """
    pairs: list[tuple[Tensor, Tensor]] = []
    for group in optimizer.param_groups:
        group["params"] = [_master(parameter, pairs) for parameter in group["params"]]
    if fp32_gradients:
        for parameter, _ in pairs:
            parameter.grad_dtype = torch.float32

    def give_gradients(*_: Any) -> None:
        for parameter, master in pairs:
            master.grad = None if parameter.grad is None else parameter.grad.float()

    @torch.no_grad()
    def write_back(*_: Any) -> None:
        for parameter, master in pairs:
            parameter.copy_(master)
            master.grad = None

    def save(_: torch.optim.Optimizer, state: dict[str, Any]) -> None:
        state[KEY] = [master.detach() for _, master in pairs]

    @torch.no_grad()
    def load(optimizer: torch.optim.Optimizer, state: dict[str, Any]) -> dict[str, Any]:
        if len(state.get(KEY, ())) != len(pairs):
            raise ValueError(
                f"the checkpoint holds {len(state.get(KEY, ()))} fp32 masters and this model has {len(pairs)}: it "
                "was saved with masters=False or of another model"
            )
        for (parameter, master), saved in zip(pairs, state[KEY], strict=True):
            master.copy_(saved)
            parameter.copy_(saved)
        return {name: value for name, value in state.items() if name != KEY}

    optimizer.register_step_pre_hook(give_gradients)
    optimizer.register_step_post_hook(write_back)
    optimizer.register_state_dict_post_hook(save)
    optimizer.register_load_state_dict_pre_hook(load)


def _master(parameter: Tensor, pairs: list[tuple[Tensor, Tensor]]) -> Tensor:
    if parameter.dtype not in HALF:
        return parameter
    pairs.append((parameter, parameter.detach().float().requires_grad_()))
    return pairs[-1][1]
