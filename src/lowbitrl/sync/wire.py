"""Other engines' names, packings and scale directions for the bytes we store, and back.

We store a weight (N, K) as qdata, scale and, in NVFP4, global_scale; scales decode. For p = global_scale:

    compressed-tensors          weight_packed                 weight_scale           besides
    nvfp4                       uint8 (N, K/2)                e4m3 (N, K/16)         weight_global_scale fp32 (1,) = S
    int4-g*                     int32 (N, K/8), codes + 8     (N, K/g)               weight_shape int64 (2,)
    mxfp4                       uint8 (N, K/2)                uint8 (N, K/32)
                                weight
    mxfp8                       e4m3 (N, K)                   uint8 (N, K/32)
    fp8-channel -tensor -block  e4m3 (N, K)                   (N, 1)  (1,)  (ceil(N/128), K/128)
    int8-channel                int8 (N, K)                   (N, 1)

    ModelOpt                    weight                        weight_scale           besides
    nvfp4                       uint8 (N, K/2)                e4m3 (N, K/16)         weight_scale_2 fp32 () = p

S is the one global scale on disk that encodes: readers take 1 / S. It is chosen so that 1 / S is p to the
last bit, hence a product of global scales (alpha) is the same from either layout. What would break it: writing
2688 / amax in one layout and amax / 2688 in the other, whose reciprocals differ in the last bit.

Names are those of llm-compressor, vLLM 0.33.0 and ModelOpt 0.47.0. Codes and block scales pass as they are;
the round trip is exact; only S of an fp32 weight may come back as another number with the same 1 / S.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.grids import quotient
from lowbitrl.formats.nvfp4 import FULL_RANGE
from lowbitrl.formats.packing import pack_int4_words
from lowbitrl.quant.plan import Plan

Layout = Literal["compressed-tensors", "modelopt"]
LAYOUTS: tuple[Layout, ...] = get_args(Layout)

STORED = ("qdata", "scale", "global_scale")
"""Suffixes of our own tensors."""
E4M3 = torch.float8_e4m3fn


def to_layout(q: QuantizedTensor, layout: Layout, name: str = "weight") -> dict[str, Tensor]:
    """One weight's tensors by their names in `layout`, without the module's.

    Args:
        name: what errors call the weight.

    Raises:
        ValueError: the layout has no names for the format; the shape is not (N, K); no fp32 S has the
            global scale for its reciprocal.
    """
    check_layout(layout)
    if len(q.shape) != 2:
        raise ValueError(f"{name} has shape {tuple(q.shape)}; checkpoints hold weights (N, K), one a module")
    if not representable(q.format, layout):
        raise ValueError(
            f"{name} is {q.format}, for which the {layout} layout has no names; it knows {', '.join(_known(layout))}"
        )
    return _WRITERS[layout][_family(q.format)](q, name)


def check_layout(layout: str) -> Layout:
    """The layout of that name; ValueError for one that does not exist."""
    if layout not in LAYOUTS:
        raise ValueError(f"layout={layout!r} is unknown; choose one of {', '.join(LAYOUTS)}")
    return layout


def representable(format: str, layout: Layout) -> bool:
    """Whether `layout` has names for weights of a format."""
    # W4A8's FP8 group scales are what a kernel makes of the plain bytes; no checkpoint holds them.
    return _family(format) in _WRITERS[layout] and not format.endswith(":w4a8")


def translate(
    stream: Iterable[tuple[str, Tensor]], plan: Plan, layout: Layout
) -> Iterator[tuple[str, Tensor]]:
    """Rename a stream of our tensors ("m.qdata", "m.scale", "m.global_scale"), as `quant.export` makes it.

    Parts of a weight may come in any order, between those of others; what is no part of one passes.

    Raises:
        ValueError: as `to_layout`, naming the module; a part of a weight never comes.
    """
    waiting: dict[str, dict[str, Tensor]] = {}
    for name, tensor in stream:
        module, _, part = name.rpartition(".")
        layer = plan.exported.get(module)
        if part not in STORED or layer is None or layer.weight is None:
            yield name, tensor
            continue
        parts = waiting.setdefault(module, {})
        parts[part] = tensor
        if parts.keys() >= _stored_parts(layer.weight):
            q = QuantizedTensor.from_tensors(waiting.pop(module), layer.shape, layer.weight)
            yield from (
                (f"{module}.{part}", t) for part, t in to_layout(q, layout, f"{module}.weight").items()
            )
    if waiting:
        module, parts = next(iter(waiting.items()))
        lacking = min(_stored_parts(plan.exported[module].weight or "") - parts.keys())
        raise ValueError(f"{module}.{lacking} never came: the stream is incomplete")


def encode_global_scale(decode: Tensor, name: str = "weight") -> Tensor:
    """fp32 S with 1 / S == decode, bit for bit; shape (1,).

    Of several, the one that our rule makes from a BF16 absmax, else the one that compressed-tensors makes in
    BF16, else the float nearest to 1 / decode: what was quantized from BF16 gets its own S back.

    Raises:
        ValueError: there is no such S (a global scale that was made as amax / 2688 need not have one).
    """
    decode = decode.reshape(1)
    nearest = decode.reciprocal()
    ends = (torch.full_like(nearest, 0.0), torch.full_like(nearest, torch.inf))
    of_bf16 = quotient(FULL_RANGE, (FULL_RANGE * decode).bfloat16().float())
    in_bf16 = nearest.bfloat16().float()
    for candidate in (of_bf16, in_bf16, nearest, *(torch.nextafter(nearest, end) for end in ends)):
        if bool(candidate.reciprocal() == decode):
            return candidate
    raise ValueError(
        f"{name}: no fp32 number has {decode.item():.9g} for its reciprocal, so weight_global_scale cannot "
        "say what weight_scale_2 says; keep the modelopt layout, which stores the number itself"
    )


def one_positive(scale: Tensor, name: str) -> Tensor:
    value = scale.detach().float()
    if value.numel() != 1 or not bool(torch.isfinite(value).all() and (value > 0).all()):
        raise ValueError(
            f"{name} is {value.flatten()[:4].tolist()}, not one finite positive number; the layer was "
            "never calibrated or the file is damaged"
        )
    return value.reshape(())


def _ct_nvfp4(q: QuantizedTensor, name: str) -> dict[str, Tensor]:
    scale = encode_global_scale(_one_global(q, name), name)
    return {"weight_packed": q.qdata, "weight_scale": q.scale, "weight_global_scale": scale}


def _modelopt_nvfp4(q: QuantizedTensor, name: str) -> dict[str, Tensor]:
    scale = _one_global(q, name).reshape(())
    return {"weight": q.qdata, "weight_scale": q.scale, "weight_scale_2": scale}


def _ct_int4(q: QuantizedTensor, name: str) -> dict[str, Tensor]:
    shape = torch.tensor(tuple(q.shape), dtype=torch.int64)
    return {"weight_packed": pack_int4_words(q.qdata), "weight_scale": q.scale, "weight_shape": shape}


def _ct_mxfp4(q: QuantizedTensor, name: str) -> dict[str, Tensor]:
    return {"weight_packed": q.qdata, "weight_scale": q.scale}


def _ct_bytes(dtype: torch.dtype) -> Callable[[QuantizedTensor, str], dict[str, Tensor]]:
    def write(q: QuantizedTensor, name: str) -> dict[str, Tensor]:
        return {
            "weight": q.qdata.view(dtype),
            "weight_scale": q.scale.reshape(1) if q.scale.dim() == 0 else q.scale,
        }

    return write


_WRITERS: dict[Layout, dict[str, Callable[[QuantizedTensor, str], dict[str, Tensor]]]] = {
    "compressed-tensors": {
        "nvfp4": _ct_nvfp4,
        "int4": _ct_int4,
        "mxfp4": _ct_mxfp4,
        **dict.fromkeys(("mxfp8", "fp8-channel", "fp8-tensor", "fp8-block"), _ct_bytes(E4M3)),
        "int8-channel": _ct_bytes(torch.int8),
    },
    "modelopt": {"nvfp4": _modelopt_nvfp4},
}


def _family(format: str) -> str:
    """A format's name without its rule, INT4's also without its group."""
    base = get_format(format).name.partition(":")[0]
    return "int4" if base.startswith("int4-") else base


def _known(layout: Layout) -> list[str]:
    return ["int4-g*" if family == "int4" else family for family in _WRITERS[layout]]


def _stored_parts(format: str) -> set[str]:
    two_levels = _family(format) == "nvfp4" or format.endswith(":w4a8")
    return set(STORED if two_levels else STORED[:2])


def _one_global(q: QuantizedTensor, name: str) -> Tensor:
    assert q.global_scale is not None
    return one_positive(q.global_scale, f"{name}'s global scale")
