"""Each planted fault is found and named; a healthy pair shows none."""

from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowbitrl.diagnose import faults
from lowbitrl.diagnose.mismatch import score
from lowbitrl.formats import QuantizedTensor
from lowbitrl.quant import PRECISIONS, Recipe, prepare
from lowbitrl.rollout.embedded import batch, sampler
from lowbitrl.sync.publisher import publish
from tests.diagnose.lab_helpers import bench, load, other_words
from tests.moe_models import tiny_moe

WEIGHTS_ONLY = Recipe(rollout="nvfp4-w4a16")
W4A4 = Recipe(rollout="nvfp4", learner="weights", residual=0.5)


def found(planted, drawn, **options):
    return faults.inspect(planted.learner, planted.reference, planted.engine, drawn, **options)


@pytest.mark.parametrize(
    "rollout", [r for r in PRECISIONS if r != "fp8-block"]
)  # 128 does not divide width 64
def test_a_healthy_pair_shows_nothing(rollout):
    healthy = bench(Recipe(rollout=rollout))
    assert found(healthy, healthy.sample()) == []


@pytest.mark.parametrize(
    "recipe", [WEIGHTS_ONLY, W4A4, Recipe(rollout="nvfp4", learner="full", residual=0.5)]
)
def test_a_healthy_pair_shows_nothing_at_another_temperature(recipe):
    healthy = bench(recipe, temperature=0.7)
    assert found(healthy, healthy.sample()) == []


@pytest.mark.parametrize("recipe", [WEIGHTS_ONLY, W4A4])
def test_a_wrong_scale_on_one_layer(recipe):
    planted = bench(recipe)
    layer = planted.engine.model.model.layers[1].mlp.up_proj
    q = layer.encoded
    layer.adopt(QuantizedTensor(q.qdata, q.scale, q.global_scale * 2, q.shape, q.format))
    faulty = found(planted, planted.sample())
    assert faulty[0].fault == "wrong bytes"
    assert faulty[0].where == "model.layers.1.mlp.up_proj.global_scale"
    assert [f.where for f in faulty if f.fault == "other arithmetic"] == ["model.layers.1.mlp.up_proj"]


def test_a_stale_decoded_weight_though_its_bytes_are_right():
    planted = bench(W4A4)
    planted.engine.model.model.layers[0].self_attn.o_proj.weight.data *= 1.5
    faulty = found(planted, planted.sample())
    assert [(f.fault, f.where) for f in faulty] == [("other arithmetic", "model.layers.0.self_attn.o_proj")]


def test_an_unquantized_linear():
    planted = bench(W4A4)
    layer = planted.engine.model.model.layers[0].mlp.down_proj
    layer.__class__ = nn.Linear
    faulty = found(planted, planted.sample())
    assert (faulty[0].fault, faulty[0].where) == ("unquantized", "model.layers.0.mlp.down_proj")


def test_one_unquantized_expert():
    def loading(attention, dtype):
        model = tiny_moe("qwen3_moe", dtype or torch.bfloat16, max_position_embeddings=128)
        model.set_attn_implementation(attention)
        return model

    planted = bench(W4A4, loading=loading)
    assert found(planted, planted.sample()) == []
    planted.engine.model = loading("sdpa", None)
    exact = planted.engine.model.model.layers[1].mlp.experts.down_proj.data.clone()
    prepare(planted.engine.model, planted.recipe, "rollout", keep_decoded_experts=True)
    experts = planted.engine.model.model.layers[1].mlp.experts
    experts.lowbitrl_experts.w2.weights._decoded[2] = exact[2]
    faulty = found(planted, planted.sample())
    assert [(f.fault, f.where) for f in faulty] == [("other arithmetic", "model.layers.1.mlp.experts")]
    assert "experts [2] of 4" in faulty[0].evidence


def test_a_stale_version_by_its_number_its_bytes_and_its_words():
    planted = bench(WEIGHTS_ONLY)
    drawn = planted.sample()
    earlier = planted.reference
    with torch.no_grad():
        for parameter in planted.learner.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    faulty = found(planted, drawn)
    assert faulty[0].fault == "stale version"
    assert "tensors have other bytes" in faulty[0].evidence
    published = publish(planted.learner, 1)
    planted.engine.update(published.stream(), published.manifest)
    current = load("sdpa", None)
    current.load_state_dict(planted.learner.state_dict())
    prepare(current, planted.recipe, "rollout")
    planted.reference = current
    by_number = found(planted, drawn)
    assert (by_number[0].fault, "versions [0], not 1" in by_number[0].evidence) == ("stale version", True)
    relabelled = replace(drawn, completions=[replace(c, version=1) for c in drawn.completions])
    assert found(planted, relabelled) == []
    by_words = found(planted, relabelled, earlier=earlier)
    assert [f.where for f in by_words] == ["engine log-probabilities are those of earlier weights"]
    assert found(planted, planted.sample(), earlier=earlier) == []


@pytest.mark.parametrize("shift", [-1, 1])
@pytest.mark.parametrize("recipe", [WEIGHTS_ONLY, W4A4])
def test_a_shifted_position_id(monkeypatch, recipe, shift):
    planted = bench(recipe)
    honest = batch._forward

    def shifted(model, ids, mask, *rest, **options):
        def hook(module, args, kwargs):
            return args, kwargs | {"position_ids": kwargs["position_ids"] + shift * (ids.shape[1] == 1)}

        handle = model.register_forward_pre_hook(hook, with_kwargs=True)
        try:
            return honest(model, ids, mask, *rest, **options)
        finally:
            handle.remove()

    monkeypatch.setattr(batch, "_forward", shifted)
    faulty = found(planted, planted.sample())
    assert [(f.fault, f.where) for f in faulty] == [
        ("positions", f"engine response positions are shifted by {shift:+d}")
    ]


@pytest.mark.parametrize("recipe", [WEIGHTS_ONLY, W4A4])
def test_temperature_on_the_learners_side_only(recipe):
    planted = bench(recipe, temperature=0.6)
    drawn = planted.sample()
    raw = score(planted.reference, drawn.prompts, drawn.completions, temperature=1.0)
    faulty = found(planted, other_words(drawn, raw))
    assert [(f.fault, f.where) for f in faulty] == [
        ("temperature", "engine reports temperature 1 instead of 0.6")
    ]


def test_temperature_on_the_engines_side_only():
    planted = bench(W4A4, temperature=0.6)
    drawn = planted.sample()
    right, raw = (score(planted.learner, drawn.prompts, drawn.completions, temperature=t) for t in (0.6, 1.0))
    assert found(planted, drawn, learner_words=right) == []
    faulty = found(planted, drawn, learner_words=raw)
    assert [(f.fault, f.where) for f in faulty] == [
        ("temperature", "learner reports temperature 1 instead of 0.6")
    ]


def test_temperature_applied_twice_by_the_engine(monkeypatch):
    planted = bench(WEIGHTS_ONLY, temperature=0.6)
    honest = sampler.sample
    monkeypatch.setattr(batch, "sample", lambda logits, t, uniform: honest(logits, t * t, uniform))
    assert [f.where for f in found(planted, planted.sample())] == [
        "engine reports temperature 0.36 instead of 0.6"
    ]


@pytest.mark.parametrize("recipe", [WEIGHTS_ONLY, Recipe()])
def test_an_fp32_head_on_one_side_only_by_module_and_by_words(recipe):
    planted = bench(recipe)
    head = planted.engine.model.lm_head
    head.forward = lambda x: F.linear(x.float(), head.weight.float())
    faulty = found(planted, planted.sample())
    assert (faulty[0].fault, faulty[0].where) == ("other arithmetic", "lm_head")
    assert faulty[0].evidence == "computes in float32, the learner in bfloat16"
    assert ("fp32 head", "engine output head runs in fp32") in [(f.fault, f.where) for f in faulty]


def test_an_fp32_head_and_a_shifted_position_on_the_learners_side_only():
    planted = bench(WEIGHTS_ONLY)
    drawn = planted.sample()
    with faults.fp32_head(planted.learner.lm_head):
        in_fp32 = score(planted.learner, drawn.prompts, drawn.completions)
    faulty = found(planted, drawn, learner_words=in_fp32)
    assert [(f.fault, f.where) for f in faulty] == [("fp32 head", "learner output head runs in fp32")]
    shifted = faults._read(planted.learner, drawn, 1.0, shift=1)
    faulty = found(planted, drawn, learner_words=shifted)
    assert [f.where for f in faulty] == ["learner response positions are shifted by +1"]


def test_log_probabilities_of_the_token_before():
    planted = bench(W4A4)
    drawn = planted.sample()
    late = [torch.cat([w.new_full((1,), -3.0), w[:-1]]) for w in drawn.words]
    faulty = found(planted, other_words(drawn, late))
    assert [f.fault for f in faulty] == ["neighbouring token"]


def test_another_plan_is_said_before_anything_is_compared():
    planted, other = bench(W4A4), bench(replace(W4A4, residual=0.25))
    faulty = faults.inspect(planted.learner, planted.reference, other.engine, other.sample())
    assert [f.fault for f in faulty] == ["other plan"]
    assert "residual 0.5" in faulty[0].where
    assert "residual 0.25" in faulty[0].where
