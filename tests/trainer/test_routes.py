"""R2 and R3: the rollout's routes reach every learner pass, by the right token, in every layout."""

import copy

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig, TrainingBatch
from lowbitrl.trainer.logprobs import response_logprobs
from lowbitrl.trainer.routes import RoutePass
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


def sides(recipe=None, dtype=torch.float32, **overrides):
    recipe = recipe or Recipe(rollout="nvfp4", residual=0.5)
    learner, rollout = (tiny_moe("qwen3_moe", dtype, **overrides) for _ in range(2))
    prepare(learner, recipe)
    prepare(rollout, recipe, "rollout")
    return learner, EmbeddedEngine(rollout, record_routing=True)


def sampled(engine, n=3, max_tokens=5):
    return engine.generate(PROMPTS, n, Sampling(max_tokens=max_tokens, stop_token_ids=(2, 3, 4, 20, 30, 40)))


def batch_of(completions):
    return TrainingBatch.build(
        [PROMPTS[c.prompt_index] for c in completions],
        [c.token_ids for c in completions],
        [c.rollout_logprobs for c in completions],
        torch.linspace(-1, 1, len(completions)),
        [c.routes for c in completions],
    )


def trainer_of(learner, **config):
    optimizer = OptimizerConfig(learning_rate=1e-3, max_grad_norm=0)
    return Trainer(learner, TrainerConfig(**config), ObjectiveConfig(name="grpo"), optimizer)


def test_every_token_fed_has_a_route_and_it_is_the_one_a_prefill_takes():
    learner, engine = sides(Recipe(rollout="nvfp4-w4a16"))
    completions = sampled(engine)
    assert {len(c.token_ids) for c in completions} != {5}, "some rows should stop early"
    for c in completions:
        prompt = PROMPTS[c.prompt_index]
        assert c.routes.shape == (len(prompt) + len(c.token_ids) - 1, 2, 2)
        routes = RoutePass([c.routes])
        with torch.no_grad():
            response_logprobs(learner, [prompt], [c.token_ids], routes=routes)
        assert routes.agreement().tolist() == [1.0, 1.0]


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_routes_find_their_tokens_in_every_layout(layout):
    learner, engine = sides()
    completions = sampled(engine)
    order = [c.routes.flip(-1) for c in completions]
    foreign = [3 - routes for routes in order]
    routes = RoutePass(foreign, replay=True)
    arguments = [PROMPTS[c.prompt_index] for c in completions], [c.token_ids for c in completions]
    with torch.no_grad():
        together, _ = response_logprobs(learner, *arguments, layout=layout, routes=routes)
        for row, (prompt, response) in enumerate(zip(*arguments, strict=True)):
            alone, _ = response_logprobs(
                learner, [prompt], [response], routes=RoutePass([foreign[row]], replay=True)
            )
            torch.testing.assert_close(together[row, : len(response)], alone[0], atol=2e-5, rtol=1e-5)
        free, _ = response_logprobs(learner, *arguments, layout=layout)
    assert (free - together).abs().max() > 0.01


def test_r3_brings_the_learner_to_the_rollouts_function():
    """The learner's activations differ from the rollout's, so some tokens go elsewhere; replayed, none does."""
    learner, engine = sides(Recipe(rollout="nvfp4", residual=0.0))
    batch = batch_of(sampled(engine, n=8))
    metrics = trainer_of(learner, routing_replay="none").update(batch, 0)
    assert 0.5 < metrics["routing/agreement"] < 1
    assert {"routing/agreement_layer_0", "routing/agreement_layer_1"} <= metrics.keys()
    own, replayed = (
        trainer_of(copy.deepcopy(learner), routing_replay=r).score(batch) for r in ("none", "R3")
    )
    assert not torch.equal(own, replayed)


def test_r2_replays_the_first_pass_in_the_later_ones(monkeypatch):
    learner, engine = sides()
    batch = batch_of(sampled(engine, n=4))
    trainer = trainer_of(learner, routing_replay="R2", mini_batch=6)
    passes = []
    forward = trainer._forward
    monkeypatch.setattr(trainer, "_forward", lambda b, r, *m: passes.append(r) or forward(b, r, *m))
    metrics = trainer.update(batch, 0)
    first, *later = passes
    assert not first.replay
    assert all(p.replay for p in later)
    assert len(later) == 2
    known = {tuple(map(int, r.flatten())) for r in first.own}
    assert all(tuple(map(int, r.flatten())) in known for p in later for r in p.given)
    assert 0.5 < metrics["routing/agreement"] <= 1


def test_checkpointing_replays_in_backward_too():
    learner, engine = sides()
    batch = batch_of(sampled(engine))
    shuffled = [(routes + 1) % 4 for routes in batch.routes]
    batch = TrainingBatch(**(vars(batch) | {"routes": tuple(shuffled)}))
    trainers = [
        trainer_of(copy.deepcopy(learner), routing_replay="R3", gradient_checkpointing=flag)
        for flag in (False, True)
    ]
    for trainer in trainers:
        trainer.update(batch, 0)
    for a, b in zip(*(t.model.parameters() for t in trainers), strict=True):
        assert torch.equal(a, b)


def test_gradients_under_replay_reach_the_replayed_experts_and_the_router():
    learner, _ = sides(Recipe())
    given = torch.zeros(7, 2, 2, dtype=torch.int16)
    given[..., 1] = 3
    logprobs, _ = response_logprobs(
        learner, [[5, 6, 7]], [[8, 9, 10, 11]], routes=RoutePass([given], replay=True)
    )
    logprobs.sum().backward()
    experts = learner.model.layers[1].mlp.experts.down_proj.grad.flatten(1).norm(dim=1)
    assert (experts > 0).tolist() == [True, False, False, True]
    assert learner.model.layers[1].mlp.gate.weight.grad.norm() > 0


def test_refusals():
    learner, engine = sides()
    dense = tiny_llama()
    prepare(dense, Recipe())
    with pytest.raises(ValueError, match="needs a mixture of experts"):
        trainer_of(dense, routing_replay="R3")
    bare = TrainingBatch(**(vars(batch_of(sampled(engine))) | {"routes": None}))
    with pytest.raises(ValueError, match=r"set rollout\.record_routing=true"):
        trainer_of(learner, routing_replay="R3").update(bare, 0)
    with pytest.raises(ValueError, match="sequence 0 has 4 tokens and routes of 9"):
        response_logprobs(learner, [[1, 2]], [[3, 4]], routes=RoutePass([torch.zeros(9, 2, 2)], replay=True))
    rollout = engine.model
    with pytest.raises(ValueError, match="'continuous' mixes requests"):
        EmbeddedEngine(rollout, "continuous", record_routing=True)
    frozen = tiny_llama()
    prepare(frozen, Recipe(), "rollout")
    with pytest.raises(ValueError, match="this model has no routers"):
        EmbeddedEngine(frozen, record_routing=True)


def test_publishing_between_records_does_not_disturb_them():
    learner, engine = sides()
    before = [c.routes for c in sampled(engine)]
    published = publish(learner, 1)
    engine.update(published.stream(), published.manifest)
    assert all(torch.equal(a, c.routes) for a, c in zip(before, sampled(engine), strict=True))
