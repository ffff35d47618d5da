"""``w4a16_matmul``: BF16 activations by 4-bit weights, read as published.

    y[m, n] = bf16( fp32(sum_k x[m, k] * v[n, k]) * fp32(global * token_scale[m]) + bias[n] )

    v       NVFP4: code * block scale, exact in BF16; INT4: bf16(code * scale), what ``dequantize`` gives
    sum     fp32 in the tensor cores, in an order that is the backend's own but fixed: same input, same bits
    global  NVFP4's tensor scale, on the sums and not on the weights, where BF16 would round it away

W4A8 and emulated W4A4 are this product too: their activation codes (times block scales) are exact in BF16,
and their scale a token is ``token_scale``.

    backend      where                     what it does
    cuda         sm90 on, K % 32 == 0      reads codes straight into registers; decode to a few hundred tokens
    triton       sm80 on                   the fallback
    cublas       any CUDA                  decodes to BF16 with the global scale in (one rounding more a weight),
                                           then the library's product; thousands of tokens
    reference    anywhere                  fp32 product of the values above
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbitrl.formats import QuantizedTensor

from .backend import AUTO, REFERENCE, TRITON, choose, register_backend
from .cuda_library import CUDA
from .w4a16_choice import prefers_cublas
from .weights4 import describe, factors, why_not_cuda, why_not_weight4

CUBLAS = "cublas"

register_backend(CUBLAS, lambda device: None if device.type == "cuda" else "cuBLAS runs on CUDA devices")


def w4a16_matmul(
    x: Tensor,
    weight: QuantizedTensor,
    *,
    bias: Tensor | None = None,
    token_scale: Tensor | None = None,
    backend: str = AUTO,
) -> Tensor:
    """(..., K) by the (N, K) weight -> (..., N) in BF16. No gradient; no host synchronization.

    Args:
        x: BF16. weight: NVFP4, or INT4 in groups of 128, 64, 32 or 16 with BF16 scales.
        bias: (N,) BF16. token_scale: (...,) or (..., 1) fp32, multiplied onto each token's sums.

    Raises:
        ValueError: x is not BF16, K differs, or the backend can't run this.
    """
    _check(x, weight, token_scale)
    rows = x.reshape(-1, x.shape[-1])
    chosen = choose("w4a16_matmul", backend, x.device, candidates(rows.shape[0], weight))
    scales = None if token_scale is None else token_scale.reshape(-1).contiguous()
    if chosen == REFERENCE:
        y = reference(rows, weight, bias, scales)
    else:
        w = describe(weight)
        y = torch.ops.lowbitrl.w4a16_matmul(
            rows.detach(), w.codes, w.scale, w.global_scale, scales, bias, w.group, w.nvfp4, chosen
        )
    return y.view(*x.shape[:-1], weight.shape[0])


def candidates(tokens: int, weight: QuantizedTensor) -> dict[str, str | None]:
    """The op's implementations for this call, best first, with why one can't do it."""
    reason, cuda = why_not_weight4(weight), why_not_cuda(weight)
    if reason is None and prefers_cublas(weight.global_scale is not None, tokens, *weight.shape):
        return {CUBLAS: reason, CUDA: cuda, TRITON: reason, REFERENCE: reason}
    return {CUDA: cuda, TRITON: reason, CUBLAS: reason, REFERENCE: reason}


def reference(x: Tensor, weight: QuantizedTensor, bias: Tensor | None, token_scale: Tensor | None) -> Tensor:
    """The definition, in fp32."""
    values, scale = factors(weight)
    return finish(x.float() @ values.T, scale.reshape(()), bias, token_scale)


def finish(sums: Tensor, scale: Tensor, bias: Tensor | None, token_scale: Tensor | None) -> Tensor:
    """BF16 of fp32 sums (M, N): scales, bias, one rounding."""
    y = sums * (scale if token_scale is None else (scale * token_scale)[:, None])
    return (y if bias is None else y + bias.float()).bfloat16()


def _check(x: Tensor, weight: QuantizedTensor, token_scale: Tensor | None) -> None:
    if x.dtype != torch.bfloat16:
        raise ValueError(f"x is {x.dtype}; w4a16_matmul takes bfloat16: cast it, or dequantize the weight")
    if x.shape[-1] != weight.shape[-1]:
        raise ValueError(f"x has K={x.shape[-1]}, the weight {tuple(weight.shape)} has K={weight.shape[-1]}")
    if token_scale is not None and token_scale.numel() != x[..., 0].numel():
        raise ValueError(f"token_scale has {token_scale.numel()} values for {x[..., 0].numel()} tokens")


@torch.library.custom_op("lowbitrl::w4a16_matmul", mutates_args=())
def _w4a16_matmul(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, group: int, nvfp4: bool, backend: str,
) -> Tensor:  # fmt: skip
    out = x.new_empty(x.shape[0], codes.shape[0])
    if backend == CUBLAS:
        return _by_cublas(x, codes, scale, global_scale, token_scale, bias, group, nvfp4)
    if backend == TRITON:
        from .w4a16_triton import launch_w4a16

        rows = x if x.stride(-1) == 1 else x.contiguous()
        launch_w4a16(rows, codes, scale, global_scale, token_scale, bias, out, group, nvfp4)
        return out
    from .w4a16_cuda import launch_w4a16 as launch_cuda

    launch_cuda(x, codes, scale, global_scale, token_scale, bias, out, group, nvfp4)
    return out


@_w4a16_matmul.register_fake
def _(x, codes, scale, global_scale, token_scale, bias, group, nvfp4, backend):
    return x.new_empty(x.shape[0], codes.shape[0])


def _by_cublas(
    x: Tensor, codes: Tensor, scale: Tensor, global_scale: Tensor | None, token_scale: Tensor | None,
    bias: Tensor | None, group: int, nvfp4: bool,
) -> Tensor:  # fmt: skip
    from .decode_triton import launch_decode

    values = x.new_empty(codes.shape[0], 2 * codes.shape[1])
    launch_decode(codes, scale, global_scale, values, group, nvfp4)
    if token_scale is None:
        return F.linear(x, values, bias)
    one = torch.ones((), dtype=torch.float32, device=x.device)
    return finish(torch.mm(x, values.T, out_dtype=torch.float32), one, bias, token_scale)
