"""A run's checkpoint on disk for others: the bytes that the run served, and a model transformers loads."""

import json

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from lowbitrl import assemble
from lowbitrl.checkpoints import load_quantized
from lowbitrl.export import export_run
from lowbitrl.loop import train
from lowbitrl.models import load_model
from tests.tiny_run import config


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run of four steps with three checkpoints, and what it published by version."""
    folder, published, original = tmp_path_factory.mktemp("export"), {}, assemble.publish

    def record(model, version):
        published[version] = original(model, version)
        return published[version]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(assemble, "publish", record)
        path = train(
            config(folder, checkpoint={"every": 1, "keep": 3}, evaluation={"every": 1}), say=lambda line: None
        )
    return path, published


@pytest.mark.parametrize("step", ["2", "last"])
def test_quantized_bytes_are_those_published(run, tmp_path, step):
    path, published = run
    export_run(path, tmp_path / "out", step, "compressed-tensors")
    served = published[2 if step == "2" else 4].tensors
    read = load_quantized(tmp_path / "out")
    assert read.weights
    assert {n for n in served if n.endswith(".qdata")} == {f"{n}.qdata" for n in read.weights}
    for name, weight in read.weights.items():
        for part, tensor in weight.tensors().items():
            assert torch.equal(tensor.reshape(-1), served[f"{name}.{part}"].reshape(-1)), (name, part)
    assert not torch.equal(read.weights[name].qdata, published[0].tensors[f"{name}.qdata"])


def test_bf16_loads_in_transformers_with_the_masters_rounded(run, tmp_path):
    path, published = run
    export_run(path, tmp_path / "out")
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert model.dtype == torch.bfloat16
    assert AutoTokenizer.from_pretrained(tmp_path / "out").eos_token == "w2"
    assert (tmp_path / "out" / "generation_config.json").is_file()
    norm = "model.norm.weight"
    assert torch.equal(dict(model.named_parameters())[norm], published[4].tensors[norm])


def test_mistakes_name_the_remedy(run, tmp_path):
    path, _ = run
    with pytest.raises(ValueError, match="2, 3, 4; give one"):
        export_run(path, tmp_path / "out", "7")
    with pytest.raises(FileNotFoundError, match="no run folder"):
        export_run(tmp_path, tmp_path / "out")
    for folder in (path, path / "checkpoints" / "step-000004"):
        with pytest.raises(ValueError, match="lowbitrl export"):
            load_model(folder)


def test_best_is_the_highest_score_kept(run, tmp_path):
    path, _ = run
    assert any("step-00000" in note for note in export_run(path, tmp_path / "out", "best"))


@pytest.mark.parametrize(
    ("rollout", "layout", "part"),
    [
        ("nvfp4", "compressed-tensors", "input_global_scale"),
        ("nvfp4", "modelopt", "input_scale"),
        ("fp8", "compressed-tensors", "input_scale"),
    ],
)
def test_static_scales_of_the_run_are_written(tmp_path, rollout, layout, part):
    recipe = {"rollout": rollout, "residual": 0.0, "activation_scale": "static"}
    path = train(config(tmp_path, recipe=recipe, trainer={"steps": 2}), say=lambda line: None)
    export_run(path, tmp_path / "out", layout=layout)
    state = json.loads((path / "checkpoints" / "step-000002" / "state.json").read_text())
    read, on_disk = load_quantized(tmp_path / "out"), load_file(tmp_path / "out" / "model.safetensors")
    settings = json.loads((tmp_path / "out" / "config.json").read_text())["quantization_config"]
    assert settings["config_groups"]["group_0"]["input_activations"]["dynamic"] in (False, "local")
    largest = 448.0 * (6.0 if rollout == "nvfp4" else 1.0)
    assert len(state["input_amax"][0]) == 8
    for group, amax in state["input_amax"][0].items():
        assert f"{group}.{part}" in on_disk
        assert float(read.input_scales[group]) == pytest.approx(amax / largest, rel=1e-6)
    assert read.input_scales.keys() == read.weights.keys()
