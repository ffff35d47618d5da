"""A recipe as verl's overrides, and what is refused: without verl."""

from __future__ import annotations

import pytest
from pydantic import BaseModel

from lowbitrl.config import RunConfig, validate
from lowbitrl.integrations.verl.limits import ELSEWHERE, HONOURED, REFUSED, hydra
from lowbitrl.integrations.verl.overrides import overrides
from lowbitrl.integrations.verl.settings import (
    LearnerSettings,
    RolloutSettings,
    needs_rollout_logprobs,
    objective_of,
    reweights,
)
from lowbitrl.objectives import objective_names
from tests.tiny_run import checkpoint


@pytest.fixture
def told(tmp_path):
    """overrides(**sections) of a recipe on a tiny model, as a dictionary."""
    checkpoint(tmp_path / "model")

    def ask(**sections):
        data = {
            "out": str(tmp_path / "run"),
            "model": {"name": str(tmp_path / "model")},
            "task": {"path": "prompts.jsonl", "reward": "tests.tiny_run:reward"},
            "recipe": {"rollout": "nvfp4", "learner": "weights", "residual": 0.5},
        }
        for name, section in sections.items():
            data[name] = data.get(name, {}) | section
        return dict(line.split("=", 1) for line in overrides(validate(data), tmp_path / "plan.json"))

    return ask


def keys(model, prefix=""):
    """Every dotted key of a config."""
    for name, field in model.model_fields.items():
        kind = field.annotation
        if isinstance(kind, type) and issubclass(kind, BaseModel):
            yield from keys(kind, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}"


def moved(told, tmp_path):
    """A recipe in which every key that maps has a value of its own, and the one with defaults."""
    sections = {
        "rollout": {"prompts": 6, "samples": 3, "max_tokens": 9, "temperature": 0.5, "scheduler": "batch",
                    "max_batch": 7, "keep_decoded_experts": True},
        "objective": {"name": "gspo", "parameters": {"clip_low": 0.1}, "correction": "mis", "level": "geometric",
                      "cap": 3.0, "floor": 0.5, "count_rejected": True, "aggregate": "seq-mean-token-sum-norm",
                      "max_tokens": 9, "kl_coef": 0.1, "kl_kind": "k2", "entropy_coef": 0.01,
                      "advantage_scale": "none", "advantage_baseline": "leave-one-out"},
        "trainer": {"steps": 3, "mini_batch": 9, "epochs": 2, "micro_batch_tokens": 99, "layout": "packed",
                    "gradient_checkpointing": True},
        "optimizer": {"name": "muon", "learning_rate": 1e-3, "muon_learning_rate": 1e-2, "betas": (0.8, 0.9),
                      "eps": 1e-9, "weight_decay": 0.1, "momentum": 0.9, "masters": "compute", "warmup_steps": 2,
                      "max_grad_norm": 0.5},
        "evaluation": {"every": 5, "samples": 5}, "task": {"held_out": 8},
        "checkpoint": {"every": 7, "keep": 3},
        "distributed": {"cpu_offload": True},
        "sentinel": {"factor": 3.0, "slack": 0.2, "window": 8},
    }  # fmt: skip
    return told(), told(**sections), sections


def test_what_is_honoured_is_told(told, tmp_path):
    usual, other, sections = moved(told, tmp_path)
    known = set(keys(RunConfig))
    assert HONOURED - {k for k in HONOURED if k.startswith("recipe.")} <= known
    changed = {f"{section}.{key}" for section, values in sections.items() for key in values}
    assert changed - {"task.held_out"} <= HONOURED
    assert sum(usual[key] != other.get(key) for key in usual) >= 30


@pytest.mark.parametrize("key", sorted(REFUSED))
def test_refusals_are_of_settings_that_exist(key):
    assert key in {*keys(RunConfig), "recipe.activation_scale"}
    assert key not in HONOURED | ELSEWHERE.keys()


def test_the_plan_is_written_and_both_sides_read_it(told, tmp_path):
    lines = told()
    plan = (tmp_path / "plan.json").resolve()
    engine = lines["+actor_rollout_ref.actor.fsdp_config.lowbitrl"]
    rollout = lines["+actor_rollout_ref.rollout.engine_kwargs.lowbitrl"]
    assert f"plan_file:{plan}" in engine
    assert f"plan_file:{plan}" in rollout
    found = [text.partition("digest:")[2].partition(",")[0].strip("'}") for text in (engine, rollout)]
    assert found[0] == found[1]
    loaded = RolloutSettings(plan_file=str(plan), digest=found[0]).load()
    assert loaded.recipe.residual == 0.5
    with pytest.raises(ValueError, match="digest"):
        RolloutSettings(plan_file=str(plan), digest="0" * 16).load()


def test_a_setting_that_no_override_carries_is_refused(told, monkeypatch):
    monkeypatch.setattr("lowbitrl.integrations.verl.limits.HONOURED", HONOURED - {"rollout.max_batch"})
    told()
    with pytest.raises(ValueError, match=r"rollout\.max_batch=7 is not for verl .*leave it at 256"):
        told(rollout={"max_batch": 7})


def test_the_embedded_engine_gets_its_settings(told):
    rollout = told(rollout={"kernels": "low-bit", "max_batch": 3})[
        "+actor_rollout_ref.rollout.engine_kwargs.lowbitrl"
    ]
    assert "kernels:low-bit" in rollout
    assert "max_batch:3" in rollout


def test_vllm_wears_the_plan_through_our_plugin(told):
    lines = told(rollout={"engine": "vllm", "vllm": {"max_model_len": 512}})
    vllm = "+actor_rollout_ref.rollout.engine_kwargs.vllm"
    assert lines["actor_rollout_ref.rollout.name"] == "vllm"
    assert lines[f"{vllm}.quantization"] == "lowbitrl"
    assert lines[f"{vllm}.max_model_len"] == "512"
    assert "quant_method:lowbitrl" in lines[f"{vllm}.hf_overrides"]
    assert lines[f"{vllm}.worker_extension_cls"] == "lowbitrl.integrations.verl.vllm_worker.LowbitWorker"


def test_penalties_go_where_verl_has_them(told):
    loss = told(objective={"kl_coef": 0.1, "kl_kind": "k1"})
    assert loss["actor_rollout_ref.actor.kl_loss_type"] == "kl"
    reward = told(objective={"kl_coef": 0.1, "kl_in": "reward"})
    assert reward["algorithm.use_kl_in_reward"] == "true"
    assert "actor_rollout_ref.actor.use_kl_loss" not in reward
    assert told(trainer={"old_logprobs": "rollout"})["algorithm.rollout_correction.bypass_mode"] == "true"


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"rollout": {"resample": 1}, "objective": {"drop_uninformative": True}}, "filter_groups"),
        ({"objective": {"overlong_filter": True}}, "truncated responses"),
        ({"objective": {"overlong_buffer": 8}}, "overlong_buffer_cfg"),
        ({"trainer": {"mini_batch": 8}}, "use 16"),
        ({"objective": {"advantage_baseline": "leave-one-out"}}, "rloo"),
        ({"recipe": {"activation_scale": "static"}}, "use 'token'"),
        ({"rollout": {"record_routing": True}, "trainer": {"routing_replay": "R3"}}, "replays no routes"),
    ],
)
def test_what_verl_cannot_do_is_refused_by_name(told, sections, message):
    with pytest.raises(ValueError, match=message):
        told(**sections)


@pytest.mark.parametrize("name", ["rejection", "sequence-error"])
def test_corrections_that_change_the_denominator_are_refused(name):
    with pytest.raises(ValueError, match="rollout_rs"):
        objective_of("lowbitrl_grpo", {"correction": name})
    assert objective_of("lowbitrl_grpo", {"correction": name, "count_rejected": True}).correction == name


def test_which_objectives_compare_with_the_sampler():
    reading = {name for name in objective_names() if needs_rollout_logprobs(objective_of(name, {}))}
    assert reading == {"tbpo"}
    off = objective_of("tbpo", {"parameters": {"tis_cap": None}})
    assert not needs_rollout_logprobs(off)
    assert reweights(objective_of("grpo", {"correction": "mis"}))
    assert not reweights(objective_of("grpo", {"correction": "sequence-error", "count_rejected": True}))


def test_unknown_settings_are_named():
    with pytest.raises(ValueError, match="eps_high"):
        objective_of("tbpo", {"parameters": {"eps_hihg": 0.1}})
    with pytest.raises(ValueError, match="decompose"):
        LearnerSettings.model_validate({"plan_file": "p", "digest": "d", "decompose": 1})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "null"),
        (True, "true"),
        (1e-15, "1e-15"),
        ("fsdp2", "fsdp2"),
        ("/a/b-c.json", "/a/b-c.json"),
        ("12345678", "'12345678'"),
        ("a b", "'a b'"),
        ("it's", "'it\\'s'"),
        ("null", "'null'"),
        ({"a": [1, None], "b": {"c": "1e5"}}, "{a:[1,null],b:{c:'1e5'}}"),
    ],
)
def test_values_in_hydras_grammar(value, text):
    assert hydra(value) == text
