"""Static activation scales: seen by the learner, refreshed and shipped by a publish, used on both sides."""

import pytest
import torch

from lowbitrl.formats import get_format
from lowbitrl.quant import (
    Recipe,
    attachment,
    calibrate,
    observing,
    prepare,
    real_tokens,
    resolve,
    restore_scales,
    static_scales,
)
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.manifest import Manifest
from lowbitrl.sync.publisher import publish
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe

IDS = torch.arange(3, 27).reshape(2, 12)
SITES = [
    f"model.layers.{i}.{leaf}"
    for i in (0, 1)
    for leaf in ("self_attn.q_proj", "self_attn.o_proj", "mlp.gate_proj", "mlp.down_proj")
]


def recipe(learner="weights", rollout="nvfp4", **options):
    return Recipe(rollout=rollout, learner=learner, activation_scale="static", **options)


def side(recipe, which, model=None):
    model = model or tiny_llama()
    prepare(model, recipe, which)
    return model


def inputs_of(model, name, ids=IDS, mask=None):
    """What a module of `model` is given."""
    seen = []
    module = model.get_submodule(name)
    handle = module.register_forward_pre_hook(lambda m, args: seen.append(args[0].detach().clone()))
    with torch.no_grad():
        model(input_ids=ids, attention_mask=mask)
    handle.remove()
    return seen[0]


@pytest.mark.parametrize("rollout", ["bf16", "int8", "mxfp4", "mxfp8", "fp8-block", "int4", "nvfp4-w4a16"])
def test_activations_without_a_tensor_scale_refuse_a_static_one(rollout):
    with pytest.raises(ValueError, match=r"activation_scale='static' needs.*set activation_scale='token'"):
        recipe(rollout=rollout)


def test_a_batch_wide_dynamic_scale_is_refused_with_its_reason():
    with pytest.raises(ValueError, match=r"a batch-mate changes a row's codes.*use 'token' or 'static'"):
        Recipe(rollout="nvfp4", activation_scale="batch")
    with pytest.raises(ValueError, match="activation_scale='fixed' is unknown; choose one of token, static"):
        Recipe(rollout="nvfp4", activation_scale="fixed")


def test_the_plan_shows_static_scales_and_has_another_digest():
    dynamic, static = (resolve(r, tiny_llama()) for r in (Recipe(rollout="nvfp4"), recipe()))
    assert dynamic.digest != static.digest
    row = next(
        line for line in static.table().splitlines() if line.startswith("model.layers.0.mlp.down_proj")
    )
    assert "nvfp4-tensor" in row
    assert row.endswith("static scale")
    assert "static activation scales" in static.summary()
    assert "static" not in dynamic.table()


def test_a_plan_says_why_it_is_not_batch_invariant():
    batch = resolve(Recipe(rollout="nvfp4", residual=0.5), tiny_llama())
    assert len(batch.batch_dependence) == 1
    assert "not batch-invariant: residual channels are chosen over the whole batch" in batch.table()
    for invariant in (
        Recipe(rollout="nvfp4", residual=0.5, residual_scope="token"),
        Recipe(rollout="nvfp4"),
        Recipe(rollout="fp8-block"),
        Recipe(rollout="int8"),
        Recipe(rollout="mxfp8"),
        recipe(),
        Recipe(),
    ):
        try:
            plan = resolve(invariant, tiny_llama(hidden_size=128, intermediate_size=128))
        except ValueError as error:
            raise AssertionError(invariant) from error
        assert plan.batch_dependence == ()
        assert "batch-invariant" not in plan.table()


@pytest.mark.parametrize("learner", ["bf16", "weights", "full"])
def test_the_learner_finds_the_maxima_of_real_tokens_whatever_its_alignment(learner):
    model = side(recipe(learner), "learner")
    mask = torch.ones(2, 12, dtype=torch.bool)
    mask[0, 6:] = False
    padded = IDS.clone()
    padded[0, 6:] = 99

    def run():
        with real_tokens(model, mask):
            model(input_ids=padded, attention_mask=mask.long())

    calibrate(model, run)
    scales = static_scales(model)
    assert list(scales) == SITES
    open_model = side(Recipe(rollout="nvfp4", learner="weights" if learner != "bf16" else "bf16"), "learner")
    for name, amax in scales.items():
        x = inputs_of(open_model, name, padded, mask.long())
        assert amax == float(x[mask].abs().max()), name


@pytest.mark.parametrize(("rollout", "residual"), [("nvfp4", 0.0), ("nvfp4", 0.5), ("fp8", 0.0)])
def test_a_full_learner_and_its_rollout_are_the_same_bits(rollout, residual):
    wanted = recipe("full", rollout, residual=residual)
    learner, engine = side(wanted, "learner"), EmbeddedEngine(side(wanted, "rollout"))
    calibrate(learner, lambda: learner(input_ids=IDS))
    published = publish(learner, 1)
    engine.update(published.stream(), published.manifest)
    assert static_scales(learner) == static_scales(engine.model)
    with torch.no_grad():
        ours, theirs = (m(input_ids=IDS).logits for m in (learner, engine.model))
    assert torch.equal(ours, theirs)
    dynamic = side(Recipe(rollout=rollout, learner="full", residual=residual), "learner")
    assert not torch.equal(ours, dynamic(input_ids=IDS).logits)


def test_a_site_scales_by_its_frozen_maximum_and_saturates_beyond_it():
    model = side(recipe("full"), "learner")
    calibrate(model, lambda: model(input_ids=IDS))
    site = attachment(model).sites["model.layers.0.mlp.down_proj"]
    site.scale.amax = torch.tensor(2.0)
    x = torch.randn(3, 96) * 4
    fmt = get_format("nvfp4-tensor")
    assert torch.equal(site(x), fmt.fake_quantize(x, amax=torch.tensor(2.0)))
    assert site(x).abs().max() <= 2.0
    assert torch.equal(site(x[1:2]), site(x)[1:2])


def test_a_stale_scale_is_refreshed_at_the_next_publish_and_not_before():
    learner, engine = side(recipe(), "learner"), EmbeddedEngine(side(recipe(), "rollout"))
    calibrate(learner, lambda: learner(input_ids=IDS))
    first = publish(learner, 0)
    engine.update(first.stream(), first.manifest)
    held = engine.model.__dict__["lowbitrl"].scales[SITES[0]].amax
    address, before = held.data_ptr(), static_scales(learner)
    with torch.no_grad():
        learner.model.layers[0].input_layernorm.weight.mul_(3.0)
    learner(input_ids=IDS)
    assert static_scales(learner) == before  # Only what runs under `observing` counts.
    with observing(learner):
        learner(input_ids=IDS)
    assert static_scales(learner) == before  # In use until the publish.
    second = publish(learner, 1)
    assert static_scales(learner)[SITES[0]] == pytest.approx(3 * before[SITES[0]], rel=1e-2)
    assert static_scales(engine.model) == before
    engine.update(second.stream(), second.manifest)
    assert static_scales(engine.model) == static_scales(learner)
    assert held.data_ptr() == address
    assert float(first.tensors[f"{SITES[0]}.input_amax"]) == before[SITES[0]]
    again = publish(learner, 2)
    assert again.tensors[f"{SITES[0]}.input_amax"] == second.tensors[f"{SITES[0]}.input_amax"]


def test_without_a_scale_nothing_is_served_learned_or_published():
    learner, rollout = side(recipe("full"), "learner"), side(recipe("full"), "rollout")
    for model in (learner, rollout):
        with pytest.raises(
            RuntimeError, match=r"model\.layers\.0\.self_attn\.q_proj: no activation observed"
        ):
            model(input_ids=IDS)
    with pytest.raises(RuntimeError, match="no activation observed"):
        publish(learner, 0)
    with pytest.raises(RuntimeError, match="no activation observed"):
        calibrate(learner, lambda: None)


def test_a_version_without_a_scale_or_with_another_one_is_refused_whole():
    learner, engine = side(recipe(), "learner"), EmbeddedEngine(side(recipe(), "rollout"))
    calibrate(learner, lambda: learner(input_ids=IDS))
    good = publish(learner, 1)
    engine.update(good.stream(), good.manifest)
    with torch.no_grad():
        learner.model.norm.weight.mul_(2)
    tensors = dict(publish(learner, 2).tensors)
    name = f"{SITES[3]}.input_amax"
    changed = tensors | {name: tensors[name] * 2}
    manifest = Manifest.of(2, engine.plan.digest, tensors)
    with pytest.raises(ValueError, match=f"{name} of version 2 arrived as"):
        engine.update(changed.items(), manifest)
    del tensors[name]
    with pytest.raises(ValueError, match=f"{SITES[3]} is planned with a static scale"):
        engine.update(tensors.items(), Manifest.of(2, engine.plan.digest, tensors))
    assert engine.version == 1
    assert torch.equal(engine.model.model.norm.weight * 2, learner.model.norm.weight)


def test_an_input_that_is_not_finite_is_named_and_not_published():
    learner = side(recipe(), "learner")
    calibrate(learner, lambda: learner(input_ids=IDS))
    with observing(learner):
        attachment(learner).scales[SITES[1]].observe(torch.tensor([[1.0, torch.nan]]))
    with pytest.raises(ValueError, match=rf"input of {SITES[1]} holds NaN or Inf"):
        publish(learner, 1)


def test_scales_come_back_from_a_checkpoint_exactly_and_of_another_plan_never():
    learner, other = side(recipe(), "learner"), side(recipe(), "learner")
    calibrate(learner, lambda: learner(input_ids=IDS))
    restore_scales(other, static_scales(learner))
    for name, scale in attachment(learner).scales.items():
        assert torch.equal(attachment(other).scales[name].amax, scale.amax)
    with pytest.raises(ValueError, match="of another plan"):
        restore_scales(side(Recipe(rollout="nvfp4"), "learner"), static_scales(learner))


@pytest.mark.parametrize("learner", ["bf16", "weights", "full"])
@pytest.mark.parametrize("rollout", ["nvfp4", "fp8"])
def test_experts_have_a_scale_a_stack(learner, rollout):
    wanted = recipe(learner, rollout)
    ours = side(wanted, "learner", tiny_moe())
    engine = EmbeddedEngine(side(wanted, "rollout", tiny_moe()))
    calibrate(ours, lambda: ours(input_ids=IDS))
    stacks = [name for name in static_scales(ours) if "experts" in name]
    assert len(stacks) == 4
    published = publish(ours, 1)
    engine.update(published.stream(), published.manifest)
    with torch.no_grad():
        a, b = (m(input_ids=IDS).logits for m in (ours, engine.model))
    assert torch.equal(a, b) == (learner == "full")
    assert a.isfinite().all()
    assert b.isfinite().all()
