"""Muon in verl: hidden matrices orthogonalized, each gathered once a step; AdamW for everything else.

    m <- momentum m + g;   u = g + momentum m (Nesterov);   W <- W - lr 0.2 sqrt(max(N, K)) NS(u)

NS is five Newton-Schulz steps in BF16 towards the orthogonal factor of u (Jordan 2024, its quintic
coefficients); 0.2 sqrt(max(N, K)) gives the update AdamW's root mean square (Liu et al. 2025). torch's own
Muon takes shards as well, but gathers a matrix in every one of those steps, and takes no stacks of experts.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

QUINTIC = (3.4445, -4.7750, 2.0315)
STEPS = 5
RMS = 0.2


def newton_schulz(matrix: Tensor) -> Tensor:
    """(..., N, K) with singular values near 1, in BF16; a stack's matrices apart."""
    wide = matrix.shape[-2] <= matrix.shape[-1]
    x = (matrix if wide else matrix.mT).bfloat16()
    x = x / x.norm(dim=(-2, -1), keepdim=True).clamp(min=1e-7)
    a, b, c = QUINTIC
    for _ in range(STEPS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x if wide else x.mT


class Muon(torch.optim.Optimizer):
    """Both optimizers as the one object that verl schedules, offloads and checkpoints.

    Args:
        hidden: parameters (N, K) or (E, N, K), sharded or whole. rest: AdamW's.
        muon_lr: of the hidden matrices; a scheduler moves it with `lr`, in proportion.
    """

    def __init__(
        self, hidden: Sequence[Tensor], rest: Sequence[Tensor], *, lr: float, muon_lr: float, momentum: float = 0.95,
        weight_decay: float = 0.0, betas: tuple[float, float] = (0.9, 0.95), eps: float = 1e-8,
    ) -> None:  # fmt: skip
        self._adamw = torch.optim.AdamW(list(rest), lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        matrices = {"params": list(hidden), "lr": muon_lr, "momentum": momentum, "weight_decay": weight_decay}
        super().__init__([*self._adamw.param_groups, matrices], {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Step every parameter that has a gradient; every rank takes part in each gather."""
        *vectors, matrices = self.param_groups
        # Loading a checkpoint replaces groups and state: AdamW is handed what is there now.
        self._adamw.param_groups, self._adamw.state = vectors, self.state
        self._adamw.step()
        for parameter in matrices["params"]:
            if parameter.grad is not None:
                self._step_matrix(parameter, matrices)

    def _step_matrix(self, parameter: Tensor, group: dict[str, Any]) -> None:
        state, gradient = self.state[parameter], parameter.grad
        assert gradient is not None
        moment = state.setdefault("momentum_buffer", torch.zeros_like(gradient))
        moment.mul_(group["momentum"]).add_(gradient)
        direction = gradient.add(moment, alpha=group["momentum"])
        whole = direction.full_tensor() if isinstance(direction, DTensor) else direction
        update = newton_schulz(whole).to(parameter.dtype)
        if isinstance(parameter, DTensor):
            # Every rank computed the same matrix and keeps its own rows: nothing is sent.
            update = distribute_tensor(
                update, parameter.device_mesh, parameter.placements, src_data_rank=None
            )
        rate = group["lr"] * RMS * max(whole.shape[-2:]) ** 0.5
        parameter.mul_(1 - group["lr"] * group["weight_decay"]).sub_(update, alpha=rate)


def build_muon(module: nn.Module, config: Any) -> Muon:
    """`Muon` on a model from verl's optimizer config; `override_optimizer_config` holds muon_lr, momentum and eps."""
    ends = [getattr(module, f"get_{side}_embeddings")() for side in ("input", "output")]
    excluded = {id(m.weight) for m in ends if m is not None}
    trained = [p for p in module.parameters() if p.requires_grad]
    hidden = [p for p in trained if p.ndim > 1 and id(p) not in excluded]
    own = dict(config.override_optimizer_config or {})
    return Muon(
        hidden,
        [p for p in trained if p.ndim == 1 or id(p) in excluded],
        lr=config.lr,
        betas=tuple(config.betas),
        weight_decay=config.weight_decay,
        **({"muon_lr": config.lr} | own),
    )
