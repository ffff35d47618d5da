"""Several recipes, the same seeds and prompts, one report."""

import json

import pytest

from lowbitrl import compare
from lowbitrl.compare import parse_seeds, plan_jobs, run_compare
from lowbitrl.runs import read_metrics
from tests.tiny_run import checkpoint, prompts

quiet = lambda line: None  # noqa: E731


@pytest.fixture
def recipes(tmp_path):
    """Two recipe files that differ in their alignment."""
    checkpoint(tmp_path / "model")
    prompts(tmp_path / "prompts.jsonl")
    files = []
    for name, learner in (("quads", "weights"), ("naive", "bf16")):
        file = tmp_path / f"{name}.toml"
        file.write_text(
            f"""
[model]
name = "{tmp_path}/model"
device = "cpu"
[task]
path = "{tmp_path}/prompts.jsonl"
reward = "tests.tiny_rewards:even_words"
held_out = 4
[recipe]
rollout = "nvfp4"
learner = "{learner}"
[rollout]
prompts = 3
samples = 4
max_tokens = 5
[trainer]
steps = 2
[checkpoint]
every = 1
[sentinel]
slack = 5.0
"""
        )
        files.append(file)
    return files


def test_every_recipe_runs_with_every_seed_on_the_same_prompts(recipes, tmp_path):
    out = tmp_path / "out"
    page = run_compare(recipes, out, [0, 1], ["--evaluation.every", "1"], say=quiet)
    folders = sorted(p.name for p in out.iterdir() if (p / "config.json").is_file())
    assert folders == ["naive-seed0", "naive-seed1", "quads-seed0", "quads-seed1"]
    asked = {}
    for name in folders:
        rows = [
            json.loads(x) for x in (out / name / "rollouts" / "step-000000.jsonl").read_text().splitlines()
        ]
        asked[name] = [row["prompt"] for row in rows]
        assert json.loads((out / name / "config.json").read_text())["seed"] == int(name[-1])
    assert asked["naive-seed0"] == asked["quads-seed0"]
    assert "Recipes: mean over seeds" in page.read_text()
    written = json.loads((out / "summary.json").read_text())
    assert set(written["recipes"]) == {"naive", "quads"}
    with pytest.raises(FileExistsError, match="holds a run already; give --resume"):
        run_compare(recipes, out, [0, 1], say=quiet)


def test_an_interrupted_comparison_is_continued(recipes, tmp_path):
    out = tmp_path / "out"
    run_compare(recipes[:1], out, [0], ["--trainer.steps", "1"], say=quiet)
    run_compare(recipes, out, [0], resume=True, say=quiet)
    assert [len(read_metrics(out / name)) for name in ("quads", "naive")] == [3, 3]


def test_side_by_side_gives_the_same_numbers_and_names_a_run_that_fails(recipes, tmp_path):
    said = []
    run_compare(recipes, tmp_path / "apart", [0], jobs=2, say=said.append)
    run_compare(recipes, tmp_path / "here", [0], jobs=1, say=quiet)
    for name in ("quads", "naive"):
        apart, here = (
            [{k: v for k, v in r.items() if "timing" not in k} for r in read_metrics(tmp_path / where / name)]
            for where in ("apart", "here")
        )
        assert apart == here
    assert any(line.startswith("quads: step 2/2") for line in said)
    with pytest.raises(RuntimeError, match=r"quads ended with code 2:\n.*no\.such"):
        run_compare(recipes[:1], tmp_path / "bad", [0], ["--task.reward", "no.such:thing"], jobs=2, say=quiet)


def test_what_cannot_be_compared_is_refused_before_anything_runs(recipes, tmp_path):
    with pytest.raises(ValueError, match="recipes of different names"):
        plan_jobs([recipes[0], recipes[0]], tmp_path, [0], [])
    with pytest.raises(ValueError, match="at least one seed"):
        plan_jobs(recipes, tmp_path, [], [])
    recipes[1].write_text(recipes[1].read_text().replace("held_out = 4", "held_out = 5"))
    with pytest.raises(ValueError, match="have other task"):
        plan_jobs(recipes, tmp_path, [0], [])
    assert not (tmp_path / "out").exists()


def test_how_many_fit_on_a_gpu(recipes, tmp_path, monkeypatch):
    planned = plan_jobs(recipes, tmp_path, [0, 1], [])
    assert compare.jobs_that_fit(planned) == 1
    need = compare.bytes_needed(planned[0].config)
    assert need > compare.CONTEXT_BYTES
    monkeypatch.setattr(compare, "pick_device", lambda name: compare.torch.device("cuda"))
    for free, fitting in ((need // 2, 1), (int(2.5 * need), 2), (100 * need, 4)):
        monkeypatch.setattr(compare.torch.cuda, "mem_get_info", lambda device, free=free: (free, free))
        assert compare.jobs_that_fit(planned) == fitting


def test_seeds_are_a_list_or_a_range():
    assert parse_seeds("3") == [3]
    assert parse_seeds("0,2,5") == [0, 2, 5]
    assert parse_seeds("1-3") == [1, 2, 3]
    with pytest.raises(ValueError, match="write 0,1,2 or 0-2"):
        parse_seeds("a")
