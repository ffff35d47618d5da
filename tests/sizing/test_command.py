"""`lowbitrl plan --size`: its tables are those of docs/scale.md, and what it cannot size it refuses by name."""

import json
import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lowbitrl.cli import app
from lowbitrl.config import unnamed_run
from lowbitrl.sizing import SizeRequest, load_shape, size_lines
from tests.tiny_run import checkpoint

ROOT = Path(__file__).parents[2]
CONFIGS = ROOT / "docs" / "scale"
PAGE = (ROOT / "docs" / "scale.md").read_text()
# As the models' cards have them.
PARAMETERS = {
    "llama-3.2-1b": 1_235_814_400,
    "qwen3-8b": 8_190_735_360,
    "qwen3-30b-a3b": 30_532_122_624,
    "qwen3-235b-a22b": 235_093_634_560,
}


def run(*arguments):
    result = CliRunner().invoke(app, ["plan", *map(str, arguments)])
    return result.output, result.exception


def changed(folder, **fields):
    """A config of Llama's shape with other fields; None takes one away."""
    data = json.loads((CONFIGS / "llama-3.2-1b.json").read_text()) | fields
    path = folder / "config.json"
    path.write_text(json.dumps({k: v for k, v in data.items() if v is not None}))
    return path


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_shapes_have_their_models_parameters(name, count):
    model, _ = load_shape(str(CONFIGS / f"{name}.json"))
    assert sum(p.numel() for p in model.parameters()) == count


@pytest.mark.parametrize("command", re.findall(r"^lowbitrl plan --size (.*)$", PAGE, re.M))
def test_the_tables_of_the_page_are_what_the_commands_print(command):
    output, error = run(
        "--size", *(str(ROOT / w) if w.startswith(("docs/", "recipes/")) else w for w in command.split())
    )
    assert error is None, error
    lines = [line for line in output.splitlines() if line.startswith("|")]
    assert lines
    for line in lines:
        assert line in PAGE, f"lowbitrl plan --size {command}"


def test_every_shape_is_on_the_page():
    assert {path.name for path in CONFIGS.glob("*.json")} == set(re.findall(r"--size docs/scale/(\S+)", PAGE))


def test_a_recipe_is_taken_apart(tmp_path):
    folder = checkpoint(tmp_path / "model")
    output, error = run(
        folder, "--size", "--recipe", ROOT / "recipes" / "quads.toml", "--ranks", "2", "--prompt-tokens", "20"
    )
    assert error is None
    for part in (
        "masters",
        "optimizer states",
        "decoded beside them",
        "KV cache, 128 x 60 tokens",
        "sent a micro-batch",
    ):
        assert part in output
    every, _ = run(folder, "--size", "--prompt-tokens", "20", "--rollout.max_tokens", "40")
    assert "learner, one process" in every
    assert "fp8-block: " in every  # does not fit, said below the table


def test_settings_change_what_is_held(tmp_path):
    name = str(changed(tmp_path))

    def learner(*overrides, ranks=4):
        request = SizeRequest.of(ranks=ranks, config=unnamed_run(["--recipe.rollout=nvfp4", *overrides]))
        text = "\n".join(size_lines(name, request, every_precision=False))
        return float(re.search(r"learner on the GPU *\| *([\d.]+)", text)[1])

    plain = learner()
    assert learner(ranks=8) < plain < learner(ranks=2)
    assert learner("--trainer.gradient_checkpointing=true") < plain
    assert learner("--distributed.keep_bytes=false") < plain
    assert learner("--distributed.cpu_offload=true") < plain
    assert learner("--optimizer.name=muon") < plain
    assert learner("--optimizer.masters=compute") < plain
    assert learner("--objective.kl_coef=0.1") > plain
    assert learner("--objective.entropy_coef=0.1") > plain


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["--ranks", "0"], "ranks=0"),
        (["--ranks", "-3"], "ranks=-3"),
        (["--prompt-tokens", "0"], "prompt_tokens=0"),
        (["--prompt-tokens", "200000"], "pass the model's 131072 positions"),
        (["--rank", "2"], "did you mean --ranks"),
        (["--trainer.micro_batch_tokens", "0"], "micro_batch_tokens"),
        (["--recipe.rollout", "nvfp5"], "nvfp5"),
    ],
)
def test_impossible_requests_are_refused(tmp_path, arguments, text):
    _, error = run(changed(tmp_path), "--size", *arguments)
    assert text in str(error)


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"hidden_size": None, "num_hidden_layers": None}, "has no hidden_size, num_hidden_layers"),
        ({"num_hidden_layers": 0}, "num_hidden_layers=0: input should be greater than 0"),
        ({"hidden_size": "2048"}, "hidden_size='2048'"),
        ({"vocab_size": -1}, "vocab_size=-1"),
        ({"num_attention_heads": True}, "num_attention_heads=True"),
        ({"model_type": None}, "model_type"),
        ({"model_type": "llamma"}, "llamma"),
        ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide num_attention_heads=32"),
        (
            {"num_key_value_heads": None, "num_attention_heads": 3},
            "multiple of the number of attention heads",
        ),
        ({"model_type": "qwen3_moe", "num_experts": 8, "num_experts_per_tok": 9}, "num_experts_per_tok=9"),
        ({"model_type": "gemma2"}, "final_logit_softcapping"),
        ({"model_type": "qwen2_vl"}, "Unrecognized configuration class"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"layer_types": ["linear_attention"] * 16}, "'linear_attention'"),
    ],
)
def test_configs_that_say_too_little_are_refused(tmp_path, fields, text):
    file = changed(tmp_path, **fields)
    for name in (file, file.parent):
        _, error = run(name, "--size")
        assert isinstance(error, ValueError | OSError)
        assert text in str(error)
        assert len(str(error)) < 700


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("missing.json", "missing.json does not exist"),
        ("./nowhere", "no such folder"),
        ("a b", "no hub id"),
    ],
)
def test_names_of_nothing_are_refused(tmp_path, monkeypatch, name, text):
    monkeypatch.chdir(tmp_path)
    _, error = run(name, "--size")
    assert isinstance(error, ValueError | OSError)
    assert text in str(error)


@pytest.mark.parametrize(
    ("content", "text"), [("[1]", "holds a list"), ("{", "cannot be read"), ("{}", "model_type")]
)
def test_files_that_are_no_config_are_refused(tmp_path, content, text):
    (tmp_path / "x.json").write_text(content)
    _, error = run(tmp_path / "x.json", "--size")
    assert text in str(error)


def test_without_size_a_recipe_is_needed_and_ranks_mean_nothing(tmp_path):
    _, error = run(changed(tmp_path))
    assert "--size" in str(error)
    for option in ("--ranks", "--prompt-tokens"):
        _, error = run(changed(tmp_path), "--recipe", ROOT / "recipes" / "quads.toml", option, "2")
        assert "--size" in str(error)
