"""The learner's side of a weight update: encode once, freeze, describe.

learner weights (compute dtype) -> bytes the learner's own forward uses -> the same bytes shipped
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lowbitrl.quant import Attachment, attachment, whole, wire
from lowbitrl.quant.groups import WeightGroup, refresh
from lowbitrl.sync.manifest import Manifest


@dataclass(frozen=True)
class Publication:
    """One version of the weights: named tensors that no later step will write to.

    Attributes:
        tensors: quantized weights as "m.qdata", "m.scale", "m.global_scale", a stack of experts
            whole (`quant.export` takes stacks apart for checkpoints and other engines); the static
            maximum of a fused group's input as "m.input_amax", fp32 (), m being its first member;
            the rest by parameter name, in the compute dtype.
        manifest: what an engine verifies.
    """

    tensors: dict[str, Tensor]
    manifest: Manifest

    def stream(self) -> Iterator[tuple[str, Tensor]]:
        """(name, tensor), the shape engines take updates in."""
        yield from self.tensors.items()


def publish(learner: nn.Module, version: int) -> Publication:
    """Freeze the learner's current weights as `version`.

    Bytes are handed over by reference: encoding makes new tensors for every version, so they never
    change. BF16 parameters are written in place by the optimizer, so they are copied here, once.

    Static scales are refreshed here: they become the maxima seen under `quant.observing` since the
    last publish, or stay where nothing was seen.

    Args:
        learner: a model prepared with side="learner".

    Raises:
        ValueError: a weight or an observed input holds NaN or Inf (named), or the model was never prepared.
        RuntimeError: a static site that never saw an activation; call `quant.calibrate` first.
    """
    attached = attachment(learner)
    tensors: dict[str, Tensor] = {}
    refresh([group for group in attached.groups if isinstance(group, WeightGroup)])
    for group in attached.groups:
        tensors.update(wire(group.encoded()))
    rest = {name: _snapshot(parameter, attached) for name, parameter in _plain(learner)}
    _check_finite(rest)
    tensors |= rest | _scales(attached)
    return Publication(tensors, Manifest.of(version, attached.plan.digest, tensors))


def pieces(learner: nn.Module) -> Iterator[dict[str, Tensor]]:
    """The tensors of a `Publication`, a fused group or a parameter at a time, made when they are asked for.

    Of a learner spread over processes nothing but the piece at hand is gathered: all ranks must ask for all.

    Raises:
        as `publish`.
    """
    attached = attachment(learner)
    for group in attached.groups:
        yield dict(wire(group.encoded()))
    for name, parameter in _plain(learner):
        piece = {name: _snapshot(parameter, attached)}
        _check_finite(piece)
        yield piece
    yield _scales(attached)


def _plain(learner: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters that are not shipped as bytes."""
    shipped = {name for group in attachment(learner).groups for name in group.parameters}
    return [(name, parameter) for name, parameter in learner.named_parameters() if name not in shipped]


def _scales(attached: Attachment) -> dict[str, Tensor]:
    return {f"{name}.input_amax": scale.refresh().clone() for name, scale in attached.scales.items()}


def _snapshot(parameter: Tensor, attached: Attachment) -> Tensor:
    copy = whole(parameter, attached.dtype, attached.device)
    return copy.clone() if attached.device is None else copy


def _check_finite(tensors: dict[str, Tensor]) -> None:
    """One look for all: a wait a tensor would leave a GPU idle hundreds of times."""
    flags = [torch.isfinite(tensor).all() for tensor in tensors.values()]
    if flags and not bool(torch.stack(flags).all()):
        broken = next(name for name, flag in zip(tensors, flags, strict=True) if not flag)
        raise ValueError(
            f"{broken} holds NaN or Inf; nothing was published: resume from the last good checkpoint"
        )


@torch.no_grad()
def changed_codes(before: Publication | None, after: Publication) -> float:
    """Share of quantized codes that differ between two versions: do updates reach the rollout?

    0 where nothing is quantized or there is no earlier version.
    """
    if before is None:
        return 0.0
    names = [n for n in after.tensors if n.endswith(".qdata") and n in before.tensors]
    total = sum(after.tensors[n].numel() for n in names)
    pairs = [(before.tensors[n], after.tensors[n]) for n in names]
    changed = [(a != b).sum() for a, b in pairs if a is not b]
    return int(torch.stack(changed).sum()) / total if changed else 0.0
