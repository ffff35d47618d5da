"""`lowbitrl diagnose` and `lowbitrl compare` as a person types them."""

import json
import sys

import pytest
import torch

from lowbitrl import cli
from lowbitrl.diagnose import table
from lowbitrl.diagnose.command import Request, loader, prompt_ids, run_diagnose
from lowbitrl.diagnose.lab import Lab
from lowbitrl.diagnose.run import DiagnoseConfig, both_sides, draw
from lowbitrl.quant import Recipe
from tests.tiny_run import checkpoint, prompts


def run(*arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowbitrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0, capsys.readouterr().out


@pytest.fixture
def go(monkeypatch, capsys):
    return lambda *a: run(*a, monkeypatch=monkeypatch, capsys=capsys)


@pytest.fixture
def folder(tmp_path):
    checkpoint(tmp_path / "model")
    prompts(tmp_path / "prompts.jsonl", 60)
    return tmp_path


SMALL = ("--tokens", 700, "--max-tokens", 24, "--device", "cpu")


def test_diagnose_writes_numbers_recipe_and_report_and_report_redraws_it(go, folder):
    out = folder / "out"
    code, said = go("diagnose", folder / "model", "--prompts", folder / "prompts.jsonl", "--out", out, *SMALL)
    assert code == 0, said
    assert "no fault found" in said
    assert "Use nvfp4, " in said
    found = json.loads((out / "diagnosis.json").read_text())
    assert found["setup"]["environment"]["versions"]["torch"]
    assert found["setup"]["prompts"].endswith("prompts.jsonl")
    assert found["sampled"]["tokens"] >= 700
    (out / "report.html").unlink()
    assert go("report", out)[0] == 0
    assert (out / "report.html").stat().st_size > 100_000
    (folder / "run.toml").write_text(
        f"""
[model]
name = "{folder}/model"
[task]
path = "{folder}/prompts.jsonl"
reward = "tests.tiny_rewards:even_words"
held_out = 4
"""
        + (out / "recommended.toml").read_text()
    )
    assert go("plan", folder / "model", "--recipe", folder / "run.toml")[0] == 0


@pytest.mark.parametrize("rollout", ["fp8", "nvfp4"])
def test_a_recipe_with_static_scales_is_measured_under_scales_found_on_its_prompts(go, folder, rollout):
    task = (
        f'[task]\npath = "{folder}/prompts.jsonl"\nreward = "tests.tiny_rewards:even_words"\nheld_out = 4\n'
    )
    recipe = f'[recipe]\nrollout = "{rollout}"\nlearner = "full"\nactivation_scale = "static"\n'
    (folder / "static.toml").write_text(task + recipe)
    arguments = ("--recipes", folder / "static.toml", "--out", folder / "out")
    code, said = go("diagnose", folder / "model", *arguments, *SMALL)
    assert code == 0, said
    assert "no fault found" in said
    found = json.loads((folder / "out" / "diagnosis.json").read_text())
    assert found["recipe"]["activation_scale"] == "static"
    named = {row["name"]: row for row in found["candidates"]}
    assert named[f"{rollout}, full"]["mean"][0] < named[f"{rollout}, bf16"]["mean"][0]


def test_recipes_are_candidates_and_bring_their_prompts(go, folder):
    task = (
        f'[task]\npath = "{folder}/prompts.jsonl"\nreward = "tests.tiny_rewards:even_words"\nheld_out = 4\n'
    )
    (folder / "a.toml").write_text(task + '[recipe]\nrollout = "fp8"\nlearner = "bf16"\n')
    (folder / "b.toml").write_text(task + '[recipe]\nrollout = "int8"\nlearner = "full"\n')
    recipes = ("--recipes", folder / "a.toml", folder / "b.toml")
    code, said = go("diagnose", folder / "model", *recipes, "--out", folder / "out", *SMALL)
    assert code == 0, said
    found = json.loads((folder / "out" / "diagnosis.json").read_text())
    names = [row["name"] for row in found["candidates"]]
    assert names == ["fp8, bf16", "fp8, weights", "fp8, full", "int8, full"]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--engine", "sglang"), "engine='sglang' is not available to diagnose in this version"),
        (("--recipes", "a.toml", "b.json"), "cannot read 'b.json'; write diagnose MODEL --recipes"),
        (("extra.toml",), "cannot read 'extra.toml'"),
        (("--tokns", "3"), "cannot read '--tokns 3'"),
        (("--prompts", "x.txt", "--task", "chain_sum"), "give one"),
        (("--prompts", "nowhere.jsonl"), "nowhere.jsonl"),
        (("--rollout", "nvfp5"), "rollout='nvfp5' is unknown"),
        (("--residual", "2"), "residual=2.0 is not a fraction"),
    ],
)
def test_mistakes_end_in_one_message(go, folder, arguments, message):
    code, said = go("diagnose", folder / "model", "--out", folder / "out", *SMALL, *arguments)
    assert code == 2
    assert message in said
    assert not (folder / "out").exists()


def test_a_mixture_of_experts_upcycled_with_a_recipe_of_the_users(go, folder):
    moe = folder / "moe"
    code, said = go("upcycle", folder / "model", "--experts", 4, "--top-k", 2, "--noise", 0.5, "--out", moe)
    assert code == 0, said
    (folder / "mine.toml").write_text(
        f'[task]\npath = "{folder}/prompts.jsonl"\nreward = "tests.tiny_rewards:even_words"\nheld_out = 4\n'
        '[recipe]\nrollout = "nvfp4"\nresidual = 0.5\nresidual_sites = { w2 = 0.25 }\n'
    )
    out = folder / "out"
    code, said = go("diagnose", moe, "--recipes", folder / "mine.toml", "--out", out, *SMALL)
    assert code == 0, said
    assert "no fault found" in said
    found = json.loads((out / "diagnosis.json").read_text())
    assert list(found["mismatch"]["own"]["terms"]) == [
        "routing",
        "activations",
        "residual",
        "engine",
        "total",
    ]
    assert list(found["mismatch"]["naive"]["terms"])[:2] == ["routing", "weights"]
    assert found["mismatch"]["own"]["terms"]["routing"]["mean_abs"][0] > 0
    names = [row["name"] for row in found["candidates"]]
    assert "nvfp4, weights, residual 0.5 per batch, w2 0.25" in names
    assert "nvfp4, weights, residual 1 at every site" in names
    shown = (out / "report.html").read_text()
    assert "routing" in shown
    assert "weights, at every site" in shown
    layers = [f"routing/agreement_layer_{i}" for i in range(2)]
    assert set(found["routing"]) == {"routing/agreement", *layers}
    assert all(0 < share <= 1 for share in found["routing"].values())
    assert layers[1] in shown
    assert found["layers"][-1]["block"].endswith(".mlp")


def test_a_text_file_is_a_prompt_a_line_gone_through_again_until_there_are_tokens(go, folder):
    (folder / "p.txt").write_text("w3 w4\n\nw5\n")
    small = ("--prompts", folder / "p.txt", "--tokens", 300, "--max-tokens", 4, "--device", "cpu")
    code, said = go("diagnose", folder / "model", "--out", folder / "out", *small, "--rollout", "int4")
    assert code == 0, said
    assert json.loads((folder / "out" / "diagnosis.json").read_text())["sampled"]["tokens"] >= 300
    (folder / "p.txt").write_text("\n")
    code, said = go("diagnose", folder / "model", "--out", folder / "out", *small)
    assert (code, "holds no prompts" in said) == (2, True)


@pytest.mark.slow
@pytest.mark.demo
def test_the_recommendation_on_smollm2_wins_on_the_same_tokens_scored_anew(tmp_path):
    request = Request(model="demo", out=tmp_path, recipe=Recipe(rollout="nvfp4"))
    config = DiagnoseConfig(tokens=300, max_tokens=48, amplify_tokens=0, layer_tokens=0, keep_tokens=0)
    run_diagnose(request, config, torch.device("cpu"), lambda line: None)
    found = json.loads((tmp_path / "diagnosis.json").read_text())
    chosen = Recipe(**found["recommendation"]["recipe"])
    load, tokenizer = loader(request, torch.device("cpu"))
    ids = prompt_ids(request, [], tokenizer)
    # The same tokens again, from the same seed and engine, then scored by new models.
    _, engine = both_sides(load, request.recipe, config, ids)
    lab = Lab(load, draw(engine, ids, config))
    assert lab.drawn.tokens == found["sampled"]["tokens"]
    others = [r for r in table.variants(request.recipe) if r != chosen]
    best, *rest = table.measure_all(lab, [chosen, *others])
    for other in rest:
        # No other is closer beyond chance, and none as close is cheaper.
        gain = table.paired_gain(best.diffs, other.diffs)
        assert gain.low <= 0, other.name
        if gain.high >= 0:
            assert other.work >= best.work or gain.value < 0, other.name
    naive = next(c for c in rest if c.recipe.learner == "bf16" and not c.recipe.residual)
    assert best.mean.value < 0.25 * naive.mean.value


def test_the_engine_samples_by_the_products_that_the_recipe_asks_for(go, folder):
    (folder / "a.toml").write_text(
        f'[task]\npath = "{folder}/prompts.jsonl"\nreward = "tests.tiny_rewards:even_words"\nheld_out = 4\n'
        '[recipe]\nrollout = "nvfp4"\n[rollout]\nkernels = "low-bit"\n'
    )
    code, said = go(
        "diagnose", folder / "model", "--recipes", folder / "a.toml", "--out", folder / "out", *SMALL
    )
    assert code
    assert "kernels='low-bit' can't run here: the kernels run on CUDA" in " ".join(said.split())
