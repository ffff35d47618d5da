"""Other people's 4-bit products, measured beside ours: humming-kernels and vLLM's Marlin.

Marlin is taken from an installed vllm, or from the file LOWBITRL_VLLM_LIBRARY names (its
``_C_stable_libtorch.abi3.so``): vllm pins a torch of its own, the library runs under any recent one.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor

VLLM_VARIABLE = "LOWBITRL_VLLM_LIBRARY"
Product = Callable[[Tensor], Tensor]
# vLLM's ScalarType ids: exponent | mantissa | signed | bias | finite | nan, packed in 8 + 8 + 1 + 32 + 1 + 8 bits.
_E2M1 = 2 | 1 << 8 | 1 << 16 | 1 << 49
_UINT4B8 = 4 << 8 | 8 << 17 | 1 << 50
_ROWS_A_WORD_TILE = 64


def why_not_marlin() -> str | None:
    """Why Marlin can't be measured, or None."""
    try:
        path = _vllm_library()
    except FileNotFoundError as missing:
        return str(missing)
    if not hasattr(torch.ops._C, "marlin_gemm"):
        torch.ops.load_library(str(path))
    return None if hasattr(torch.ops._C, "marlin_gemm") else f"{path} has no marlin_gemm"


def _vllm_library() -> Path:
    named = os.environ.get(VLLM_VARIABLE)
    spec = None if named else find_spec("vllm")
    if named:
        return Path(named)
    if spec is None or spec.origin is None:
        raise FileNotFoundError(f"vllm is not installed, and {VLLM_VARIABLE} names no library")
    return Path(spec.origin).parent / "_C_stable_libtorch.abi3.so"


def marlin(weight: QuantizedTensor) -> Product:
    """Marlin's product by an ``nvfp4`` or ``int4-g*`` weight, repacked as vLLM repacks it."""
    n, k = weight.shape
    device, nvfp4 = weight.qdata.device, weight.global_scale is not None
    # Marlin counts INT4 from 8 up; one flipped bit a nibble turns two's complement into that.
    words = (weight.qdata if nvfp4 else weight.qdata ^ 0x88).view(torch.int32).T.contiguous()
    no_order = torch.empty(0, dtype=torch.int, device=device)
    codes = torch.ops._C.gptq_marlin_repack(words, no_order, k, n, 4, False)
    order = [i + 8 * j for i in range(8) for j in range(8)]
    scale = weight.scale.T.contiguous().bfloat16().reshape(-1, _ROWS_A_WORD_TILE)[:, order].reshape(-1, n)
    decode = None
    if nvfp4:
        assert weight.global_scale is not None
        scale = _positive_scales(scale)
        decode = weight.global_scale.reshape(-1) * 2.0 ** (126 - 7)
    locks = torch.zeros(
        torch.cuda.get_device_properties(device).multi_processor_count, dtype=torch.int32, device=device
    )
    kind = _E2M1 if nvfp4 else _UINT4B8

    def product(x: Tensor) -> Tensor:
        return torch.ops._C.marlin_gemm(
            x, None, codes, None, scale.contiguous(), None, decode, None, None, None, locks, kind,
            x.shape[0], n, k, True, False, True, False,
        )  # fmt: skip

    return product


def _positive_scales(scale: Tensor) -> Tensor:
    """Marlin's E5M3 without a sign, of scales times 2^7, in its order of four."""
    columns = scale.half().view(-1, 4)[:, [0, 2, 1, 3]].reshape(scale.shape) * 2.0**7
    return (columns.view(torch.int16) << 1).view(torch.float8_e4m3fn)[:, 1::2].contiguous()


def why_not_humming() -> str | None:
    """Why humming can't be measured, or None."""
    return None if find_spec("humming") else "humming-kernels is not installed"


def humming(weight: QuantizedTensor) -> Product:
    """humming's product by an ``nvfp4`` or ``int4-g*`` weight, repacked as humming repacks its own."""
    from humming.layer import HummingLayer  # pyright: ignore[reportMissingImports]

    n, k = weight.shape
    nvfp4 = weight.global_scale is not None
    config: dict[str, Any] = {"dtype": "int4", "group_size": k // weight.scale.shape[-1]}
    if nvfp4:
        config |= {"dtype": "float4e2m1", "scale_dtype": "float8e4m3", "scale_2_type": "tensor"}
    layer = HummingLayer(shape_n=n, shape_k=k, weight_config=config, torch_dtype=torch.bfloat16).cuda()
    # humming counts INT4 from 8 up, as Marlin does.
    codes = weight.qdata if nvfp4 else weight.qdata ^ 0x88
    tensors = {"weight": codes.view(torch.int32), "weight_scale": weight.scale}
    if weight.global_scale is not None:
        tensors["weight_scale_2"] = weight.global_scale.reshape(1)
    layer.load_from_tensors(tensors)
    layer.transform()
    return layer
