"""Checkpoints that other engines load, and theirs here: bytes, configuration, logits.

The reader is transformers through compressed-tensors 0.17.0, on CPU. What was run and what was not is listed in
docs/interchange.md.
"""

from __future__ import annotations

import json

import pytest
import torch
from compressed_tensors.compressors import ModelCompressor
from compressed_tensors.quantization import (
    QuantizationConfig,
    QuantizationStatus,
    apply_quantization_config,
    preset_name_to_scheme,
)
from compressed_tensors.quantization.utils import calculate_qparams, generate_gparam
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer, CompressedTensorsConfig
from typer.testing import CliRunner

from lowbitrl.checkpoints import load_quantized, quantize_checkpoint
from lowbitrl.checkpoints.config import modelopt_config
from lowbitrl.cli import app
from lowbitrl.formats import get_format
from lowbitrl.formats.int4 import w4a8
from lowbitrl.formats.nvfp4 import encode_global
from lowbitrl.quant import Recipe, export, resolve
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe
from tests.tiny_run import checkpoint

IDS = torch.arange(3, 40).view(1, -1)
WIDE = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
ROLLOUTS = (
    "nvfp4-w4a16",
    "nvfp4",
    "nvfp4-fp8",
    "fp8",
    "fp8-block",
    "int8",
    "int4",
    "int4-fp8",
    "mxfp4",
    "mxfp8",
)


@pytest.fixture(scope="module")
def model_folder(tmp_path_factory):
    """A BF16 model wide enough for blocks of 128, and its tokenizer."""
    folder = checkpoint(tmp_path_factory.mktemp("model"))
    tiny_llama(**WIDE, tie_word_embeddings=True).save_pretrained(folder)
    return folder


def load(folder, **options):
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16, **options).eval()


def encoded(folder, rollout):
    """(plan, {module.part: tensor}) of our own encoder on the model of a folder."""
    model = load(folder)
    plan = resolve(Recipe(rollout=rollout), model)
    return plan, dict(export(model.named_parameters(), plan))


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def same(a, b):
    alike = a.dtype == b.dtype and a.shape == b.shape
    return alike and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def quantization_config(folder):
    return json.loads((folder / "config.json").read_text())["quantization_config"]


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_loads_back_bit_exact(rollout, model_folder, tmp_path):
    written = quantize_checkpoint(model_folder, Recipe(rollout=rollout), tmp_path / "out")
    plan, ours = encoded(model_folder, rollout)
    assert written.plan.digest == plan.digest
    back = load_quantized(tmp_path / "out")
    assert back.layout == "compressed-tensors"
    assert back.notes == ()
    assert back.weights.keys() == {layer.name for layer in plan.layers if layer.weight}
    for name, q in back.weights.items():
        q = w4a8(q) if plan.by_name[name].weight == "int4-g128:w4a8" else q
        assert q.format == plan.by_name[name].weight
        for part, tensor in q.tensors().items():
            assert same(tensor, ours[f"{name}.{part}"]), (name, part)
    untouched = {
        n: t for n, t in ours.items() if n.rpartition(".")[2] not in ("qdata", "scale", "global_scale")
    }
    assert back.others.keys() == untouched.keys()
    assert all(same(back.others[n], t) for n, t in untouched.items())


@pytest.mark.parametrize("rollout", ROLLOUTS)
def test_transformers_gives_the_logits_of_our_dequantized_model(rollout, model_folder, tmp_path):
    quantize_checkpoint(model_folder, Recipe(rollout=rollout), tmp_path / "out")
    ours = load(model_folder)
    before = logits(ours)
    ours.load_state_dict(load_quantized(tmp_path / "out").state_dict(), strict=False)
    ours.tie_weights()
    theirs = load(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    differ = [float((theirs.get_parameter(n) != p).float().mean()) for n, p in ours.named_parameters()]
    assert not torch.equal(logits(ours), before), (
        "quantizing changed nothing: the test compares a model with itself"
    )
    if rollout.startswith("nvfp4") and max(differ):
        # Their block scale is sf / S, ours sf * (1 / S): one BF16 ulp here and there.
        assert max(differ) < 0.01
        torch.testing.assert_close(logits(theirs), logits(ours), rtol=0.02, atol=0.05)
    else:
        assert max(differ) == 0
        assert torch.equal(logits(theirs), logits(ours))


@pytest.mark.parametrize("rollout", ["nvfp4-w4a16", "int4", "mxfp4", "mxfp8"])
def test_transformers_default_route_gives_them_too(rollout, model_folder, tmp_path):
    # Decompressed at the first forward pass, without dequantize=True. FP8 and INT8 are not here: that route casts
    # their fp32 scales to the model's BF16. Nor are FP8 blocks: it guesses a tile's height from the scale's.
    quantize_checkpoint(model_folder, Recipe(rollout=rollout), tmp_path / "out")
    theirs = load(tmp_path / "out")
    logits(theirs)
    for module in theirs.modules():
        module.quantization_enabled = False
    ours = load(model_folder)
    ours.load_state_dict(load_quantized(tmp_path / "out").state_dict(), strict=False)
    assert torch.equal(logits(theirs), logits(ours))


def test_transformers_runs_the_activation_quantizer_of_the_configuration(model_folder, tmp_path):
    quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out")
    theirs = load(tmp_path / "out")
    logits(theirs)
    quantized = logits(theirs)
    for module in theirs.modules():
        module.quantization_enabled = False
    assert not torch.equal(logits(theirs), quantized)


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
def test_both_layouts_carry_the_same_weights(layout, model_folder, tmp_path):
    quantize_checkpoint(model_folder, Recipe(rollout="nvfp4"), tmp_path / "out", layout)
    _, ours = encoded(model_folder, "nvfp4")
    back = load_quantized(tmp_path / "out")
    assert back.layout == layout
    for name, q in back.weights.items():
        assert all(same(t, ours[f"{name}.{part}"]) for part, t in q.tensors().items())


def test_modelopt_names_and_configuration(model_folder, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(model_folder, Recipe(rollout="nvfp4-w4a16"), out, "modelopt")
    tensors = load_file(out / "model.safetensors")
    name = "model.layers.0.mlp.gate_proj"
    assert {n.removeprefix(f"{name}.") for n in tensors if n.startswith(name)} == {
        "weight", "weight_scale", "weight_scale_2",
    }  # fmt: skip
    assert tensors[f"{name}.weight"].dtype == torch.uint8
    assert tensors[f"{name}.weight_scale_2"].shape == ()
    config = quantization_config(out)
    legacy = json.loads((out / "hf_quant_config.json").read_text())["quantization"]
    assert config["quant_method"] == "modelopt"
    assert config["quant_algo"] == legacy["quant_algo"] == "W4A16_NVFP4"
    assert config["ignore"] == legacy["exclude_modules"] == ["lm_head"]


def test_alpha_is_the_same_from_either_layout(model_folder, tmp_path):
    texts = ["w3 w4 w5 w6 w7", "w90 w80 w70"]
    for layout in ("compressed-tensors", "modelopt"):
        quantize_checkpoint(
            model_folder, Recipe(rollout="nvfp4"), tmp_path / layout, layout, calibration=texts
        )
    ct = load_file(tmp_path / "compressed-tensors" / "model.safetensors")
    modelopt = load_file(tmp_path / "modelopt" / "model.safetensors")
    inputs = [n.removesuffix(".input_scale") for n in modelopt if n.endswith("input_scale")]
    assert len(inputs) == 14
    for name in inputs:
        # What vLLM computes at load from each.
        theirs = (1 / ct[f"{name}.input_global_scale"]) * (1 / ct[f"{name}.weight_global_scale"])
        assert theirs == modelopt[f"{name}.input_scale"] * modelopt[f"{name}.weight_scale_2"]


# Activations ----------------------------------------------------------------------------------------------


def test_w4a4_without_calibration_is_written_weight_only_and_says_so(model_folder, tmp_path):
    written = quantize_checkpoint(model_folder, Recipe(rollout="nvfp4", residual=0.5), tmp_path / "out")
    assert any("weight-only" in note for note in written.notes)
    assert any("residual" in note for note in written.notes)
    record = json.loads((tmp_path / "out" / "lowbitrl.json").read_text())
    assert record["notes"] == list(written.notes)
    assert record["plan"]["digest"] == written.plan.digest
    scheme = quantization_config(tmp_path / "out")["config_groups"]["group_0"]
    assert scheme["input_activations"] is None


def test_calibration_writes_the_absmax_of_each_site(model_folder, tmp_path):
    text = "w3 w4 w5 w6 w7"
    out = tmp_path / "out"
    written = quantize_checkpoint(model_folder, Recipe(rollout="nvfp4"), out, calibration=[text])
    assert written.notes == ()
    model, seen = load(model_folder), {}
    for layer in written.plan.quantized:
        model.get_submodule(layer.name).register_forward_pre_hook(
            lambda m, args, name=layer.name: seen.__setitem__(name, args[0].abs().max().float())
        )
    with torch.no_grad():
        model(**AutoTokenizer.from_pretrained(model_folder)(text, return_tensors="pt"))
    tensors, back = load_file(out / "model.safetensors"), load_quantized(out)
    assert back.input_scales.keys() == seen.keys()
    for name, amax in seen.items():
        encode, decode = encode_global(amax)
        assert tensors[f"{name}.input_global_scale"] == encode
        assert back.input_scales[name] == decode
    config = quantization_config(out)
    assert config["config_groups"]["group_0"]["input_activations"]["dynamic"] == "local"
    assert torch.isfinite(logits(load(out))).all()


def test_modelopt_calibrated_is_w4a4(model_folder, tmp_path):
    quantize_checkpoint(
        model_folder, Recipe(rollout="nvfp4"), tmp_path / "out", "modelopt", calibration=["w3 w4"]
    )
    config = quantization_config(tmp_path / "out")
    assert config["quant_algo"] == "NVFP4"


# Configuration --------------------------------------------------------------------------------------------


def test_kept_modules_are_ignored_by_whole_name(model_folder, tmp_path):
    keep = ("lm_head", "*.layers.0.mlp.*")
    written = quantize_checkpoint(model_folder, Recipe(rollout="fp8", keep=keep), tmp_path / "out")
    config = quantization_config(tmp_path / "out")
    mlp = [f"model.layers.0.mlp.{leaf}_proj" for leaf in ("gate", "up", "down")]
    assert sorted(config["ignore"]) == sorted([*mlp, "lm_head"])
    assert {layer.name for layer in written.plan.quantized} == load_quantized(tmp_path / "out").weights.keys()
    QuantizationConfig.model_validate(config)


def test_widths_that_need_other_groups_become_groups_of_modules(tmp_path):
    folder = checkpoint(tmp_path / "model")
    tiny_llama(hidden_size=192, intermediate_size=256).save_pretrained(folder)
    quantize_checkpoint(folder, Recipe(rollout="int4"), tmp_path / "out")
    config = quantization_config(tmp_path / "out")
    sizes = {
        scheme["weights"]["group_size"]: scheme["targets"] for scheme in config["config_groups"].values()
    }
    assert sizes.keys() == {64, 128}
    assert all(name.endswith("down_proj") for name in sizes[128])
    theirs = load(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    decoded = load_quantized(tmp_path / "out").state_dict()
    assert all(torch.equal(p, decoded[n]) for n, p in theirs.named_parameters())


def test_a_split_fused_layer_is_reported(model_folder, tmp_path):
    recipe = Recipe(rollout="fp8", keep=("lm_head", "*.layers.1.*.k_proj"))
    written = quantize_checkpoint(model_folder, recipe, tmp_path / "out")
    assert written.notes == (
        "model.layers.1.self_attn: q_proj fp8-channel, k_proj bf16, v_proj fp8-channel are one layer in engines that "
        "fuse them (vLLM), which will refuse",
    )


def test_modelopts_substring_matching_cannot_swallow_a_quantized_module():
    model = tiny_llama()
    for layer in model.model.layers:
        layer.mlp.gate = torch.nn.Linear(64, 4, bias=False).bfloat16()
    plan = resolve(Recipe(rollout="nvfp4"), model)
    with pytest.raises(ValueError, match=r"mlp\.gate stays in BF16 and its name is part of .*mlp\.gate_proj"):
        modelopt_config(plan, model)


def test_a_subclass_that_compressed_tensors_would_not_match_is_refused(model_folder, tmp_path, monkeypatch):
    monkeypatch.setattr("lowbitrl.checkpoints.config._left_alone", lambda plan, model: [])
    with pytest.raises(ValueError, match=r"disagree about 1 modules, the first lm_head"):
        quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


# Mixtures of experts --------------------------------------------------------------------------------------


def moe_folder(kind, folder):
    checkpoint(folder)
    (folder / "model.safetensors").unlink()
    tiny_moe(kind).save_pretrained(folder)
    return folder


def dense(folder, source, into):
    """What load_quantized decodes, as an ordinary checkpoint in the names of the disk."""
    into.mkdir()
    decoded = {n: t.contiguous() for n, t in load_quantized(folder).state_dict().items()}
    save_file(decoded, into / "model.safetensors", metadata={"format": "pt"})
    load(source).config.save_pretrained(into)
    return load(into)


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
@pytest.mark.parametrize(
    "rollout",
    [
        "fp8",
        "int4",
        pytest.param(
            "nvfp4-w4a16", marks=pytest.mark.xfail(strict=True, reason="transformers drops global scales")
        ),
    ],
)
def test_transformers_loads_our_experts(kind, rollout, tmp_path):
    source = moe_folder(kind, tmp_path / "model")
    written = quantize_checkpoint(source, Recipe(rollout=rollout), tmp_path / "out")
    assert any("experts" in note for note in written.notes) == (rollout == "nvfp4-w4a16")
    ours = dense(tmp_path / "out", source, tmp_path / "dense")
    theirs = load(tmp_path / "out", quantization_config=CompressedTensorsConfig(dequantize=True))
    for name, parameter in ours.named_parameters():
        assert torch.equal(theirs.get_parameter(name), parameter), name


@pytest.mark.parametrize("layout", ["compressed-tensors", "modelopt"])
@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe"])
def test_experts_load_back_bit_exact_under_their_names_on_disk(kind, layout, tmp_path):
    source = moe_folder(kind, tmp_path / "model")
    quantize_checkpoint(source, Recipe(rollout="nvfp4"), tmp_path / "out", layout)
    _, ours = encoded(source, "nvfp4")
    back = load_quantized(tmp_path / "out")
    assert back.notes == ()
    assert sum("experts.3." in name for name in back.weights) == 6
    for name, q in back.weights.items():
        assert all(same(t, ours[f"{name}.{part}"]) for part, t in q.tensors().items())
    ignored = quantization_config(tmp_path / "out")["ignore"]
    router = "block_sparse_moe.gate" if kind == "mixtral" else "mlp.gate"
    assert {f"model.layers.{i}.{router}" for i in (0, 1)} < set(ignored)


def test_experts_that_live_on_disk_as_stacks_are_refused(tmp_path):
    source = moe_folder("gpt_oss", tmp_path / "model")
    with pytest.raises(ValueError, match="keeps its experts as stacks on disk"):
        quantize_checkpoint(source, Recipe(rollout="fp8"), tmp_path / "out")


def test_experts_cannot_be_calibrated(tmp_path):
    source = moe_folder("qwen3_moe", tmp_path / "model")
    with pytest.raises(ValueError, match="cannot see what enters single experts"):
        quantize_checkpoint(source, Recipe(rollout="nvfp4"), tmp_path / "out", calibration=["w3 w4"])


# The folder -----------------------------------------------------------------------------------------------


def test_shards_and_tokenizer(model_folder, tmp_path):
    out = tmp_path / "deep" / "out"
    quantize_checkpoint(model_folder, Recipe(rollout="nvfp4"), out, shard_size=200_000)
    index = json.loads((out / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 2
    assert all((out / name).stat().st_size < 220_000 for name in files)
    assert load_quantized(out).weights.keys() == {
        layer.name for layer in encoded(model_folder, "nvfp4")[0].quantized
    }
    text = "w5 w6 w7"
    assert AutoTokenizer.from_pretrained(out)(text) == AutoTokenizer.from_pretrained(model_folder)(text)
    assert torch.isfinite(logits(load(out))).all()


def test_a_folder_with_anything_in_it_is_refused_and_left(model_folder, tmp_path):
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "precious").write_text("x")
    with pytest.raises(FileExistsError, match="not an empty folder"):
        quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out")
    assert [p.name for p in (tmp_path / "out").iterdir()] == ["precious"]


def test_an_empty_folder_is_taken(model_folder, tmp_path):
    (tmp_path / "out").mkdir()
    quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out")
    assert load_quantized(tmp_path / "out").weights


def test_a_failure_while_writing_leaves_nothing(model_folder, tmp_path, monkeypatch):
    def full(*args):
        (args[-1] / "half").write_text("x")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("lowbitrl.checkpoints.write._save_configs", full)
    with pytest.raises(OSError, match="No space left"):
        quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out")
    assert list(tmp_path.iterdir()) == []


def test_nothing_to_quantize_is_refused(model_folder, tmp_path):
    for rollout in ("bf16", "nvfp4-w16a4"):
        with pytest.raises(ValueError, match="leaves every weight in BF16"):
            quantize_checkpoint(model_folder, Recipe(rollout=rollout), tmp_path / "out")


def test_formats_without_modelopt_names_are_refused(model_folder, tmp_path):
    with pytest.raises(ValueError, match=r"fp8-channel, which layout='modelopt' has no names for"):
        quantize_checkpoint(model_folder, Recipe(rollout="fp8"), tmp_path / "out", "modelopt")


def test_quantizing_twice_is_refused(model_folder, tmp_path):
    quantize_checkpoint(model_folder, Recipe(rollout="nvfp4"), tmp_path / "once")
    with pytest.raises(ValueError, match="quantized already"):
        quantize_checkpoint(tmp_path / "once", Recipe(rollout="nvfp4"), tmp_path / "twice")


def test_command_line(model_folder, tmp_path):
    recipe = tmp_path / "r.toml"
    recipe.write_text('[recipe]\nrollout = "nvfp4"\n[task]\nname = "chain_sum"\n')
    options = [
        "quantize",
        str(model_folder),
        "--recipe",
        str(recipe),
        "--out",
        str(tmp_path / "out"),
        "--layout",
        "modelopt",
    ]
    result = CliRunner().invoke(app, options)
    assert result.exit_code == 0, result.output
    assert "weight-only" in result.output
    assert load_quantized(tmp_path / "out").layout == "modelopt"


# Others' checkpoints --------------------------------------------------------------------------------------


def quantized_by_them(preset, folder, fuse=True):
    """A tiny model quantized and compressed by compressed-tensors alone, saved as llm-compressor saves."""
    model = tiny_llama(**WIDE)
    scheme = preset_name_to_scheme(preset, ["Linear"])
    config = QuantizationConfig(config_groups={"group_0": scheme}, ignore=["lm_head"])
    apply_quantization_config(model, config)
    linears = {n: m for n, m in model.named_modules() if hasattr(m, "quantization_scheme")}
    for name, module in linears.items():
        _calibrate_theirs(module, scheme.weights, _peers(name, linears) if fuse else [module])
        module.quantization_status = QuantizationStatus.FROZEN
    compressor = ModelCompressor.from_pretrained_model(model)
    compressor.compress_model(model)
    save_file(
        {n: t.contiguous() for n, t in model.state_dict().items() if n != "lm_head.weight"},
        folder / "model.safetensors",
    )
    model.config.save_pretrained(folder)
    compressor.update_config(str(folder))
    return model, linears, compressor


def _peers(name, linears):
    parent, _, leaf = name.rpartition(".")
    family = next(
        (f for f in (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj")) if leaf in f), (leaf,)
    )
    return [linears[f"{parent}.{member}"] for member in family]


@torch.no_grad()
def _calibrate_theirs(module, args, peers):
    w = module.weight
    shared = None
    if args.strategy == "tensor_group":
        shared = generate_gparam(*torch.aminmax(torch.cat([p.weight.view(-1) for p in peers]))).reshape(1)
        module.weight_global_scale.copy_(shared)
        if hasattr(module, "input_global_scale"):
            module.input_global_scale.fill_(448.0)
    tiles = {
        "tensor": lambda: w.reshape(1, -1),
        "channel": lambda: w,
        "group": lambda: w.unflatten(-1, (-1, args.group_size)),
        "tensor_group": lambda: w.unflatten(-1, (-1, args.group_size)),
        "block": lambda: w.unflatten(-1, (-1, 128)).unflatten(0, (-1, 128)).transpose(1, 2).flatten(2),
    }[args.strategy]()
    scale, _ = calculate_qparams(tiles.amin(-1), tiles.amax(-1), args, global_scale=shared)
    module.weight_scale.data.copy_(scale.view_as(module.weight_scale))


PRESETS = {
    "NVFP4A16": "nvfp4", "NVFP4": "nvfp4", "FP8_DYNAMIC": "fp8-channel", "FP8_BLOCK": "fp8-block",
    "INT8": "int8-channel", "W4A16": "int4-g128", "MXFP4A16": "mxfp4", "MXFP8A16": "mxfp8",
}  # fmt: skip


@pytest.mark.parametrize("preset", PRESETS)
def test_a_checkpoint_made_by_compressed_tensors_decodes_exactly(preset, tmp_path):
    model, linears, compressor = quantized_by_them(preset, tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    back = load_quantized(tmp_path)
    assert back.weights.keys() == linears.keys()
    assert {q.format for q in back.weights.values()} == {PRESETS[preset]}
    assert back.notes == ()
    if preset == "FP8_BLOCK":
        # Their decompressor guesses tiles by division, right only where the rows are a multiple of 128.
        assert all(module.out_features % 128 == 0 for module in linears.values())
    compressor.decompress_model(model)
    for name, q in back.weights.items():
        theirs, ours = linears[name].weight, q.dequantize(torch.bfloat16)
        assert torch.equal(ours, theirs) or (
            q.format == "nvfp4" and (ours != theirs).float().mean() < 0.01
        ), name
        assert same(stored[f"{name}.weight_scale"], q.scale)
    if preset == "NVFP4":
        assert all(scale == 1 / 448 for scale in back.input_scales.values())


def test_global_scales_that_are_not_shared_are_decoded_part_by_part_and_reported(tmp_path):
    model, linears, compressor = quantized_by_them("NVFP4A16", tmp_path, fuse=False)
    back = load_quantized(tmp_path)
    assert len(back.notes) == 4
    assert any(
        n.startswith("model.layers.0.self_attn: global scales are not shared (q_proj ") for n in back.notes
    )
    compressor.decompress_model(model)
    for name, q in back.weights.items():
        assert (q.dequantize(torch.bfloat16) != linears[name].weight).float().mean() < 0.01
    first = [back.weights[f"model.layers.0.self_attn.{leaf}_proj"].global_scale for leaf in "qkv"]
    assert len({float(scale) for scale in first}) == 3


def modelopt_checkpoint(folder, config, legacy=None):
    """Weights by ModelOpt's own rule under its names, q/k/v with global scales of their own."""
    w = {leaf: torch.randn(32, 64).bfloat16() for leaf in "qkv"}
    tensors = {"model.norm.weight": torch.ones(64)}
    for leaf, weight in w.items():
        q = get_format("nvfp4:modelopt").quantize(weight)
        name = f"model.layers.0.self_attn.{leaf}_proj"
        tensors |= {
            f"{name}.weight": q.qdata,
            f"{name}.weight_scale": q.scale,
            f"{name}.weight_scale_2": q.global_scale,
        }
        tensors[f"{name}.input_scale"] = torch.tensor(0.125)
    save_file(tensors, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps({"quantization_config": config} if config else {}))
    if legacy:
        (folder / "hf_quant_config.json").write_text(json.dumps(legacy))
    return w


@pytest.mark.parametrize("legacy", [False, True])
def test_modelopt_checkpoints_new_and_old(legacy, tmp_path):
    old = {
        "producer": {"name": "modelopt"},
        "quantization": {"quant_algo": "NVFP4", "exclude_modules": ["lm_head"]},
    }
    new = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head"]}
    w = modelopt_checkpoint(tmp_path, None if legacy else new, old if legacy else None)
    back = load_quantized(tmp_path)
    assert back.layout == "modelopt"
    assert len(back.notes) == 1
    assert back.others.keys() == {"model.norm.weight"}
    for leaf, weight in w.items():
        name = f"model.layers.0.self_attn.{leaf}_proj"
        assert torch.equal(
            back.weights[name].dequantize(), get_format("nvfp4:modelopt").quantize(weight).dequantize()
        )
        assert back.input_scales[name] == 0.125


@pytest.mark.parametrize("case", ["rand_bf16", "rand_fp32", "zero_blocks", "outlier_1e6_subnormal_scales"])
def test_modelopts_own_bytes_decode_to_modelopts_own_values(case, tmp_path):
    t = load_file("tests/oracle/nvfp4_modelopt.safetensors")
    name = "model.layers.0.mlp.down_proj"
    scale = t[f"{case}.scale"].view(torch.float8_e4m3fn)
    tensors = {
        f"{name}.weight": t[f"{case}.packed"],
        f"{name}.weight_scale": scale,
        f"{name}.weight_scale_2": t[f"{case}.global"].reshape(()),
    }
    save_file(tensors, tmp_path / "model.safetensors")
    config = {"quant_method": "modelopt", "quant_algo": "NVFP4"}
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": config}))
    assert torch.equal(load_quantized(tmp_path).weights[name].dequantize(), t[f"{case}.dequant"])


def test_names_that_disagree_with_the_configuration_are_reported(model_folder, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(model_folder, Recipe(rollout="fp8"), out)
    config = json.loads((out / "config.json").read_text())
    # The field's classic: an unescaped dot, so that a rule for the router takes gate_proj as well.
    config["quantization_config"]["ignore"] = ["lm_head", "re:.*mlp.gate.*"]
    (out / "config.json").write_text(json.dumps(config))
    notes = load_quantized(out).notes
    assert [note.partition(":")[0] for note in notes] == [f"model.layers.{i}.mlp.gate_proj" for i in (0, 1)]
    assert "the configuration ignores it" in notes[0]
    tensors = load_file(out / "model.safetensors")
    del tensors["model.layers.0.mlp.up_proj.weight_scale"]
    tensors["model.layers.0.mlp.up_proj.weight"] = torch.zeros(384, 256).bfloat16()
    save_file(tensors, out / "model.safetensors")
    assert any("up_proj: not quantized here, but not ignored" in note for note in load_quantized(out).notes)


def test_missing_shards_and_strangers_are_named(model_folder, tmp_path):
    out = tmp_path / "out"
    quantize_checkpoint(model_folder, Recipe(rollout="fp8"), out, shard_size=200_000)
    shard = sorted(out.glob("model-*"))[1]
    held = shard.read_bytes()
    shard.unlink()
    with pytest.raises(FileNotFoundError, match=f"{shard.name} is missing"):
        load_quantized(out)
    shard.write_bytes(held[: len(held) // 2])
    with pytest.raises(OSError, match="is damaged"):
        load_quantized(out)
    with pytest.raises(ValueError, match="is not quantized"):
        load_quantized(model_folder)
    with pytest.raises(FileNotFoundError, match=r"no config\.json"):
        load_quantized(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps({"quantization_config": {"quant_method": "gptq"}}))
    with pytest.raises(ValueError, match="quantization by gptq cannot be read"):
        load_quantized(tmp_path)
