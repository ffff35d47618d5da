"""What stands between and after the two products of an expert layer, one launch each, with torch's roundings.

gate_rows(up)[s] = bf16(bf16(silu(gate)) * value)               up's columns: all gates, then all values
weighted_sum(y, w)[t] = bf16(sum_c bf16(y[t * k + c] * w[t, c]))   fp32, choices in order

backend      where                                    what it does
cuda         sm90 on, BF16, widths of eight columns   one launch
reference    anywhere                                 torch's ops, three launches for a gate and two for a sum
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from .backend import AUTO, REFERENCE, choose
from .cuda_library import CUDA, address, check, library, stream

# BF16 values of a 16-byte load.
WIDTH = 8


def gate_rows(up: Tensor, *, backend: str = AUTO) -> Tensor:
    """(S, 2 I) -> (S, I). No gradient.

    Raises:
        ValueError: the backend can't run this.
    """
    chosen = choose("gate_rows", backend, up.device, {CUDA: _why_not(up, up.shape[-1] // 2), REFERENCE: None})
    return torch.ops.lowbitrl.gate_rows(up, chosen)


def weighted_sum(y: Tensor, weights: Tensor, *, backend: str = AUTO) -> Tensor:
    """(T * k, N) by (T, k) -> (T, N) in y's dtype. No gradient.

    Raises:
        ValueError: the backend can't run this.
    """
    reason = _why_not(y, y.shape[-1]) or (
        None if weights.dtype == y.dtype else f"weights are {weights.dtype}"
    )
    chosen = choose("weighted_sum", backend, y.device, {CUDA: reason, REFERENCE: None})
    return torch.ops.lowbitrl.weighted_sum(y, weights, chosen)


def _why_not(rows: Tensor, width: int) -> str | None:
    if rows.dtype != torch.bfloat16:
        return f"it takes bfloat16, not {rows.dtype}"
    return f"{width} columns are no multiple of {WIDTH}" if width % WIDTH else None


@torch.library.custom_op("lowbitrl::gate_rows", mutates_args=())
def _gate_rows(up: Tensor, backend: str) -> Tensor:
    if backend == REFERENCE:
        gate, value = up.chunk(2, -1)
        return F.silu(gate) * value
    rows, n = up.shape[0], up.shape[1] // 2
    up, out = up.contiguous(), up.new_empty(rows, n)
    if rows:
        check(library().lowbitrl_gate(address(up), address(out), rows, n, stream(up.device)), "gate")
    return out


@_gate_rows.register_fake
def _(up, backend):
    return up.new_empty(up.shape[0], up.shape[1] // 2)


@torch.library.custom_op("lowbitrl::weighted_sum", mutates_args=())
def _weighted_sum(y: Tensor, weights: Tensor, backend: str) -> Tensor:
    if backend == REFERENCE:
        weighted = y * weights.reshape(-1, 1)
        return weighted.view(*weights.shape, y.shape[-1]).sum(1).to(y.dtype)
    y, weights, out = y.contiguous(), weights.contiguous(), y.new_empty(weights.shape[0], y.shape[-1])
    if out.numel():
        check(
            library().lowbitrl_weighted_sum(
                address(y), address(weights), address(out), *weights.shape, y.shape[-1], stream(y.device)
            ),
            "weighted_sum",
        )
    return out


@_weighted_sum.register_fake
def _(y, weights, backend):
    return y.new_empty(weights.shape[0], y.shape[-1])
