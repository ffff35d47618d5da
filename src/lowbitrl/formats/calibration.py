"""Static activation scales: measured on data, frozen between weight updates, shipped with each of them.

A static scale needs no reduction on the hot path and makes any format batch invariant, but in RL the policy
drifts away from it: values beyond the calibrated maximum saturate. So it is refreshed at every publish and
travels with the weights it was measured on.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import absmax


class Calibrator:
    """The absolute maximum of one activation site.

    cal = Calibrator("model.layers.0.mlp.down_proj")
    cal.observe(x)                          # any number of batches under the new weights
    amax = cal.refresh()                    # at publish: frozen, to be shipped
    fmt.quantize(x, amax=cal.amax)          # until the next refresh
    """

    def __init__(self, name: str):
        self.name = name
        self._pending: Tensor | None = None
        self._frozen: Tensor | None = None

    def observe(self, x: Tensor, mask: Tensor | None = None) -> None:
        """Take in activations (..., K); mask, bool (...), is False for padding, which must not count."""
        seen = absmax(x if mask is None else x[mask])
        self._pending = seen if self._pending is None else torch.maximum(self._pending, seen)

    def refresh(self) -> Tensor:
        """Freeze the maximum seen since the last refresh (the earlier one if only zeros were) and return it."""
        if self._pending is not None and bool(self._pending > 0):
            self._frozen = self._pending
        self._pending = None
        return self.amax

    @property
    def amax(self) -> Tensor:
        """The frozen maximum, fp32 (); RuntimeError if no refresh has seen a non-zero activation."""
        if self._frozen is None:
            raise RuntimeError(
                f"{self.name}: no activation observed, so there is no static scale; run a calibration batch "
                "that reaches it (every expert, for a mixture) or use a dynamic format"
            )
        return self._frozen

    @amax.setter
    def amax(self, value: Tensor) -> None:
        self._frozen = value.detach().float()
