"""Whole runs: what they leave behind, resuming to the bit, stopping in good order."""

import json
import os
import signal
import threading
import time
from itertools import pairwise

import pytest
import torch

from lowbitrl import collect, loop
from lowbitrl.assemble import evaluate_recipe
from lowbitrl.config import load_config
from lowbitrl.loop import train
from lowbitrl.objectives import registry
from lowbitrl.quant import PRECISIONS
from lowbitrl.runs import read_metrics
from lowbitrl.sync.sentinel import SentinelError
from lowbitrl.trainer import NonFiniteError
from tests.tiny_run import config

quiet = lambda line: None  # noqa: E731


def lasting(folder):
    """Metrics without wall-clock times."""
    return [{k: v for k, v in line.items() if not k.startswith("timing/")} for line in read_metrics(folder)]


def test_a_run_leaves_everything_needed_to_read_and_repeat_it(tmp_path):
    said = []
    folder = train(config(tmp_path), say=said.append)
    names = {p.name for p in folder.iterdir()}
    assert {
        "config.json",
        "plan.json",
        "environment.json",
        "metrics.jsonl",
        "rollouts",
        "checkpoints",
    } <= names
    assert json.loads((folder / "config.json").read_text())["recipe"]["residual"] == 0.5
    plan = json.loads((folder / "plan.json").read_text())
    assert any(plan["digest"] in line for line in said)
    assert sum(layer["weight"] == "nvfp4" for layer in plan["layers"]) == 14
    lines = read_metrics(folder)
    assert [line["step"] for line in lines] == [-1, 0, 1, 2, 3]
    assert [line["step"] for line in lines if "eval/pass@2" in line] == [-1, 1, 3]
    for line in lines[1:]:
        assert {
            "reward/mean",
            "mismatch/abs_mean",
            "rollout_corr/k3_kl",
            "actor/grad_norm",
            "quant/changed_codes",
            "sync/sentinel",
            "timing/gen",
            "rollout/repetition",
        } <= line.keys()
        assert line["sync/version"] == line["step"] + 1
    rows = [json.loads(text) for text in (folder / "rollouts" / "step-000000.jsonl").read_text().splitlines()]
    assert len(rows) == 3
    assert all(len(r["token_ids"]) == len(r["rollout_logprobs"]) and r["version"] == 0 for r in rows)
    assert [p.name for p in (folder / "checkpoints").iterdir()] == ["step-000004"]
    assert sum(line["quant/changed_codes"] for line in lines[1:]) > 0


def test_the_same_seed_gives_the_same_run_and_another_seed_another(tmp_path):
    one, same, other = (
        lasting(train(config(tmp_path, name, seed=seed), say=quiet))
        for name, seed in (("a", 1), ("b", 1), ("c", 2))
    )
    assert one == same
    assert one != other


@pytest.mark.parametrize(("optimizer", "objective"), [("adamw", "tbpo"), ("muon", "grpo")])
def test_resuming_continues_to_the_bit(tmp_path, optimizer, objective):
    sections = {
        "optimizer": {"name": optimizer, "warmup_steps": 3},
        "objective": {"name": objective},
        "trainer": {"steps": 4, "mini_batch": 8},
        "checkpoint": {"every": 1, "keep": 9},
    }
    whole = train(config(tmp_path, "whole", **sections), say=quiet)
    part = train(config(tmp_path, "part", **sections), say=quiet)
    for path in (part / "checkpoints").iterdir():
        if path.name > "step-000002":
            for file in path.iterdir():
                file.unlink()
            path.rmdir()
    said = []
    train(config(tmp_path, "part", **sections), resume=True, say=said.append)
    assert any("resumed from" in line and "step-000002" in line for line in said)
    assert lasting(part) == lasting(whole)


def test_ctrl_c_finishes_the_step_and_leaves_a_checkpoint_to_go_on_from(tmp_path, monkeypatch):
    whole = train(config(tmp_path, "whole"), say=quiet)
    step = loop._step

    def interrupting(config, parts, run, number):
        if number == 1:
            os.kill(os.getpid(), signal.SIGINT)
        return step(config, parts, run, number)

    monkeypatch.setattr(loop, "_step", interrupting)
    said = []
    part = train(config(tmp_path, "part"), say=said.append)
    assert any("interrupted after step 2; saved" in line for line in said)
    monkeypatch.setattr(loop, "_step", step)
    train(config(tmp_path, "part"), resume=True, say=quiet)
    assert lasting(part) == lasting(whole)


def test_a_second_ctrl_c_stops_at_once(tmp_path, monkeypatch):
    def impatient(*_):
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.01)
        raise AssertionError("went on")

    monkeypatch.setattr(loop, "_step", impatient)
    with pytest.raises(KeyboardInterrupt):
        train(config(tmp_path), say=quiet)


def test_nan_stops_with_step_batch_and_last_good_checkpoint_and_writes_nothing(tmp_path, monkeypatch):
    to_batch = collect.to_batch
    calls = []

    def poisoned(run_config, samples, kl):
        batch, metrics = to_batch(run_config, samples, kl)
        calls.append(1)
        if len(calls) == 3:
            batch.advantages[0] = torch.nan
        return batch, metrics

    monkeypatch.setattr(collect, "to_batch", poisoned)
    run = config(tmp_path, checkpoint={"every": 1})
    with pytest.raises(NonFiniteError, match="at step 2, in a batch of 16 responses") as caught:
        train(run, say=quiet)
    note = caught.value.__notes__[0]
    assert "step 3 stopped the run" in note
    assert "last good checkpoint: " in note
    assert "step-000002" in note
    assert [line["step"] for line in read_metrics(run.out)] == [-1, 0, 1]
    monkeypatch.setattr(collect, "to_batch", to_batch)
    train(run, resume=True, say=quiet)
    assert lasting(tmp_path / "run") == lasting(train(config(tmp_path, "clean"), say=quiet))


def test_a_faulty_update_is_caught_and_the_layer_named(tmp_path, monkeypatch):
    from lowbitrl.rollout.embedded import EmbeddedEngine

    update = EmbeddedEngine.update

    def stale_cache(self, stream, manifest):
        update(self, stream, manifest)
        if manifest.version == 2:
            self.model.model.layers[1].mlp.down_proj.weight.data *= 8

    monkeypatch.setattr(EmbeddedEngine, "update", stale_cache)
    run = config(tmp_path, recipe={"rollout": "nvfp4-w4a16", "residual": 0.0}, sentinel={"slack": 0.1})
    with pytest.raises(SentinelError, match=r"version 2.*model\.layers\.1\.mlp\.down_proj adds most"):
        train(run, say=quiet)


def test_damaged_checkpoints_are_named_and_the_one_before_is_used(tmp_path):
    run = config(tmp_path, checkpoint={"every": 1, "keep": 9})
    folder = train(run, say=quiet)
    file = folder / "checkpoints" / "step-000004" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[-100] ^= 1
    file.write_bytes(data)
    (folder / "checkpoints" / "step-000003" / ".metadata").write_bytes(b"short")
    before, said = lasting(folder), []
    train(run, resume=True, say=said.append)
    assert any("step-000004 is damaged (__0_0.distcp does not match its checksum)" in line for line in said)
    assert any("step-000003 is damaged (.metadata has 5 bytes" in line for line in said)
    assert lasting(folder) == before


def test_a_used_or_locked_or_unwritable_folder_is_refused_before_any_work(tmp_path, monkeypatch):
    run = config(tmp_path)
    train(run, say=quiet)
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    with pytest.raises(FileExistsError, match="already holds a run; continue it with --resume"):
        train(run, say=quiet)
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before
    (tmp_path / "file").write_text("x")
    with pytest.raises(OSError, match="cannot be written"):
        train(config(tmp_path, "file"), say=quiet)
    with pytest.raises(FileNotFoundError, match="holds no run to resume"):
        train(config(tmp_path, "fresh"), resume=True, say=quiet)


def test_two_writers_cannot_share_a_folder(tmp_path):
    from lowbitrl.runs import RunFolder

    with RunFolder(tmp_path / "r"), pytest.raises(FileExistsError, match="in use by another process"):
        RunFolder(tmp_path / "r")


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"recipe": {"residual": 1.0}}, r"recipe\.residual is 1\.0 now and was 0\.5"),
        ({"seed": 5}, r"seed is 5 now and was 0"),
        ({"optimizer": {"learning_rate": 0.5}}, r"optimizer\.learning_rate is 0\.5 now and was 0\.001"),
        (
            {"seed": 5, "recipe": {"residual": 1.0}, "trainer": {"mini_batch": 8}},
            r"residual is 1\.0 now and was 0\.5; seed is 5 now and was 0; trainer\.mini_batch is 8 now and was 0 when",
        ),
    ],
)
def test_going_on_with_other_settings_is_refused(tmp_path, sections, message):
    folder = train(config(tmp_path), say=quiet)
    before = lasting(folder)
    with pytest.raises(ValueError, match=message):
        train(config(tmp_path, **sections), resume=True, say=quiet)
    assert lasting(folder) == before


def test_a_run_folder_stands_for_its_settings(tmp_path):
    whole = train(config(tmp_path, "whole", trainer={"steps": 4}), say=quiet)
    folder = train(config(tmp_path, "part", trainer={"steps": 2}), say=quiet)
    moved = folder.rename(tmp_path / "moved")
    again = load_config(moved, ["--trainer.steps", "4"])
    assert again.out == str(moved)
    assert again.recipe.residual == 0.5
    train(again, resume=True, say=quiet)
    assert lasting(moved)[-1] == lasting(whole)[-1]
    with pytest.raises(ValueError, match=r"recipe\.residual is 1\.0 now and was 0\.5"):
        train(load_config(moved, ["--recipe.residual", "1.0"]), resume=True, say=quiet)


def test_updates_that_move_no_code_are_said_once(tmp_path):
    said = []
    options = {"trainer": {"steps": 7}, "evaluation": {"every": 0}}
    train(config(tmp_path, optimizer={"learning_rate": 1e-9}, **options), say=said.append)
    lines = [line for line in said if "changed_codes was 0 for 5 updates" in line]
    assert len(lines) == 1
    assert "raise optimizer.learning_rate" in lines[0]
    said.clear()
    plain = {"recipe": {"rollout": "bf16", "residual": 0.0}, "optimizer": {"learning_rate": 1e-9}}
    train(config(tmp_path, "plain", **plain, **options), say=said.append)
    assert not any("changed_codes" in line for line in said)


def test_a_recipe_that_depends_on_the_batch_says_so_once(tmp_path):
    said = []
    train(config(tmp_path, trainer={"steps": 1}), say=said.append)
    assert sum("not batch-invariant" in line and "residual_scope='token'" in line for line in said) == 1
    said.clear()
    train(config(tmp_path, "b", recipe={"residual": 0.0}, trainer={"steps": 1}), say=said.append)
    assert not any("batch-invariant" in line for line in said)


@pytest.mark.parametrize(("rollout", "learner"), [("nvfp4", "weights"), ("nvfp4", "full"), ("fp8", "bf16")])
def test_static_scales_are_refreshed_shipped_and_resumed_to_the_bit(tmp_path, rollout, learner):
    recipe = {"rollout": rollout, "learner": learner, "residual": 0.0, "activation_scale": "static"}
    sections = {"recipe": recipe, "objective": {"kl_coef": 0.01}, "checkpoint": {"every": 1, "keep": 9}}
    whole = train(config(tmp_path, "whole", **sections), say=quiet)
    part = train(config(tmp_path, "part", trainer={"steps": 2}, **sections), say=quiet)
    train(config(tmp_path, "part", **sections), resume=True, say=quiet)
    assert lasting(part) == lasting(whole)
    states = [json.loads((p / "state.json").read_text()) for p in sorted((whole / "checkpoints").iterdir())]
    learners, references = zip(*(state["input_amax"] for state in states), strict=True)
    assert all(before != after for before, after in pairwise(learners))
    assert all(before == after for before, after in pairwise(references))
    lines = read_metrics(whole)[1:]
    assert all(0 <= line["quant/saturated_sites"] <= 1 for line in lines)
    if learner == "full":
        assert all(line["mismatch/abs_mean"] == 0 for line in lines)
    run = config(tmp_path, **sections)
    at_end = evaluate_recipe(run, whole / "checkpoints" / "step-000004", say=quiet)
    assert at_end.metrics()["eval/avg@2"] == read_metrics(whole)[-1]["eval/avg@2"]
    start = evaluate_recipe(run, None, say=quiet)
    assert start.metrics().keys() <= read_metrics(whole)[0].keys()


def test_a_run_may_go_on_for_longer_and_look_more_often(tmp_path):
    train(config(tmp_path, "a", trainer={"steps": 2}, evaluation={"every": 0}), say=quiet)
    train(config(tmp_path, "a", evaluation={"every": 0}), resume=True, say=quiet)
    whole = train(config(tmp_path, "b", evaluation={"every": 0}), say=quiet)
    assert lasting(tmp_path / "a") == lasting(whole)


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"model": {"name": "/nowhere/model"}}, "/nowhere/model"),
        ({"task": {"path": "/nowhere/prompts.jsonl"}}, "/nowhere/prompts.jsonl"),
        ({"task": {"reward": "tests.tiny_rewards:no_such"}}, "no_such"),
        ({"task": {"max_prompt_tokens": 1}}, "max_prompt_tokens"),
        ({"model": {"device": "cuda:7"}}, "cuda"),
    ],
)
def test_bad_input_is_refused_before_the_run_folder_says_anything(tmp_path, sections, message):
    if "device" in sections.get("model", {}) and torch.cuda.is_available():
        pytest.skip("a CUDA device is here")
    run = config(tmp_path, **sections)
    with pytest.raises((ValueError, OSError, ImportError), match=message):
        train(run, say=quiet)
    assert not (tmp_path / "run" / "config.json").exists()
    train(config(tmp_path, trainer={"steps": 1}), say=quiet)


@pytest.mark.parametrize("rollout", sorted(set(PRECISIONS) - {"fp8-block"}))
@pytest.mark.parametrize("learner", ["weights", "full"])
def test_every_precision_trains(tmp_path, rollout, learner):
    recipe = {"rollout": rollout, "learner": learner, "residual": 0.0}
    folder = train(config(tmp_path, recipe=recipe, trainer={"steps": 2}), say=quiet)
    last = read_metrics(folder)[-1]
    assert last["actor/grad_norm"] > 0
    assert 0 <= last["mismatch/abs_mean"] < 1


def test_uninformative_groups_can_be_dropped(tmp_path):
    options = {"objective": {"drop_uninformative": True}, "task": {"reward": "tests.tiny_rewards:constant"}}
    folder = train(config(tmp_path, trainer={"steps": 2}, **options), say=quiet)
    last = read_metrics(folder)[-1]
    assert last["reward/zero_variance_groups"] == 1.0
    assert "actor/loss" not in last
    assert last["quant/changed_codes"] == 0.0


PENALIZED = {
    "kl_coef": 0.1,
    "entropy_coef": 0.01,
    "drop_uninformative": True,
    "overlong_buffer": 2,
}


@pytest.mark.parametrize("kl_in", ["loss", "reward"])
def test_every_penalty_and_dynamic_sampling_run_and_resume_to_the_bit(tmp_path, kl_in):
    sections = {
        # The tiny model seldom stops by itself: filtered, most batches of four steps are empty.
        "objective": PENALIZED | {"kl_in": kl_in, "overlong_filter": kl_in == "reward"},
        "rollout": {"resample": 2},
        "task": {"reward": "tests.tiny_rewards:sparse"},
        "checkpoint": {"every": 1, "keep": 9},
    }
    whole = train(config(tmp_path, "whole", **sections), say=quiet)
    lines = read_metrics(whole)[1:]
    assert any(line["rollout/rounds"] > 1 for line in lines)
    assert all("reward/overlong_penalty" in line for line in lines)
    key = "reward/kl" if kl_in == "reward" else "actor/kl_loss"
    values = [line[key] for line in lines if key in line]
    assert values[0] == 0
    assert values[-1] != 0
    part = train(config(tmp_path, "part", trainer={"steps": 2}, **sections), say=quiet)
    train(config(tmp_path, "part", **sections), resume=True, say=quiet)
    # The shorter run had an evaluation of its own at its end.
    assert lasting(part)[-2:] == lasting(whole)[-2:]


OWN = """
from lowbitrl.objectives import register_objective

@register_objective("{name}", aggregate="token-mean")
def squared(logprobs_BT, old_logprobs_BT, advantages_B1, mask_BT, *, scale: float = 1.0):
    ratio_BT = (logprobs_BT - old_logprobs_BT).exp()
    return -ratio_BT * advantages_B1 + scale * (ratio_BT - 1) ** 2
"""


def test_a_run_trains_an_objective_of_the_user_s_own_module(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(registry, "_OBJECTIVES", dict(registry._OBJECTIVES))
    (tmp_path / "own_objective.py").write_text(OWN.format(name="own-squared"))
    own = {"name": "own-squared", "module": "own_objective", "parameters": {"scale": 0.5}}
    run = config(tmp_path, objective=own, trainer={"steps": 2})
    folder = train(run, say=quiet)
    assert read_metrics(folder)[-1]["actor/grad_norm"] > 0
    train(config(tmp_path, objective=own), resume=True, say=quiet)
    assert [line["step"] for line in read_metrics(folder)] == [-1, 0, 1, 2, 3]
    with pytest.raises(ValueError, match="unknown objective 'own-square'; did you mean 'own-squared'"):
        config(tmp_path, objective=own | {"name": "own-square"})


def test_a_module_that_fails_is_named(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "broken_objective.py").write_text("raise SystemExit(3)")
    with pytest.raises(ValueError, match=r"importing 'broken_objective' failed with SystemExit: 3.*now "):
        config(tmp_path, objective={"name": "grpo", "module": "broken_objective"})


def test_evaluate_reads_a_checkpoint(tmp_path):
    run = config(tmp_path)
    folder = train(run, say=quiet)
    at_end = read_metrics(folder)[-1]
    result = evaluate_recipe(run, folder / "checkpoints" / "step-000004", say=quiet)
    assert result.metrics()["eval/avg@2"] == at_end["eval/avg@2"]
    start = evaluate_recipe(run, None, say=quiet)
    assert start.metrics()["eval/avg@2"] == read_metrics(folder)[0]["eval/avg@2"]


def test_train_runs_off_the_main_thread(tmp_path):
    outcome = []
    run = config(tmp_path, trainer={"steps": 1})
    thread = threading.Thread(target=lambda: outcome.append(train(run, say=quiet)))
    thread.start()
    thread.join()
    assert outcome == [tmp_path / "run"]
