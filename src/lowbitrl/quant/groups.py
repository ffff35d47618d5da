"""Linears that share a global scale, and the bytes of their current weights."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from lowbitrl.formats import Format, QuantizedTensor, get_format
from lowbitrl.kernels.quantize import absmax, encode_unchecked
from lowbitrl.quant.plan import LayerPlan
from lowbitrl.quant.shards import whole

if TYPE_CHECKING:
    from collections.abc import Sequence


class WeightGroup:
    """Linears that share one global scale, and the bytes of their current weights.

    The bytes are cached against the weights' version counters, so they are made once per
    optimizer step however many micro-batches run, and never outlive an in-place update.
    Writes through `.data` bypass those counters: call `invalidate` after them. So do the gathers of
    a sharded learner, whose bytes live until they are invalidated.

    Attributes:
        device: where the full weights of a sharded learner are gathered; None: it is not sharded.
        keeps: hold the bytes of a sharded learner until they are invalidated, or make them anew in every pass.
    """

    device: torch.device | None = None
    keeps: bool = True

    def __init__(self, layers: Sequence[LayerPlan], modules: Sequence[nn.Linear]) -> None:
        assert layers[0].weight is not None
        self.names = tuple(layer.name for layer in layers)
        self.parameters = tuple(layer.parameter for layer in layers)
        self.format = get_format(layers[0].weight)
        self.dtype = modules[0].weight.dtype
        self._modules = tuple(modules)
        self._bytes: dict[str, QuantizedTensor] = {}
        self._key: tuple[Any, ...] = ()

    def encoded(self) -> dict[str, QuantizedTensor]:
        """Bytes of each member by module name, encoded anew only if a weight has changed."""
        if self._stale():
            if not self.keeps:
                return encode_group(self.weights(), self.format)
            refresh([self])
        return self._bytes

    def weights(self) -> dict[str, Tensor]:
        """Full weights (N_i, K) by module name, in the compute dtype."""
        pairs = zip(self.names, self._modules, strict=True)
        return {n: whole(m.weight, self.dtype, self.device) for n, m in pairs}

    def adopt(self, encoded: dict[str, QuantizedTensor]) -> None:
        """Hold these as the bytes of the weights as they are."""
        self._bytes, self._key = encoded, self._version()

    def _stale(self) -> bool:
        return self._version() != self._key

    def _version(self) -> tuple[Any, ...]:
        return version_key([m.weight for m in self._modules], self.device)

    def invalidate(self) -> None:
        """Let the cached bytes go."""
        self._bytes, self._key = {}, ()


def version_key(weights: Sequence[Tensor], sharded: object) -> tuple[Any, ...]:
    """What changes when an unsharded weight does; of a sharded one it only differs from no key at all."""
    return ("sharded",) if sharded else tuple((id(w), w._version, w.dtype) for w in weights)


def refresh(groups: Sequence[WeightGroup]) -> None:
    """Encode the groups whose weights have changed, with one look for NaN at all of them.

    A look is a wait for the device: one a weight would leave a GPU idle hundreds of times a step.

    Raises:
        ValueError: NaN or Inf in a weight, naming it.
    """
    changed = [group for group in groups if group._stale()]
    looks = []
    for group in changed:
        encoded, evidence = _encode_unchecked(group.weights(), group.format)
        group.adopt(encoded)
        looks += evidence
    if not _all_finite(looks):
        for group in changed:
            group.invalidate()
        for group in changed:
            encode_group(group.weights(), group.format)  # raises at the first that is not finite


def encode_group(weights: dict[str, Tensor], fmt: Format) -> dict[str, QuantizedTensor]:
    """Quantize a fused group; a format with a scale per tensor takes one joint absmax.

    Args:
        weights: (N_i, K) by module name, in the compute dtype.

    Raises:
        ValueError: NaN or Inf in a weight, naming it.
    """
    encoded, looks = _encode_unchecked(weights, fmt)
    if not _all_finite(looks):
        raise _not_finite(weights)
    return encoded


def _all_finite(looks: list[Tensor]) -> bool:
    """One look at all of them, whatever their shapes: every launch for each would cost a publication milliseconds."""
    return not looks or bool(torch.isfinite(torch.cat([t.reshape(-1).float() for t in looks])).all())


def _not_finite(weights: dict[str, Tensor]) -> ValueError:
    broken = next(name for name, weight in weights.items() if not bool(torch.isfinite(weight).all()))
    return ValueError(f"{broken}.weight holds NaN or Inf; resume from the last good checkpoint")


def _encode_unchecked(
    weights: dict[str, Tensor], fmt: Format
) -> tuple[dict[str, QuantizedTensor], list[Tensor]]:
    """Bytes by module name, and what is still to be looked at: tensors that are finite where weights are."""
    joint = None
    if len(weights) > 1 and fmt.per == "tensor":
        joint = torch.stack([absmax(weight).view(()) for weight in weights.values()]).amax()
        if not joint.is_cuda and not torch.isfinite(joint):
            raise _not_finite(weights)
    pairs = {n: encode_unchecked(w, fmt, amax=joint, name=f"{n}.weight") for n, w in weights.items()}
    looks = [evidence for _, evidence in pairs.values() if evidence is not None]
    return {name: encoded for name, (encoded, _) in pairs.items()}, looks
