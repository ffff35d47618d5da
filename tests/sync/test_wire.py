"""Names, packings and scale directions of other engines: there and back, and against their own decoders.

compressed-tensors 0.17.0 is the reader here, on CPU: what it makes of our tensors is what we make of them, and
what it wrote reads back as the bytes it wrote.
"""

import pytest
import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme, preset_name_to_scheme
from compressed_tensors.quantization.lifecycle.forward import dequantize
from safetensors.torch import load_file

from lowbitrl.checkpoints.config import _scheme
from lowbitrl.checkpoints.write import _tiles_misguessed
from lowbitrl.formats import get_format, known_formats
from lowbitrl.formats.grids import from_e2m1_bytes
from lowbitrl.formats.nvfp4 import FULL_RANGE
from lowbitrl.quant import Recipe, export, resolve
from lowbitrl.sync.foreign import decode_global_scale, from_layout, group_parts
from lowbitrl.sync.wire import encode_global_scale, representable, to_layout, translate
from tests.conftest import tiny_llama

ORACLE = "tests/oracle"
CT, MODELOPT = "compressed-tensors", "modelopt"
WRITABLE = [(f, layout) for layout in (CT, MODELOPT) for f in known_formats() if representable(f, layout)]
# These store amax / 2688, which need not be the reciprocal of any number; a test below has them.
NO_RECIPROCAL = ("nvfp4:torchao", "nvfp4:modelopt")
WRITABLE = [(f, layout) for f, layout in WRITABLE if layout == MODELOPT or f not in NO_RECIPROCAL]
SHAPES = {"fp8-block": (320, 256)}


def weight(n=48, k=256, dtype=torch.bfloat16, std=0.05):
    w = torch.randn(n, k) * std
    w[3] = 0.0
    w[5, :32] = 0.0
    w[7, 9] = 40 * std
    return w.to(dtype)


def same(a, b):
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.view(-1).view(torch.uint8), b.view(-1).view(torch.uint8))
    )


def assert_same_bytes(ours, theirs):
    assert ours.shape == theirs.shape
    assert ours.tensors().keys() == theirs.tensors().keys()
    for name, tensor in ours.tensors().items():
        assert same(tensor.contiguous(), theirs.tensors()[name].contiguous()), name


@pytest.mark.parametrize(("name", "layout"), WRITABLE)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_round_trip(name, layout, dtype):
    q = get_format(name).quantize(weight(*SHAPES.get(name.partition(":")[0], (48, 256)), dtype=dtype))
    back = from_layout(to_layout(q, layout))
    assert back.format == name.partition(":")[0]
    assert_same_bytes(q, back)
    assert same(q.dequantize(dtype), back.dequantize(dtype))


def test_every_weight_format_of_a_recipe_has_names():
    weights = (
        "nvfp4",
        "fp8-channel",
        "fp8-block",
        "fp8-tensor",
        "int8-channel",
        "int4-g128",
        "int4-g32",
        "mxfp4",
        "mxfp8",
    )
    assert all(representable(name, CT) for name in weights)
    assert representable("nvfp4", MODELOPT)
    assert not any(representable(name, MODELOPT) for name in weights[1:])


SCHEMES = {
    "nvfp4": "nvfp4-pack-quantized",
    "int4-g128": "pack-quantized",
    "int4-g32": "pack-quantized",
    "fp8-channel": "float-quantized",
    "fp8-tensor": "float-quantized",
    "int8-channel": "int-quantized",
    "mxfp4": "mxfp4-pack-quantized",
    "mxfp8": "mxfp8-quantized",
}


@pytest.mark.parametrize("name", SCHEMES)
def test_compressed_tensors_decodes_our_tensors_as_we_do(name):
    q = get_format(name).quantize(weight())
    scheme = _scheme("fp8-channel" if name == "fp8-tensor" else name, None, ["Linear"])
    theirs = BaseCompressor.get_value_from_registry(SCHEMES[name]).decompress(to_layout(q, CT), scheme)[
        "weight"
    ]
    # Its NVFP4 divides a block scale by S where everyone else multiplies by 1 / S; BF16 hides most of that.
    tolerance = {"rtol": 2**-7, "atol": 0.0} if name == "nvfp4" else {"rtol": 0.0, "atol": 0.0}
    torch.testing.assert_close(theirs.bfloat16(), q.dequantize(torch.bfloat16), **tolerance)
    assert (theirs.bfloat16() != q.dequantize(torch.bfloat16)).float().mean() < 0.01


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_how_compressed_tensors_decodes_nvfp4_otherwise(dtype):
    # The whole of the difference: code * (scale / S) there, code * (scale * (1 / S)) in engines and here.
    q = get_format("nvfp4").quantize(weight(256, 1024, dtype))
    parts = to_layout(q, CT)
    scheme = _scheme("nvfp4", None, ["Linear"])
    theirs = BaseCompressor.get_value_from_registry(SCHEMES["nvfp4"]).decompress(parts, scheme)["weight"]
    scale = q.scale.float() / parts["weight_global_scale"]
    blocks = from_e2m1_bytes(q.qdata).unflatten(-1, (-1, 16)) * scale.unsqueeze(-1)
    assert torch.equal(blocks.flatten(-2).bfloat16(), theirs)
    ulps = (theirs.view(torch.int16).int() - q.dequantize(torch.bfloat16).view(torch.int16).int()).abs()
    assert ulps.max() <= 1


@pytest.mark.parametrize("shape", [(384, 256), (64, 256), (64, 128), (320, 256), (1000, 256), (512, 128)])
def test_compressed_tensors_decodes_our_blocks_where_it_knows_that_they_are_blocks(shape):
    q = get_format("fp8-block").quantize(weight(*shape))
    parts, scheme = to_layout(q, CT), _scheme("fp8-block", None, ["Linear"])
    theirs = dequantize(parts["weight"], parts["weight_scale"], args=scheme.weights)
    assert same(theirs, q.dequantize(theirs.dtype))
    # Its decompressor is not told but guesses: the writer's note on that must be neither early nor late.
    try:
        guessed = BaseCompressor.get_value_from_registry("float-quantized").decompress(parts, scheme)[
            "weight"
        ]
        right = torch.equal(guessed, q.dequantize())
    except RuntimeError:
        right = False
    assert right != _tiles_misguessed(*shape)


THEIRS = {
    "NVFP4A16": ("nvfp4-pack-quantized", "nvfp4", "nvfp4:compressed-tensors"),
    "FP8_DYNAMIC": ("float-quantized", "fp8-channel", "fp8-channel:compressed-tensors"),
    "FP8": ("float-quantized", "fp8-tensor", "fp8-tensor:compressed-tensors"),
    "FP8_BLOCK": ("float-quantized", "fp8-block", "fp8-block:compressed-tensors"),
    "INT8": ("int-quantized", "int8-channel", "int8-channel:compressed-tensors"),
    "W4A16": ("pack-quantized", "int4-g128", "int4-g128:compressed-tensors"),
}


def quantized_by_them(w, preset):
    """A weight through compressed-tensors' own parameter calculation and compressor."""
    from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam

    scheme = preset_name_to_scheme(preset, ["Linear"])
    args = scheme.weights
    state = {"weight": w}
    if args.strategy == "tensor_group":
        state["weight_global_scale"] = generate_gparam(*torch.aminmax(w)).reshape(1)
    tiles = {
        "tensor": lambda: w.reshape(1, -1),
        "channel": lambda: w,
        "group": lambda: w.unflatten(-1, (-1, args.group_size)),
        "tensor_group": lambda: w.unflatten(-1, (-1, args.group_size)),
        "block": lambda: w.unflatten(-1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2),
    }[args.strategy]()
    low, high = tiles.amin(-1), tiles.amax(-1)
    scale, _ = calculate_qparams(low, high, args, global_scale=state.get("weight_global_scale"))
    state["weight_scale"] = scale.unsqueeze(-1) if args.strategy == "channel" else scale
    compressor = BaseCompressor.get_value_from_registry(THEIRS[preset][0])
    return compressor.compress(state, scheme), scheme, compressor


@pytest.mark.parametrize("preset", THEIRS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_what_compressed_tensors_wrote_is_read_exactly(preset, dtype):
    w = weight(384, 256, dtype)
    parts, scheme, compressor = quantized_by_them(w, preset)
    q = from_layout(parts)
    assert q.format == THEIRS[preset][1]
    theirs = compressor.decompress(parts, scheme)["weight"]
    ours = q.dequantize(theirs.dtype)
    if q.global_scale is None:
        assert same(ours, theirs)
    else:
        # q * (sf / S) there, q * (sf * (1 / S)) in every engine and here.
        torch.testing.assert_close(theirs.float(), q.dequantize(), rtol=2**-8, atol=0)
    again = to_layout(q, CT)
    for name, tensor in again.items():
        assert same(tensor, parts[name].to(tensor.dtype)) or name == "weight_global_scale", name
    # Not only decoded: the same rule on the same weight makes the same bytes.
    named = get_format(THEIRS[preset][2]).quantize(w)
    assert torch.equal(named.dequantize(), q.dequantize())


@pytest.mark.parametrize("case", ["rand_bf16", "rand_fp32", "zero_blocks", "outlier_1e4", "all_equal_bf16"])
@pytest.mark.parametrize("layout", [CT, MODELOPT])
def test_oracle_nvfp4(case, layout):
    t = load_file(f"{ORACLE}/nvfp4_{'ct' if layout == CT else 'modelopt'}.safetensors")
    packed, scale = t[f"{case}.packed"], t[f"{case}.scale"].view(torch.float8_e4m3fn)
    if layout == CT:
        parts = {
            "weight_packed": packed,
            "weight_scale": scale,
            "weight_global_scale": t[f"{case}.global"].reshape(1),
        }
    else:
        parts = {"weight": packed, "weight_scale": scale, "weight_scale_2": t[f"{case}.global"].reshape(())}
    q = from_layout(parts)
    values = t[f"{case}.dequant"]
    assert torch.equal(q.dequantize(values.dtype), values)
    again = to_layout(q, layout)
    # Two S may have one reciprocal, and of an fp32 weight's S only that is kept.
    recover = [1 / p["weight_global_scale"] if layout == CT else p["weight_scale_2"] for p in (again, parts)]
    assert same(*recover)
    kept = [
        name
        for name in parts
        if name != "weight_global_scale" or case in ("rand_bf16", "zero_blocks", "all_equal_bf16")
    ]
    assert all(same(again[name], parts[name]) for name in kept)


@pytest.mark.parametrize("dtype", ["bf16", "fp32"])
@pytest.mark.parametrize("key", ["g128.ct", "g32.ct"])
def test_oracle_int4(dtype, key):
    t = load_file(f"{ORACLE}/int.safetensors")
    words, scale = t[f"{dtype}.{key}.weight_packed"], t[f"{dtype}.{key}.scale"]
    shape = torch.tensor(t[f"{dtype}.{key}.q"].shape)
    q = from_layout({"weight_packed": words, "weight_scale": scale, "weight_shape": shape})
    assert q.format == f"int4-{key.partition('.')[0]}"
    values = t[f"{dtype}.{key}.dequant"]
    assert torch.equal(q.dequantize(values.dtype), values)
    assert same(to_layout(q, CT)["weight_packed"], words)


# Global scales --------------------------------------------------------------------------------------------


def test_either_layout_gives_the_same_alpha():
    amax = torch.cat(
        [torch.rand(20000) * 10, torch.rand(20000) * 1e-3, torch.tensor([1e-30, 1e30, 3e38, 2e-35])]
    )
    for peak in (amax, amax.bfloat16().float()):
        for p in get_format("nvfp4").rule.global_scales(peak)[1][:2000]:
            assert 1 / encode_global_scale(p) == p


def test_the_encode_scale_of_a_bf16_weight_is_2688_over_its_absmax():
    for _ in range(200):
        w = torch.randn(4, 16).bfloat16() * torch.rand(()).bfloat16()
        q = get_format("nvfp4").quantize(w)
        expected = torch.tensor(FULL_RANGE, dtype=torch.float64) / w.abs().max().double()
        assert encode_global_scale(q.global_scale) == expected.float()


def test_both_layouts_of_one_weight_decode_alike():
    q = get_format("nvfp4").quantize(weight())
    ct, modelopt = to_layout(q, CT), to_layout(q, MODELOPT)
    assert decode_global_scale(ct["weight_global_scale"]) == modelopt["weight_scale_2"]
    assert ct["weight_global_scale"].shape == (1,)
    assert modelopt["weight_scale_2"].shape == ()
    assert_same_bytes(from_layout(ct), from_layout(modelopt))


def test_a_global_scale_that_is_no_reciprocal_is_refused_and_kept_by_modelopt():
    amax = torch.rand(3000) * 4 + 0.1
    unreachable = []
    for p in amax / 2688:
        try:
            assert 1 / encode_global_scale(p) == p
        except ValueError:
            unreachable.append(p)
    assert unreachable, "every float has a reciprocal partner? then the check in encode_global_scale is dead"
    q = get_format("nvfp4").quantize(weight())
    parts = to_layout(q, MODELOPT) | {"weight_scale_2": unreachable[0]}
    odd = from_layout(parts)
    assert same(to_layout(odd, MODELOPT)["weight_scale_2"], unreachable[0])
    with pytest.raises(ValueError, match="keep the modelopt layout"):
        to_layout(odd, CT, "m.weight")


@pytest.mark.parametrize("value", [float("inf"), float("nan"), 0.0, -1.0])
def test_a_dead_global_scale_is_named(value):
    q = get_format("nvfp4").quantize(weight())
    parts = to_layout(q, CT) | {"weight_global_scale": torch.tensor([value])}
    with pytest.raises(ValueError, match=r"experts\.3\.w1\.weight_global_scale is .*not one finite positive"):
        from_layout(parts, "experts.3.w1.weight")


# Refusals -------------------------------------------------------------------------------------------------


def test_an_incomplete_weight_is_named():
    parts = to_layout(get_format("nvfp4").quantize(weight()), CT)
    for lost in ("weight_scale", "weight_packed"):
        with pytest.raises(ValueError, match=r"m\.weight: .*incomplete"):
            from_layout({k: v for k, v in parts.items() if k != lost}, "m.weight")


def test_codes_under_a_scale_of_another_group_are_refused():
    parts = to_layout(get_format("int4-g128").quantize(weight()), CT)
    parts["weight_scale"] = parts["weight_scale"].repeat_interleave(3, 1)
    with pytest.raises(ValueError, match="groups of 42 columns"):
        from_layout(parts)


def test_zero_points_that_are_zero_are_harmless_and_others_are_refused():
    q = get_format("int4-g128").quantize(weight())
    parts = to_layout(q, CT)
    assert_same_bytes(q, from_layout(parts | {"weight_zero_point": torch.zeros(48, 2, dtype=torch.int8)}))
    with pytest.raises(ValueError, match="asymmetric"):
        from_layout(parts | {"weight_zero_point": torch.ones(48, 2, dtype=torch.int8)})


def test_activation_order_is_refused_unless_it_is_the_identity():
    q = get_format("int4-g128").quantize(weight())
    order = torch.arange(256) // 128
    parts = to_layout(q, CT)
    assert_same_bytes(q, from_layout(parts | {"weight_g_idx": order}))
    with pytest.raises(ValueError, match="activation order"):
        from_layout(parts | {"weight_g_idx": order.flip(0)})


def test_nan_in_a_block_scale_is_named():
    parts = to_layout(get_format("nvfp4").quantize(weight()), CT)
    parts["weight_scale"] = parts["weight_scale"].clone()
    parts["weight_scale"].view(torch.uint8)[0, 0] = 0x7F
    with pytest.raises(ValueError, match="w_scale holds NaN"):
        from_layout(parts, "w")


def test_the_w4a8_kernels_scales_are_in_no_checkpoint():
    q = get_format("int4-g128:w4a8").quantize(weight(128, 256))
    with pytest.raises(ValueError, match="has no names"):
        to_layout(q, CT)


def test_one_scale_a_row_of_int4_and_one_a_tensor_of_int8_decode_the_same():
    q = get_format("int4-g128").quantize(weight())
    q = type(q)(q.qdata, q.scale[:, :1].expand(48, 2).contiguous(), None, q.shape, q.format)
    row = to_layout(q, CT) | {"weight_scale": q.scale[:, :1]}
    assert_same_bytes(q, from_layout(row))
    codes = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    tensor = from_layout({"weight": codes, "weight_scale": torch.tensor([0.25])})
    assert torch.equal(tensor.dequantize(), codes * 0.25)


def test_int8_in_int32_words():
    from compressed_tensors.compressors.pack_quantized.helpers import pack_to_int32

    codes = torch.randint(-128, 128, (6, 32), dtype=torch.int8)
    scale = torch.rand(6, 1).bfloat16()
    parts = {
        "weight_packed": pack_to_int32(codes, 8),
        "weight_scale": scale,
        "weight_shape": torch.tensor([6, 32]),
    }
    q = from_layout(parts)
    assert q.format == "int8-channel"
    assert torch.equal(q.dequantize(), codes * scale.float())


# Streams --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("layout", [CT, MODELOPT])
def test_a_published_stream_translates_and_comes_back(layout):
    model = tiny_llama()
    plan = resolve(Recipe(rollout="nvfp4"), model)
    ours = dict(export(model.named_parameters(), plan))
    shuffled = [list(ours.items())[i] for i in torch.randperm(len(ours)).tolist()]
    modules, rest = group_parts(dict(translate(shuffled, plan, layout)))
    assert modules.keys() == {layer.name for layer in plan.layers if layer.weight}
    assert rest.keys() == {
        name for name in ours if name.rpartition(".")[2] not in ("qdata", "scale", "global_scale")
    }
    for name, parts in modules.items():
        for part, tensor in from_layout(parts, name).tensors().items():
            assert same(tensor.contiguous(), ours[f"{name}.{part}"].contiguous())


def test_a_stream_that_ends_early_is_named():
    model = tiny_llama()
    plan = resolve(Recipe(rollout="nvfp4"), model)
    ours = dict(export(model.named_parameters(), plan))
    lost = "model.layers.1.mlp.down_proj.global_scale"
    with pytest.raises(ValueError, match=f"{lost} never came"):
        list(translate([(n, t) for n, t in ours.items() if n != lost], plan, CT))


def test_unknown_layout():
    with pytest.raises(
        ValueError, match="layout='gguf' is unknown; choose one of compressed-tensors, modelopt"
    ):
        to_layout(get_format("nvfp4").quantize(weight()), "gguf")


def test_schemes_are_valid_ones():
    assert isinstance(_scheme("int4-g32", "fp8-token", ["Linear"]), QuantizationScheme)
