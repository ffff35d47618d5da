"""INT8, symmetric: two's complement codes, one byte each; one decode scale a row. value = code * scale.

    rule                   scale                                  code
    (ours, vLLM's)         amax / 127, 0 for zero rows            clamp(round(x * (127 / amax)), -128, 127)
    :compressed-tensors    amax / 127.5, eps for zero rows        clamp(round(x / scale), -128, 127)

Ties: to even. Zero rows: codes 0.
``int8-token`` (activations) and ``int8-channel`` (weights) are one rule: vLLM 0.33.0's CUDA dynamic per-token
kernel, byte for byte. :compressed-tensors is 0.20.1, every step in the INPUT dtype, which also is its scale's.
What would break it: x / scale for x * (127 / amax); a division in BF16 (8% of the codes).

Scale: (..., 1), fp32 or the input's dtype (:compressed-tensors).
"""

from __future__ import annotations

import torch
from torch import Tensor

from .blocked import Blocked, Rule
from .format import alias, register
from .fp8 import divide
from .grids import int8_grid, quotient

LEVELS = 127.0


def vllm_scale(amax: Tensor) -> Tensor:
    """amax / 127."""
    return quotient(amax, LEVELS)


def times_inverse(x: Tensor, scale: Tensor, amax: Tensor) -> Tensor:
    """x * (127 / amax); codes of a zero row are 0."""
    return x * quotient(LEVELS, amax).nan_to_num(nan=float("nan"), posinf=0.0)


def ct_scale(amax: Tensor) -> Tensor:
    """amax / 127.5 in the dtype it comes in, the dtype's eps for zeros."""
    scale = quotient(amax, LEVELS + 0.5)
    return torch.where(scale == 0, torch.finfo(scale.dtype).eps, scale)


VLLM = Rule(vllm_scale, times_inverse)
CT = Rule(ct_scale, divide, native=True)

for _name in ("int8-token", "int8-channel"):
    register(Blocked(_name, int8_grid(), VLLM), Blocked(f"{_name}:compressed-tensors", int8_grid(), CT))
    alias(f"{_name}:vllm", _name)
