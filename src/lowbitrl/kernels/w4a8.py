"""``w4a8_matmul``: FP8 activations by NVFP4 or INT4 weights.

    y[m, n] = bf16( fp32(sum_k a[m, k] * v[n, k]) * fp32(global * scale_a[m]) + bias[n] )

a are E4M3 codes, exact in BF16, and v the values of ``w4a16_matmul``, so this is that product with the
activations' scale as its ``token_scale``. Weights in FP8 would need their scales re-encoded (vLLM's CUTLASS
kernel does; ``formats.int4.w4a8`` shows the weight it serves), which is another weight than the published one.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor

from .backend import AUTO
from .w4a16 import w4a16_matmul


def w4a8_matmul(
    x: QuantizedTensor, weight: QuantizedTensor, *, bias: Tensor | None = None, backend: str = AUTO
) -> Tensor:
    """(..., K) ``fp8-token`` activations by the (N, K) weight -> (..., N) in BF16.

    Raises:
        ValueError: x is not FP8 with a scale a token; what ``w4a16_matmul`` refuses.
    """
    return w4a16_matmul(codes_as_bf16(x), weight, bias=bias, token_scale=x.scale, backend=backend)


def codes_as_bf16(x: QuantizedTensor) -> Tensor:
    """E4M3 codes as BF16 values, without their scale."""
    if not x.format.startswith("fp8") or x.scale.numel() != x.shape[:-1].numel():
        raise ValueError(f"activations are {x.format}; w4a8_matmul takes FP8 with a scale a token")
    return x.qdata.view(torch.float8_e4m3fn).bfloat16()
