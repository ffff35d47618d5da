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
        """Take in activations (..., K); mask, bool of as many rows, is False for padding, which must not count."""
        # where, not indexing, which would wait for the device to count the rows.
        seen = absmax(x if mask is None else torch.where(mask.reshape(*x.shape[:-1], 1), x, 0.0))
        self._pending = seen if self._pending is None else torch.maximum(self._pending, seen)

    def refresh(self) -> Tensor:
        """Freeze the maximum seen since the last refresh (the earlier one if only zeros were) and return it.

        Raises ValueError if NaN or Inf was seen, RuntimeError if nothing but zeros ever was.
        """
        seen, self._pending = self._pending, None
        if seen is not None and not bool(torch.isfinite(seen)):
            raise ValueError(f"input of {self.name} holds NaN or Inf; resume from the last good checkpoint")
        if seen is not None and bool(seen > 0):
            self.amax = seen
        return self.amax

    @property
    def seen(self) -> Tensor | None:
        """The maximum seen since the last refresh, fp32 (): what processes that saw other batches observe too."""
        return self._pending

    @property
    def overflows(self) -> bool:
        """Whether what was seen since the last refresh passed the frozen maximum, and so saturated."""
        return self._frozen is not None and self._pending is not None and bool(self._pending > self._frozen)

    @property
    def is_ready(self) -> bool:
        """Whether there is a frozen maximum."""
        return self._frozen is not None

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
        value = value.detach().float().reshape(())
        if self._frozen is not None and self._frozen.device == value.device:
            self._frozen.copy_(value)  # in place: CUDA graphs hold its address
        else:
            self._frozen = value.clone()
