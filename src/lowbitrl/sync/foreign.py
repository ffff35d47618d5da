"""Weights that others wrote, in either layout of `wire`, as the bytes we store: codes and block scales untouched.

What a tensor is, its name, dtype and shape tell; no configuration file is believed. The format of a result
says how its bytes decode, not by whose rule they were made: an "int4-g128" may have been scaled by amax / 7.

Besides what `wire` writes: INT8 codes in int32 words (codes + 128), one scale a tensor for INT8 and one a
row for INT4 (both repeated, which decodes the same), scales in BF16 or FP16.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

import torch
from torch import Tensor

from lowbitrl.formats import QuantizedTensor
from lowbitrl.formats.fp8 import TILE
from lowbitrl.formats.int4 import GROUPS
from lowbitrl.formats.packing import unpack_int4_words
from lowbitrl.sync.wire import E4M3, one_positive

FOREIGN = (
    "weight_packed",
    "weight_scale",
    "weight_global_scale",
    "weight_scale_2",
    "weight_shape",
    "weight_zero_point",
    "weight_g_idx",
    "input_scale",
    "input_global_scale",
)
"""Suffixes that make a module's "weight" a quantized one, in either layout."""


def group_parts(tensors: Mapping[str, Tensor]) -> tuple[dict[str, dict[str, Tensor]], dict[str, Tensor]]:
    """Foreign tensors as ({module: {"weight_scale": ..., ...}}, {name: what is not quantized})."""
    modules: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part in FOREIGN:
            modules.setdefault(module, {})[part] = tensor
    rest = {}
    for name, tensor in tensors.items():
        module, _, part = name.rpartition(".")
        if part == "weight" and module in modules:
            modules[module][part] = tensor
        elif part not in FOREIGN:
            rest[name] = tensor
    return modules, rest


def from_layout(parts: Mapping[str, Tensor], name: str = "weight") -> QuantizedTensor:
    """One weight from its tensors by their names in either layout; which one, the names tell.

    The format of the result says how the bytes decode, not by which library's rule they were made.

    Raises:
        ValueError: a tensor is missing, or of a dtype or shape no format has; zero points or an
            activation order that would change values; a global scale that is not a finite positive
            number; NaN or Inf in a scale.
    """
    parts = dict(parts)
    _check_order(parts, name)
    for reader, needs in _READERS.items():
        if needs <= parts.keys():
            q = reader(parts, name)
            if not bool(torch.isfinite(q.scale.float()).all()):
                raise ValueError(f"{name}_scale holds NaN or Inf: the file is damaged, or its layer was dead")
            return q
    raise ValueError(
        f"{name}: {', '.join(sorted(parts)) or 'nothing'} does not make a quantized weight; a scale or the codes "
        "are missing, so the checkpoint is incomplete"
    )


def decode_global_scale(encode: Tensor, name: str = "weight") -> Tensor:
    """The decode scale 1 / S of a stored weight_global_scale, one IEEE division; shape ().

    Raises:
        ValueError: S is not one finite positive number.
    """
    return one_positive(encode, f"{name}_global_scale").reciprocal()


def _read_ct_nvfp4(parts: dict[str, Tensor], name: str) -> QuantizedTensor:
    return _nvfp4(parts, "weight_packed", decode_global_scale(parts["weight_global_scale"], name), name)


def _read_modelopt(parts: dict[str, Tensor], name: str) -> QuantizedTensor:
    return _nvfp4(parts, "weight", one_positive(parts["weight_scale_2"], f"{name}_scale_2"), name)


def _nvfp4(parts: dict[str, Tensor], codes: str, decode: Tensor, name: str) -> QuantizedTensor:
    packed, scale = parts[codes], parts["weight_scale"]
    shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
    _expect(packed, torch.uint8, packed.shape, f"{name}, its codes")
    _expect(scale, E4M3, (shape[0], shape[1] // 16), f"{name}_scale")
    return QuantizedTensor(packed, scale, decode, shape, "nvfp4")


def _read_packed(parts: dict[str, Tensor], name: str) -> QuantizedTensor:
    """MXFP4, or integers in int32 words."""
    packed, scale = parts["weight_packed"], parts["weight_scale"]
    if packed.dtype == torch.uint8:
        shape = torch.Size((packed.shape[0], packed.shape[1] * 2))
        _expect(scale, torch.uint8, (shape[0], shape[1] // 32), f"{name}_scale")
        return QuantizedTensor(packed, scale, None, shape, "mxfp4")
    if "weight_shape" not in parts:
        raise ValueError(f"{name}_shape is missing, and int32 words alone do not tell how wide a code is")
    shape = torch.Size(parts["weight_shape"].tolist())
    _expect(packed, torch.int32, (shape[0], packed.shape[1]), f"{name}_packed")
    if packed.shape[1] * 8 == shape[1]:
        return _integers(unpack_int4_words(packed), scale, shape, name)
    if packed.shape[1] * 4 == shape[1]:
        # Codes are stored plus 128: one flipped sign bit a byte.
        return _int8(packed.contiguous().view(torch.uint8) ^ 0x80, scale, shape, name)
    raise ValueError(
        f"{name}_packed of {packed.shape[1]} words for {shape[1]} columns holds neither 4 nor 8 bits a code"
    )


def _integers(qdata: Tensor, scale: Tensor, shape: torch.Size, name: str) -> QuantizedTensor:
    if scale.dim() == 2 and scale.shape == (shape[0], 1) and shape[1] not in GROUPS:
        # One scale a row is the same scale for every group of it.
        group = next((g for g in GROUPS if shape[1] % g == 0), None)
        scale = scale.expand(shape[0], shape[1] // group).contiguous() if group else scale
    group = shape[1] // max(1, scale.shape[-1])
    if scale.shape != (shape[0], scale.shape[-1]) or group not in GROUPS:
        raise ValueError(
            f"{name}_scale of shape {tuple(scale.shape)} for INT4 codes {tuple(shape)}: groups of {group} columns "
            f"are not supported; {', '.join(map(str, GROUPS))} are"
        )
    return QuantizedTensor(qdata, scale, None, shape, f"int4-g{group}")


def _read_bytes(parts: dict[str, Tensor], name: str) -> QuantizedTensor:
    weight, scale = parts["weight"], parts["weight_scale"]
    if weight.dtype == torch.int8:
        return _int8(weight.view(torch.uint8), scale, weight.shape, name)
    _expect(weight, E4M3, weight.shape, name)
    format = _fp8_format(tuple(weight.shape), scale)
    if format is None:
        raise ValueError(
            f"{name}_scale, {scale.dtype} {tuple(scale.shape)}, is neither one scale, one a row, one a 128 x 128 tile "
            f"nor an exponent for 32 columns of FP8 codes {tuple(weight.shape)}"
        )
    scale = scale.reshape(()) if format == "fp8-tensor" else scale
    return QuantizedTensor(weight.view(torch.uint8), scale, None, weight.shape, format)


def _fp8_format(shape: tuple[int, ...], scale: Tensor) -> str | None:
    n, k = shape
    if scale.dtype == torch.uint8:
        return "mxfp8" if scale.shape == (n, k // 32) else None
    if scale.shape == (n, 1):
        return "fp8-channel"
    if k % TILE == 0 and scale.shape == (-(-n // TILE), k // TILE):
        return "fp8-block"
    return "fp8-tensor" if scale.numel() == 1 else None


def _int8(qdata: Tensor, scale: Tensor, shape: torch.Size, name: str) -> QuantizedTensor:
    if scale.numel() == 1:
        scale = scale.reshape(1, 1).expand(shape[0], 1).contiguous()
    if scale.shape != (shape[0], 1):
        raise ValueError(
            f"{name}_scale of shape {tuple(scale.shape)}: INT8 needs one scale, or one a row of {shape[0]}"
        )
    return QuantizedTensor(qdata, scale, None, shape, "int8-channel")


_READERS: dict[Callable[[dict[str, Tensor], str], QuantizedTensor], set[str]] = {
    _read_ct_nvfp4: {"weight_packed", "weight_scale", "weight_global_scale"},
    _read_modelopt: {"weight", "weight_scale", "weight_scale_2"},
    _read_packed: {"weight_packed", "weight_scale"},
    _read_bytes: {"weight", "weight_scale"},
}


def _check_order(parts: Mapping[str, Tensor], name: str) -> None:
    zeros = parts.get("weight_zero_point")
    if zeros is not None and bool(zeros.float().any()):
        raise ValueError(
            f"{name}_zero_point is not zero: asymmetric codes are not supported; requantize symmetrically"
        )
    order = parts.get("weight_g_idx")
    if order is not None and bool((order[1:] < order[:-1]).any()):
        raise ValueError(f"{name}_g_idx permutes columns (activation order), which no format here can decode")


def _expect(tensor: Tensor, dtype: torch.dtype, shape: Iterable[int], name: str) -> None:
    if tensor.dtype != dtype or tensor.shape != torch.Size(shape):
        raise ValueError(f"{name} is {tensor.dtype} {tuple(tensor.shape)}, expected {dtype} {tuple(shape)}")
