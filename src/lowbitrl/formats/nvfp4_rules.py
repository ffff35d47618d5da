"""NVFP4 as other libraries quantize it. The chain of nvfp4.py holds; these steps differ:

    rule                   S, p                       block scale                     x in units of its scale
    :vllm                  S = 2688 * (1/amax)        S * (b * (1/6))                 x * (1 / (scale * p))
    :te                    S = min(2688/amax, max)    b * (S * (1/6))                 x * min(1/(scale * p), max)
    :compressed-tensors    S = 2688 * (1/amax) [dtype]  S * (b / 6) [b / 6 in dtype]  x / (scale / S)
    :torchao               p = amax/2688              (b / 6) / p, at least 2^-6      x * ((1 / p) / scale)
    :modelopt              p = amax/2688              b / (6 * p), at least 2^-9      x / (scale * p)

max is the largest fp32; [dtype] means computed in the input's dtype (BF16 rounds S: 516 for 518.17). Where S
is given, p = 1/S. 2688 * (1/amax), two roundings, is what ``2688 / amax`` does in torch, and vLLM and
compressed-tensors compute S there; per token, nvfp4-token:vllm, vLLM's S comes out of a kernel, as one division.
Zero blocks: scale 0 (:vllm, :te), 0.125 (:compressed-tensors), 2^-6 (:torchao), 1 (:modelopt); codes 0. Ties,
saturation and signed zeros as in nvfp4.py. All-zero tensors quantize to zeros even where the library makes
NaN, and global scales are stored as the decode scale p even where it stores S or amax.

Matched byte for byte: vLLM 0.33.0 (emulation on CPU; its CUDA kernel but for the last bit of its approximate
reciprocals), TransformerEngine d0067d0d, compressed-tensors 0.20.1, torchao 0.18.0, ModelOpt 0.47.0.
What would break it: exchanging any two rows of the table. On fp32 data one code in a million tells them
apart; on BF16 data one in a hundred to a thousand does.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .format import alias, register
from .grids import E2M1_MAX, E4M3_MIN_NORMAL, E4M3_TINY, quotient, to_e4m3
from .nvfp4 import FULL_RANGE, NAN, OURS, SIXTH, Nvfp4, Rule, block_scale, scaled

FP32_MAX = torch.finfo(torch.float32).max
# compressed-tensors replaces a scale of 0 by 0.125: the byte of that E4M3 number.
CT_ZERO_SCALE = 0x20


def _torch_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    """As ``encode_global`` with the two roundings of torch's number / tensor."""
    encode = (amax.reciprocal() * FULL_RANGE).nan_to_num(nan=NAN, posinf=1.0).float()
    return encode, encode.reciprocal()


def _te_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    encode = torch.where(amax == 0, 1.0, quotient(FULL_RANGE, amax).clamp(max=FP32_MAX))
    return encode, encode.reciprocal()


def _te_block(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return to_e4m3(b * (encode * SIXTH))


def _te_scaled(x: Tensor, scale: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return x * (scale * decode).reciprocal().clamp(max=FP32_MAX).unsqueeze(-1)


def _ct_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    return _torch_global(amax.clamp(min=torch.finfo(amax.dtype).tiny))


def _ct_block(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    # .float(): a 0-dimensional fp32 S would not widen the product of a BF16 tensor by itself.
    scale = to_e4m3(encode * quotient(b, E2M1_MAX).float())
    codes = scale.view(torch.uint8)
    return torch.where(codes == 0, CT_ZERO_SCALE, codes).view(torch.float8_e4m3fn)


def _ct_scaled(x: Tensor, scale: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return x / (scale / encode).unsqueeze(-1)


def _decode_global(amax: Tensor) -> tuple[Tensor, Tensor]:
    """p = amax / 2688 and 1 / p; p = 1 for a zero tensor, where the libraries divide by zero."""
    decode = quotient(amax, FULL_RANGE)
    decode = torch.where(decode == 0, 1.0, decode)
    return decode.reciprocal(), decode


def _torchao_block(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return to_e4m3((quotient(b, E2M1_MAX) / decode).clamp(min=E4M3_MIN_NORMAL))


def _torchao_scaled(x: Tensor, scale: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return x * (encode / scale).unsqueeze(-1)


def _modelopt_block(b: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    scale = b / (E2M1_MAX * decode)
    return to_e4m3(torch.where(scale == 0, 1.0, scale).clamp(min=E4M3_TINY))


def _modelopt_scaled(x: Tensor, scale: Tensor, encode: Tensor, decode: Tensor) -> Tensor:
    return x / (scale * decode).unsqueeze(-1)


RULES = {
    ":vllm": Rule(_torch_global, block_scale, scaled),
    ":te": Rule(_te_global, _te_block, _te_scaled),
    ":compressed-tensors": Rule(_ct_global, _ct_block, _ct_scaled, native=True),
    ":torchao": Rule(_decode_global, _torchao_block, _torchao_scaled),
    ":modelopt": Rule(_decode_global, _modelopt_block, _modelopt_scaled),
}

register(*(Nvfp4("nvfp4" + suffix, rule) for suffix, rule in RULES.items()))
register(*(Nvfp4(f"nvfp4-token{s}", rule, per="token") for s, rule in (RULES | {":vllm": OURS}).items()))
for _suffix in RULES:
    alias("nvfp4-tensor" + _suffix, "nvfp4" + _suffix)
