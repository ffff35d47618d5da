"""``decode``: what ``QuantizedTensor.dequantize`` gives, in one pass over a 4-bit weight's bytes.

value = round(code * (scale * global_scale))    fp32 products, one rounding to BF16

backend      where            what it does
triton       sm80 on          NVFP4 and INT4 in groups, to BF16, one launch
reference    anywhere         every format and dtype: the format's own decode, a dozen launches on a GPU
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor

from .backend import AUTO, REFERENCE, TRITON, choose
from .weights4 import describe, why_not_weight4


def decode(weight: QuantizedTensor, dtype: torch.dtype, *, backend: str = AUTO) -> Tensor:
    """Values of shape ``weight.shape``, bit for bit ``weight.dequantize(dtype)``. No host synchronization.

    Raises:
        ValueError: the backend can't run this.
    """
    candidates = {TRITON: _why_not_triton(weight, dtype), REFERENCE: None}
    if choose("decode", backend, weight.qdata.device, candidates) == REFERENCE:
        return weight.dequantize(dtype)
    from .decode_triton import launch_decode

    w = describe(weight)
    values = torch.empty(weight.shape, dtype=dtype, device=weight.qdata.device)
    launch_decode(w.codes, w.scale, w.global_scale, values, w.group, w.nvfp4)
    return values


def _why_not_triton(weight: QuantizedTensor, dtype: torch.dtype) -> str | None:
    if dtype != torch.bfloat16:
        return f"it writes bfloat16, not {dtype}"
    return why_not_weight4(weight)
