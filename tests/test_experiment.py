"""Experiments: variants and seeds, metrics kept, intervals that claim no more than the seeds allow."""

import json

import pytest

from lowbitrl.config import ConfigError
from lowbitrl.experiment import (
    append_csv,
    load_experiment,
    overrides,
    plan_runs,
    read_csv,
    run_experiment,
    score,
    table,
    write_statistics,
)
from tests import tiny_run

VARIANTS = """
base = "base.toml"
seeds = [0, 1]
reference = "bf16"
[common]
trainer.steps = 2
evaluation.every = 1
[variants.bf16]
recipe = { rollout = "bf16", residual = 0.0 }
[variants.quads]
"""


def written(folder, text=VARIANTS):
    config = tiny_run.config(folder)
    sections = config.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    lines = [f"{word[2:]} = {value}" for word, value in zip(*[iter(overrides(sections))] * 2, strict=True)]
    (folder / "base.toml").write_text("\n".join(lines))
    file = folder / "experiment.toml"
    file.write_text(text)
    return file


def test_runs_are_made_once_and_statistics_come_from_the_metrics_alone(tmp_path, monkeypatch):
    file, out = written(tmp_path), tmp_path / "out"
    said = []
    run_experiment(file, out, only=["quads"], say=said.append)
    assert [line for line in said if "runs," in line] == ["2 runs, 1 at a time"]
    assert list(read_csv(out / "metrics.csv")) == ["quads-seed0", "quads-seed1"]
    said.clear()
    found = json.loads(run_experiment(file, out, say=said.append).read_text())["variants"]
    assert [line for line in said if "runs," in line] == ["2 runs, 1 at a time"]
    assert found["quads"]["mismatch, start"]["difference"]["mean"] == pytest.approx(
        found["quads"]["mismatch, start"]["mean"] - found["bf16"]["mismatch, start"]["mean"], rel=1e-3
    )
    monkeypatch.setattr("lowbitrl.experiment.train", None)
    before = (out / "statistics.json").read_text()
    run_experiment(file, out, redraw=True)
    assert (out / "statistics.json").read_text() == before
    assert (out / "training.png").exists()
    assert (out / "scores.png").exists()


def test_a_difference_is_claimed_only_where_its_paired_interval_excludes_zero(tmp_path):
    file = written(tmp_path, VARIANTS.replace("[0, 1]", "[0, 1, 2]"))
    experiment = load_experiment(file)

    def runs(values):
        return [{"step": 0, "reward/mean": v} for v in values]

    def of(quads):
        made = {f"bf16-seed{i}": runs([v]) for i, v in enumerate((0.1, 0.5, 0.9))}
        made |= {f"quads-seed{i}": runs([v]) for i, v in enumerate(quads)}
        return json.loads(write_statistics(experiment, made, tmp_path).read_text())["variants"]["quads"]

    paired = of((0.21, 0.6, 1.01))["reward, end"]["difference"]
    assert paired["differs"]
    assert paired["mean"] == pytest.approx(0.32 / 3)
    assert not of((0.9, 0.5, 0.3))["reward, end"]["difference"]["differs"]
    # Two seeds, differences 0.1 and 0.2: t = 12.706 with one degree of freedom, 0.15 +- 0.635.
    two = of((0.2, 0.7))["reward, end"]["difference"]
    assert (two["half"], two["differs"]) == (pytest.approx(0.6353, rel=1e-3), False)


def test_scores_are_means_over_the_last_evaluations_and_steps():
    records = [{"step": -1, "eval/pass@1": 0.0}]
    records += [
        {"step": s, "reward/mean": float(s), "mismatch/abs_mean": 1.0 / (s + 1)}
        | ({"eval/pass@1": s / 10} if s % 2 else {})
        for s in range(20)
    ]
    found = score(records)
    assert found["held-out, end"] == pytest.approx((1.5 + 1.7 + 1.9) / 3)
    assert found["held-out, best"] == 1.9
    assert found["held-out, whole run"] == pytest.approx(sum((s / 10 for s in range(1, 20, 2)), 0.0) / 11)
    assert found["reward, end"] == 14.5
    assert found["mismatch, end"] < found["mismatch, start"]
    assert score([{"step": -1}]) == {}


def test_the_table_marks_what_differs():
    entry = {"mean": 0.5, "half": 0.1, "n": 3}
    text = table({"a": {"x": entry}, "b": {"x": entry | {"difference": {"differs": True}}}}, "a")
    assert "| a | 3 | 0.500 ± 0.100 |" in text
    assert "| b | 3 | **0.500 ± 0.100** |" in text


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (('reference = "bf16"', 'reference = "bf17"'), "is no variant"),
        (("seeds = [0, 1]", "seed = [0]"), "seeds"),
        (("trainer.steps = 2", "trainer.stepz = 2"), "did you mean 'steps'"),
        (("[variants.quads]", "[variants.quads]\nrollout.prompts = 8"), "same prompts"),
    ],
)
def test_mistakes_are_named_before_anything_runs(tmp_path, change, message):
    file = written(tmp_path, VARIANTS.replace(*change))
    with pytest.raises(ValueError, match=message):
        plan_runs(file, load_experiment(file), tmp_path / "runs")


def test_an_unknown_variant_and_a_missing_file_are_named(tmp_path):
    with pytest.raises(ConfigError, match="no variant"):
        run_experiment(written(tmp_path), tmp_path / "out", only=["naive"])
    with pytest.raises(ConfigError, match="does not exist"):
        load_experiment(tmp_path / "none.toml")


def test_metrics_of_an_earlier_version_are_kept_under_todays_columns(tmp_path):
    file = tmp_path / "metrics.csv"
    file.write_text("run,step,reward/mean,timing/gen\nold-seed0,0,0.5,2\nold-seed0,1,0.25,\n")
    append_csv(file, "new-seed0", [{"step": 0, "reward/mean": 1.0, "actor/outside_band_negative": 0.125}])
    assert read_csv(file) == {
        "old-seed0": [{"step": 0, "reward/mean": 0.5, "timing/gen": 2.0}, {"step": 1, "reward/mean": 0.25}],
        "new-seed0": [{"step": 0, "reward/mean": 1.0, "actor/outside_band_negative": 0.125}],
    }
