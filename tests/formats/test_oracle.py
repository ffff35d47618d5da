"""Each named rule against the bytes its library made: equal to the last bit.

Exceptions are named beside each test with the reason: cases where the library itself makes NaN (records, says
the oracle's README), signs of zeros, and values decoded from another form of the global scale.
"""

from __future__ import annotations

import pytest
import torch
from oracle_bytes import NVFP4_CASES, assert_same, load, nvfp4_input, positive_zero
from torch import Tensor

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.grids import from_e2m1_bytes, from_e4m3, quotient, round_e2m1, to_e4m3
from lowbitrl.formats.int4 import w4a8, w4a8_scales
from lowbitrl.formats.mx import floor_scale
from lowbitrl.formats.packing import (
    pack_e2m1,
    pack_int4_words,
    pack_nibbles,
    swizzle_128x4,
    unpack_int4_words,
    unpack_nibbles,
    unswizzle_128x4,
)

# NVFP4 --------------------------------------------------------------------------------------------------

NVFP4 = {
    "nvfp4-tensor": "vllm_emu",
    "nvfp4:vllm": "vllm_emu",
    "nvfp4:te": "te_ref",
    "nvfp4:compressed-tensors": "ct",
    "nvfp4:torchao": "torchao",
    "nvfp4:modelopt": "modelopt",
}

RECORDS = {
    # The library divides by a zero or infinite global scale and writes NaN; here everything decodes to zero.
    "vllm_emu": ("all_zero", "fp32_subnormal"),
    "torchao": ("all_zero",),
    "modelopt": ("all_zero",),
}

CASES = [(f, lib, c) for f, lib in NVFP4.items() for c in NVFP4_CASES if c not in RECORDS.get(lib, ())]


def decode_scale(lib: str, stored: Tensor) -> Tensor:
    """The decode scale that a library's stored global (encode scale, decode scale or amax) stands for."""
    if lib in ("vllm_emu", "ct"):
        return 1 / stored
    if lib == "te_ref":
        return 1 / torch.where(
            stored == 0, 1.0, quotient(2688.0, stored).clamp(max=torch.finfo(torch.float32).max)
        )
    return stored


@pytest.mark.parametrize(("name", "lib", "case"), CASES)
def test_nvfp4(name, lib, case):
    x, amax = nvfp4_input(case)
    theirs = load(f"nvfp4_{lib}")
    q = get_format(name).quantize(x, amax=amax)
    assert q.global_scale is not None
    assert_same(positive_zero(q.qdata), positive_zero(theirs[f"{case}.packed"]), "codes")
    assert_same(q.scale.view(torch.uint8), theirs[f"{case}.scale"], "scales")
    assert_same(q.global_scale.view(1), decode_scale(lib, theirs[f"{case}.global"].view(1)), "global scale")
    values = theirs[f"{case}.dequant"]
    if lib == "te_ref":
        # TE stores amax and decodes with (scale * amax) * (1/2688), another rounding of the same product.
        torch.testing.assert_close(q.dequantize(), values, rtol=2**-22, atol=0)
        blocks = from_e2m1_bytes(q.qdata).unflatten(-1, (-1, 16))
        scale = from_e4m3(q.scale) * theirs[f"{case}.global"] * torch.tensor(1 / 2688)
        assert_same((blocks * scale.unsqueeze(-1)).flatten(-2), values, "TE's own decoding")
    else:
        assert_same(q.dequantize(values.dtype), values, "values")


@pytest.mark.parametrize(("lib", "case"), [(lib, c) for lib, cases in RECORDS.items() for c in cases])
def test_nvfp4_records_decode_to_zero_here(lib, case):
    x, amax = nvfp4_input(case)
    for name in [f for f, library in NVFP4.items() if library == lib] + ["nvfp4", "nvfp4-token"]:
        assert (get_format(name).quantize(x, amax=amax).dequantize() == 0).all(), name


@pytest.mark.parametrize("case", [c for c in NVFP4_CASES if c not in RECORDS["vllm_emu"]])
def test_our_weights_differ_from_vllm_only_below_the_floor(case):
    x, amax = nvfp4_input(case)
    theirs = load("nvfp4_vllm_emu")[f"{case}.scale"]
    ours = get_format("nvfp4").quantize(x, amax=amax).scale.view(torch.uint8)
    zero_block = x.float().abs().unflatten(-1, (-1, 16)).amax(-1) == 0
    assert_same(ours, torch.where(zero_block, 0, theirs.clamp(min=8)), "scales")  # byte 8 is 2^-6


def test_nvfp4_gemm_is_exact_from_the_codes():
    t = load("nvfp4_gemm_exact")
    fmt = get_format("nvfp4:vllm")
    x, w = fmt.quantize(t["x"]), fmt.quantize(t["w"])

    def without_global(q: QuantizedTensor) -> Tensor:
        return (from_e2m1_bytes(q.qdata).unflatten(-1, (-1, 16)) * from_e4m3(q.scale).unsqueeze(-1)).flatten(
            -2
        )

    acc = without_global(x) @ without_global(w).T
    assert_same(acc.double(), t["acc_fp64"], "fp32 accumulator")
    assert x.global_scale is not None
    assert w.global_scale is not None
    assert_same((x.global_scale * w.global_scale).view(1), t["alpha_fp32"], "alpha")


# FP8 ----------------------------------------------------------------------------------------------------

FP8_X = {
    "token.vllm_native": "fp8-token:vllm-native",
    "token.ct": "fp8-token:compressed-tensors",
    "token.torchao": "fp8-token:torchao",
    "g128.deepgemm": "fp8-1x128:deepgemm",
    "g128.vllm_native": "fp8-1x128:vllm-native",
    "g128_ue8m0.deepgemm": "fp8-1x128:ue8m0",
    "g128_ue8m0.vllm_native": "fp8-1x128:vllm-native-ue8m0",
}
FP8_W = {
    "tensor.ct": "fp8-tensor:compressed-tensors",
    "tensor.modelopt": "fp8-tensor:modelopt",
    "tensor.vllm_native": "fp8-tensor:vllm-native",
    "channel.ct": "fp8-channel:compressed-tensors",
    "channel.torchao": "fp8-channel:torchao",
    "block128.ct": "fp8-block:compressed-tensors",
    "block128.deepgemm": "fp8-block",
    "block128.torchao": "fp8-block:torchao",
    "block128_ue8m0.deepgemm": "fp8-block:ue8m0",
}
FP8 = [(v, k, f) for v in ("x", "xf") for k, f in FP8_X.items()] + [("w", k, f) for k, f in FP8_W.items()]


@pytest.mark.parametrize(("tensor", "key", "name"), FP8)
def test_fp8(tensor, key, name):
    t = load("fp8")
    q = get_format(name).quantize(t[f"{tensor}.input"])
    codes = t[f"{tensor}.{key}.q"]
    if key.endswith("torchao"):
        # torchao divides a zero row by its zero scale and stores NaN (0xFF); here its codes are 0.
        codes = torch.where(codes == 0xFF, 0, codes)
    assert_same(q.qdata, codes, "codes")
    theirs = t[f"{tensor}.{key}.scale"]
    assert_same(q.scale.reshape(theirs.shape), theirs, "scales")


def test_every_fp8_tensor_of_the_oracle_has_a_rule():
    keys = {k.removesuffix(".q") for k in load("fp8") if k.endswith(".q")}
    assert keys == {f"{v}.{k}" for v, k, _ in FP8}


# INT ----------------------------------------------------------------------------------------------------

INT = [
    (dtype, f"g{g}.{lib}", f"int4-g{g}:{rule}")
    for dtype in ("bf16", "fp32")
    for g in (128, 32)
    for lib, rule in {
        "ct": "compressed-tensors",
        "torchao_sym": "torchao",
        "torchao_noclip": "torchao-noclip",
    }.items()
] + [
    (dtype, f"int8_{side}.ct", f"int8-{side}:compressed-tensors")
    for dtype in ("bf16", "fp32")
    for side in ("channel", "token")
]


@pytest.mark.parametrize(("dtype", "key", "name"), INT)
def test_int(dtype, key, name):
    t = load("int")
    fmt = get_format(name)
    q = fmt.quantize(t[f"{dtype}.input"])
    codes = fmt.grid.decode(q.qdata).to(torch.int8)
    assert_same(codes, t[f"{dtype}.{key}.q"], "codes")
    assert q.scale.dtype == t[f"{dtype}.{key}.scale"].dtype
    assert_same(q.scale, t[f"{dtype}.{key}.scale"], "scales")
    if f"{dtype}.{key}.dequant" in t:
        values = t[f"{dtype}.{key}.dequant"]
        assert_same(q.dequantize(values.dtype), values, "values")
        words = t[f"{dtype}.{key}.weight_packed"]
        assert_same(pack_int4_words(q.qdata), words, "int32 words")
        assert_same(unpack_int4_words(words), q.qdata, "int32 words, back")


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
def test_int4_modelopt_packings(dtype):
    t = load("int")
    x = t[f"{dtype}.g128.modelopt.input"]
    q = get_format("int4-g128:modelopt-tensor").quantize(x)
    # INT4QTensor: codes plus 8, the even column in the HIGH nibble; its stored scale is the encode one.
    codes = unpack_nibbles(q.qdata) ^ 8
    assert_same(
        codes[..., 0::2] << 4 | codes[..., 1::2], t[f"{dtype}.g128.modelopt.packed_hi_first"], "QTensor"
    )
    inverse = 7 / x.unflatten(-1, (-1, 128)).abs().amax(-1)
    assert_same(inverse, t[f"{dtype}.g128.modelopt.inv_scale"], "inverse scale")
    # AWQ export: two's complement, packed along the output dimension, even rows low.
    q = get_format("int4-g128:modelopt").quantize(x)
    codes = unpack_nibbles(q.qdata)
    assert_same(codes[0::2] | codes[1::2] << 4, t[f"{dtype}.g128.modelopt_export.packed_out_dim"], "export")
    assert_same(q.scale, t[f"{dtype}.g128.modelopt_export.scale"], "export scale")


def test_w4a8_scales():
    t = load("w4a8_group_scales")
    fp8, channel = w4a8_scales(t["scale_bf16"])
    assert_same(fp8.view(torch.uint8), t["group_scale_fp8"], "group scales")
    assert_same(channel, t["channel_scale"], "channel scales")


def test_w4a8_keeps_the_codes():
    w = torch.randn(128, 256).bfloat16()
    plain = get_format("int4-g128").quantize(w)
    served = get_format("int4-g128:w4a8").quantize(w)
    assert_same(served.qdata, plain.qdata, "codes")
    assert_same(w4a8(plain).dequantize(), served.dequantize(), "values")


# MX -----------------------------------------------------------------------------------------------------

MX = [
    (dtype, key, name)
    for dtype in ("bf16", "fp32")
    for key, name in {
        "mxfp4.ct": "mxfp4:compressed-tensors",
        "mxfp4.modelopt": "mxfp4:modelopt",
        "mxfp4.torchao_EVEN": "mxfp4:even",
        "mxfp4.torchao_FLOOR": "mxfp4:floor",
        "mxfp4.torchao_RCEIL": "mxfp4:ceil",
        "mxfp8.torchao_EVEN": "mxfp8:even",
        "mxfp8.torchao_FLOOR": "mxfp8:floor",
        "mxfp8.torchao_RCEIL": "mxfp8:ceil",
    }.items()
]


@pytest.mark.parametrize(("dtype", "key", "name"), MX)
def test_mx(dtype, key, name):
    t = load("mx")
    q = get_format(name).quantize(t[f"{dtype}.input"])
    if key.startswith("mxfp4"):
        assert_same(positive_zero(q.qdata), positive_zero(t[f"{dtype}.{key}.packed"]), "codes")
    else:
        assert_same(q.qdata, t[f"{dtype}.{key}.q"], "codes")
    assert_same(q.scale, t[f"{dtype}.{key}.scale"], "scales")


# Casts and layouts --------------------------------------------------------------------------------------


def test_casts():
    t = load("casts_ml_dtypes")
    x = t["e2m1.input"]
    codes = unpack_nibbles(pack_e2m1(round_e2m1(x)))
    assert_same(codes, torch.where(t["e2m1.code"] == 8, 0, t["e2m1.code"]), "E2M1")
    assert_same(to_e4m3(t["e4m3.input"]).view(torch.uint8), t["e4m3.code"], "E4M3")


def test_e8m0_cast_of_powers_of_two():
    t = load("casts_ml_dtypes")
    # ml_dtypes rounds to the nearest power of two; a scale rule never needs that, only exact powers are shared.
    x, code = t["e8m0_rne.input"], t["e8m0_rne.code"]
    power = (x > 2.0**-126) & (x.view(torch.int32) & 0x7FFFFF == 0)
    assert power.any()
    assert_same(floor_scale(0)(x[power]), code[power], "E8M0")


@pytest.mark.parametrize("shape", ["128x4", "100x7", "130x9"])
def test_swizzle(shape):
    t = load("scale_swizzle_128x4")
    linear, swizzled = t[f"{shape}.linear"], t[f"{shape}.swizzled"]
    assert_same(swizzle_128x4(linear), swizzled.view(-1), "swizzled")
    assert_same(unswizzle_128x4(swizzled.view(-1), *linear.shape), linear, "back")
    experts = torch.stack([linear, linear + 1])
    assert_same(unswizzle_128x4(swizzle_128x4(experts), *linear.shape), experts, "experts")


def test_nibbles_round_trip():
    codes = torch.randint(0, 16, (5, 4, 32), dtype=torch.uint8)
    assert_same(unpack_nibbles(pack_nibbles(codes)), codes, "nibbles")


def test_a_division_is_one_rounding():
    # torch's number / tensor is two, and tensor / number is a multiplication on CUDA.
    x = torch.rand(10_000) + 0.5
    assert_same(quotient(2688.0, x), (2688.0 / x.double()).float(), "number / tensor")
    assert_same(quotient(x, 448.0), (x.double() / 448.0).float(), "tensor / number")
    assert not torch.equal(quotient(2688.0, x), 2688.0 / x)
