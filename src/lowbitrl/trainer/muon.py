"""Muon: momentum orthogonalized, for matrices, stacks of experts, and shards of either.

    m <- lerp(m, g, 1 - momentum);   u = lerp(g, m, momentum)  (Nesterov)
    W <- (1 - lr wd) W - lr 0.2 sqrt(max(N, K)) NS(u)

NS: five Newton-Schulz steps in BF16 towards the orthogonal factor of u, with Jordan's quintic (2024); the factor
makes the update as large as AdamW's (Liu et al. 2025). On a whole matrix this is torch.optim.Muon to the bit;
torch's takes no stacks, and gathers a shard in every one of its steps.

    stack (E, N, K), sharded by expert: each rank orthogonalizes the experts it holds, all at once; nothing is sent
    matrix (N, K), sharded by row: ranks take turns; each gathers one matrix a round and sends its rows back
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
SMALLEST = 1e-7
RMS = 0.2


class Muon(torch.optim.Optimizer):
    """Steps matrices (N, K) and stacks of them (E, N, K), whole or sharded by their first dimension."""

    def __init__(self, params: Sequence[Tensor], *, lr: float, momentum: float, weight_decay: float) -> None:
        super().__init__(params, {"lr": lr, "momentum": momentum, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; all ranks take part."""
        for group in self.param_groups:
            stepped = [p for p in group["params"] if p.grad is not None]
            directions = [self._direction(p, group["momentum"]) for p in stepped]
            for parameter, update in zip(stepped, orthogonalize(directions), strict=True):
                weight = _local(parameter)
                weight.mul_(1 - group["lr"] * group["weight_decay"])
                rate = group["lr"] * RMS * max(parameter.shape[-2:]) ** 0.5
                weight.add_(update.to(weight.device), alpha=-rate)

    def _direction(self, parameter: Tensor, momentum: float) -> Tensor:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(gradient)
        moment = state["momentum_buffer"]
        _local(moment).lerp_(_local(gradient), 1 - momentum)
        return gradient.lerp(moment, momentum)


def orthogonalize(directions: Sequence[Tensor]) -> list[Tensor]:
    """The orthogonal factors, BF16: of a shard, its own rows or experts."""
    rows = [d for d in directions if isinstance(d, DTensor) and d.ndim == 2]
    shared = iter(_by_turns(rows) if rows else ())
    return [
        next(shared) if isinstance(d, DTensor) and d.ndim == 2 else newton_schulz(_computing(d))
        for d in directions
    ]


def newton_schulz(matrix: Tensor) -> Tensor:
    """(N, K), or (E, N, K) matrix by matrix, with singular values near 1, in BF16."""
    tall = matrix.shape[-2] > matrix.shape[-1]
    x = matrix.bfloat16()
    x = x.mT if tall else x
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=SMALLEST)
    multiply_add = torch.addmm if x.ndim == 2 else torch.baddbmm
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = multiply_add(x, multiply_add(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def _by_turns(matrices: list[DTensor]) -> list[Tensor]:
    """Local rows of each factor: in a round rank j gathers, orthogonalizes and sends back matrix j."""
    group = matrices[0].device_mesh.get_group()
    size = dist.get_world_size(group)
    rounds = [matrices[first : first + size] for first in range(0, len(matrices), size)]
    return [rows for turn in rounds for rows in _one_round(turn, group, size)]


def _one_round(turn: list[DTensor], group: dist.ProcessGroup, size: int) -> list[Tensor]:
    shards = [_computing(matrix).bfloat16() for matrix in turn]
    sent = [shard.numel() for shard in shards] + [0] * (size - len(turn))
    mine = turn[dist.get_rank(group)] if dist.get_rank(group) < len(turn) else None
    taken = [0] * size if mine is None else [n * mine.shape[1] for n in _rows_by_rank(mine.shape[0], size)]
    out = torch.cat([shard.flatten() for shard in shards])
    gathered = out.new_empty(sum(taken))
    dist.all_to_all_single(gathered, out, taken, sent, group=group)
    factor = gathered if mine is None else newton_schulz(gathered.view(mine.shape)).flatten()
    back = torch.empty_like(out)
    dist.all_to_all_single(back, factor, sent, taken, group=group)
    return [rows.view(shard.shape) for rows, shard in zip(back.split(sent[: len(turn)]), shards, strict=True)]


def _rows_by_rank(rows: int, size: int) -> list[int]:
    """How FSDP2 cuts a first dimension: chunks of ceil(rows / size), the last ones shorter or empty."""
    chunk = -(-rows // size)
    return [max(0, min(chunk, rows - rank * chunk)) for rank in range(size)]


def _local(tensor: Tensor) -> Tensor:
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _computing(tensor: Tensor) -> Tensor:
    """The local part where the ranks compute: offloaded shards lie elsewhere."""
    return tensor.to_local().to(tensor.device_mesh.device_type) if isinstance(tensor, DTensor) else tensor
