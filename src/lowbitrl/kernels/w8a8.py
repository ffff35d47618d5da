"""``w8a8_matmul``: 8-bit activations by 8-bit weights, a scale a token and a scale a row (or one a tensor).

y[m, n] = bf16( fp32(sum_k a[m, k] * b[n, k]) * (scale_a[m] * scale_b[n]) + bias[n] )

FP8     products of E4M3 codes, summed in fp32: torch's scaled_mm on CUDA (rowwise; its own order of sums and
        scales, fast accumulation off), fp32 products elsewhere
INT8    sums in int32, exact in any order: torch's _int_mm, or our Triton kernel where it takes no such shape
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.grids import from_e4m3

from .backend import AUTO, REFERENCE, TRITON, choose, register_backend

TORCH = "torch"
# cuBLASLt's FP8 and INT8 products take both dimensions of a matrix in these multiples.
MULTIPLE = 16
LEAST_INT8_TOKENS = 17

register_backend(TORCH, lambda device: None if device.type == "cuda" else "its 8-bit products are CUDA's")


def w8a8_matmul(
    x: QuantizedTensor, weight: QuantizedTensor, *, bias: Tensor | None = None, backend: str = AUTO
) -> Tensor:
    """(..., K) by (N, K) -> (..., N) in BF16. No gradient; no host synchronization.

    Args:
        x: ``fp8-token`` or ``int8-token``. weight: ``fp8-channel``, ``fp8-tensor`` or ``int8-channel``.

    Raises:
        ValueError: the two are not of one kind, a scale covers less than a row, or the backend can't run this.
    """
    kind = kind_of(x, weight)
    # The libraries' products refuse some strides; bytes as published have none.
    a, b = x.qdata.reshape(-1, x.shape[-1]).contiguous(), weight.qdata.contiguous()
    scale_a, scale_b = x.scale.reshape(-1).float(), weight.scale.reshape(-1).float().expand(b.shape[0])
    chosen = choose("w8a8_matmul", backend, a.device, _candidates(kind, a, b))
    y = torch.ops.lowbitrl.w8a8_matmul(a, b, scale_a, scale_b, bias, kind, chosen)
    return y.view(*x.shape[:-1], b.shape[0])


def kind_of(x: QuantizedTensor, weight: QuantizedTensor) -> str:
    """ "fp8" or "int8".

    Raises:
        ValueError: the two are not of one kind, or a scale covers less than a row.
    """
    kinds = []
    for q in (x, weight):
        rows = q.shape[:-1].numel()
        fmt = get_format(q.format)
        if fmt.bits != 8 or q.global_scale is not None or q.scale.numel() not in {1, rows}:
            raise ValueError(f"w8a8_matmul takes FP8 or INT8 with a scale a row, not {q.format}")
        kinds.append(q.format[: q.format.index("-")])
    if kinds[0] != kinds[1]:
        raise ValueError(f"w8a8_matmul multiplies one kind by itself, not {x.format} by {weight.format}")
    return kinds[0]


def _candidates(kind: str, a: Tensor, b: Tensor) -> dict[str, str | None]:
    odd = [size for size in b.shape if size % MULTIPLE]
    shape = f"{odd[0]} is not a multiple of {MULTIPLE}" if odd else None
    if kind == "int8" and a.shape[0] < LEAST_INT8_TOKENS:
        shape = f"{a.shape[0]} tokens are fewer than {LEAST_INT8_TOKENS}"
    return {TORCH: shape, TRITON: None, REFERENCE: None}


@torch.library.custom_op("lowbitrl::w8a8_matmul", mutates_args=())
def _w8a8_matmul(
    a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None, kind: str, backend: str
) -> Tensor:
    if backend == TRITON:
        from .w8a8_triton import launch_w8a8

        out = a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)
        launch_w8a8(a, b, scale_a, scale_b, bias, out, kind)
        return out
    if backend == TORCH and kind == "fp8":
        return _by_scaled_mm(a, b, scale_a, scale_b, bias)
    if kind == "fp8":
        sums = from_e4m3(a) @ from_e4m3(b).T
    elif backend == TORCH:
        sums = torch._int_mm(a.view(torch.int8), b.view(torch.int8).T).float()  # pyright: ignore[reportPrivateImportUsage]
    else:
        sums = _int_sums(a.view(torch.int8), b.view(torch.int8)).float()
    y = sums * (scale_a[:, None] * scale_b)
    return (y if bias is None else y + bias.float()).bfloat16()


@_w8a8_matmul.register_fake
def _(a, b, scale_a, scale_b, bias, kind, backend):
    return a.new_empty(a.shape[0], b.shape[0], dtype=torch.bfloat16)


def _int_sums(a: Tensor, b: Tensor) -> Tensor:
    # fp64 holds every sum of fewer than 2^38 products of bytes; torch has no integer product on CUDA.
    return (a.double() @ b.double().T).to(torch.int32)


def _by_scaled_mm(a: Tensor, b: Tensor, scale_a: Tensor, scale_b: Tensor, bias: Tensor | None) -> Tensor:
    rowwise = F.ScalingType.RowWise  # type: ignore[attr-defined]
    e4m3 = torch.float8_e4m3fn
    return F.scaled_mm(  # type: ignore[attr-defined]
        a.view(e4m3), b.view(e4m3).T, scale_a=scale_a[:, None], scale_recipe_a=rowwise,
        scale_b=scale_b[None].contiguous(), scale_recipe_b=rowwise, bias=bias, output_dtype=torch.bfloat16,
    )  # fmt: skip
