"""fp32 masters under BF16 compute, stepped by torch's AdamW and by Muon.

    gradient (compute dtype, per micro-batch) -> added to the master's fp32 gradient -> step ->
    parameter = master cast to the compute dtype

A step smaller than half a BF16 ulp would be lost in a BF16 weight; masters keep it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Any, Literal

import torch
from pydantic import BaseModel, ConfigDict, Field
from torch import Tensor, nn

from lowbitrl.quant import whole
from lowbitrl.trainer.muon import Muon

MASTERS, STATES = "masters.", "optimizer."
"""How names of tensors in a checkpoint begin."""

Beta = Annotated[float, Field(ge=0, lt=1)]


class OptimizerConfig(BaseModel):
    """Settings of the optimizer. Betas and epsilon default to QUADS's (section 4.1).

    Attributes:
        name: "adamw", or "muon" for hidden matrices, experts one by one, with AdamW for embeddings, head and
            vectors.
        learning_rate: of AdamW, reached after warm-up, constant from there.
        muon_learning_rate: of Muon; its update is scaled to AdamW's root mean square, so the
            same order of magnitude fits.
        betas / eps: AdamW's decay rates and its denominator's addend.
        weight_decay: decoupled. momentum: Muon's.
        masters: "float32", or "compute": the optimizer steps the parameters in the compute dtype
            themselves, gradients and moments included, as both papers do: less memory, and steps
            below half a BF16 ulp are lost.
        warmup_steps: optimizer steps of linear warm-up from 0.
        max_grad_norm: total L2 norm above which gradients are scaled down; 0 turns it off.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    name: Literal["adamw", "muon"] = "adamw"
    learning_rate: float = Field(default=1e-6, gt=0)
    muon_learning_rate: float = Field(default=1e-6, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.95)
    eps: float = Field(default=1e-15, gt=0)
    weight_decay: float = Field(default=0.0, ge=0)
    momentum: float = Field(default=0.95, ge=0, lt=1)
    masters: Literal["float32", "compute"] = "float32"
    warmup_steps: int = Field(default=0, ge=0)
    max_grad_norm: float = Field(default=1.0, ge=0)


class MasterOptimizer:
    """Owns the fp32 masters of a model's trainable parameters and steps them.

    A gradient of a BF16 parameter is moved into its master's fp32 gradient as soon as it is
    complete, so micro-batches accumulate in fp32 and no second copy stays.

    Args:
        model: its parameters with requires_grad become the optimizer's.
    """

    def __init__(self, model: nn.Module, config: OptimizerConfig) -> None:
        self.config = config
        self.steps = 0
        self.parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
        if not self.parameters:
            raise ValueError(
                "no parameter of the model has requires_grad, so nothing would train; give the learner, prepared with "
                "side='learner'"
            )
        own = config.masters == "compute"
        self.masters = {n: p if own else _master(p) for n, p in self.parameters.items()}
        hidden = hidden_matrices(model, self.parameters) if config.name == "muon" else set()
        self.optimizers = _build(config, self.masters, hidden)
        self._owners = {id(p): o for o in self.optimizers for g in o.param_groups for p in g["params"]}
        for name, parameter in self.parameters.items():
            if self.masters[name] is not parameter:
                parameter.register_post_accumulate_grad_hook(_mover(self.masters[name]))

    def gradient_norm(self) -> Tensor:
        """Total L2 norm of the accumulated gradients, fp32 scalar."""
        grads = [m.grad for m in self.masters.values() if m.grad is not None]
        return whole(nn.utils.get_total_norm(grads), torch.float32) if grads else torch.tensor(0.0)

    def step(self, norm: Tensor) -> None:
        """Clip to `max_grad_norm` given the total norm, step, and write the parameters back."""
        if self.config.max_grad_norm:
            nn.utils.clip_grads_with_norm_(self.masters.values(), self.config.max_grad_norm, norm)
        warm = min(1.0, (self.steps + 1) / max(1, self.config.warmup_steps))
        for optimizer in self.optimizers:
            for group in optimizer.param_groups:
                group["lr"] = group["peak_lr"] * warm
            optimizer.step()
        self.zero_grad()
        self.write_back()
        self.steps += 1

    @torch.no_grad()
    def write_back(self) -> None:
        """parameter = master in the compute dtype, in place (this moves the version counters)."""
        pairs = [(p, self.masters[n]) for n, p in self.parameters.items() if self.masters[n] is not p]
        plain = [pair for pair in pairs if not hasattr(pair[0], "full_tensor")]
        if plain:
            # One call: hundreds of small copies would wait for the host, not for memory.
            into, masters = zip(*plain, strict=True)
            torch._foreach_copy_(into, masters)  # pyright: ignore[reportPrivateImportUsage]
        for parameter, master in pairs:
            if hasattr(parameter, "full_tensor"):
                parameter.copy_(master)

    def zero_grad(self) -> None:
        """Drop accumulated gradients."""
        for optimizer in self.optimizers:
            optimizer.zero_grad(set_to_none=True)

    def tensors(self) -> dict[str, Tensor]:
        """Masters as "masters.NAME" and the optimizer's states as "optimizer.NAME.KIND": what a checkpoint holds."""
        named = {f"{MASTERS}{name}": master.detach() for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for kind, value in self._states(master).items():
                named[f"{STATES}{name}.{kind}"] = value
        return named

    def make_states(self, names: Iterable[str]) -> None:
        """Make the states of those names, zeros, for a checkpoint to be read into; names of none are passed over."""
        for name in names:
            parameter, _, kind = name.removeprefix(STATES).rpartition(".")
            if name.startswith(STATES) and parameter in self.masters:
                master = self.masters[parameter]
                value = torch.zeros(()) if kind == "step" else torch.zeros_like(master, requires_grad=False)
                self._states(master)[kind] = value

    def resume(self, steps: int) -> None:
        """Go on after `steps` optimizer steps, from the masters and states that were put in place."""
        self.steps = steps
        self.write_back()

    def _states(self, master: Tensor) -> dict[str, Tensor]:
        """What the optimizer that steps `master` keeps for it."""
        return self._owners[id(master)].state[master]


def _master(parameter: nn.Parameter) -> Tensor:
    if parameter.dtype == torch.float32:
        return parameter
    return parameter.detach().float().requires_grad_()


def _mover(master: Tensor) -> Any:
    def move(parameter: Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move


def hidden_matrices(model: nn.Module, parameters: dict[str, nn.Parameter]) -> set[str]:
    """Names of matrices and stacks of them that are neither embeddings, the output head nor rows of biases."""
    ends = [getattr(model, f"get_{side}_embeddings", lambda: None)() for side in ("input", "output")]
    excluded = {id(m.weight) for m in ends if m is not None}
    weights = {n: p for n, p in parameters.items() if p.ndim > 1 and not n.endswith("bias")}
    return {n for n, p in weights.items() if id(p) not in excluded}


def _build(
    config: OptimizerConfig, masters: dict[str, Tensor], hidden: set[str]
) -> list[torch.optim.Optimizer]:
    rest = [m for n, m in masters.items() if n not in hidden]
    optimizers: list[torch.optim.Optimizer] = []
    if rest:
        optimizers.append(
            torch.optim.AdamW(
                rest,
                config.learning_rate,
                betas=config.betas,
                eps=config.eps,
                weight_decay=config.weight_decay,
                # One pass over the states instead of one an operation; elsewhere torch's own choice.
                fused=True if all(m.is_cuda for m in rest) else None,
            )
        )
    if hidden:
        optimizers.append(
            Muon(
                [m for n, m in masters.items() if n in hidden],
                lr=config.muon_learning_rate,
                weight_decay=config.weight_decay,
                momentum=config.momentum,
            )
        )
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["peak_lr"] = group["lr"]
    return optimizers
