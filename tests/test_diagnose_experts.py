"""The routing term and the block distances: exact sums, zero where nothing differs."""

import pytest
import torch

from lowbitrl.diagnose.experts import block_distances, routing_term
from lowbitrl.quant import Recipe, prepare, real_tokens
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from tests.moe_models import tiny_moe

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12, 13]]


def sides(recipe, **overrides):
    learner, rollout = (tiny_moe("qwen3_moe", torch.float32, **overrides) for _ in range(2))
    prepare(learner, recipe)
    prepare(rollout, recipe, "rollout")
    return learner, EmbeddedEngine(rollout, record_routing=True)


def sampled(engine, n=8):
    return engine.generate(PROMPTS, n, Sampling(max_tokens=8))


def test_equal_sides_take_the_same_routes():
    learner, engine = sides(Recipe(rollout="nvfp4-w4a16"))
    term = routing_term(learner, PROMPTS, sampled(engine), micro_batch_tokens=64)
    assert term.total.max < 1e-4
    assert term.routing.max == 0
    assert set(term.agreement.values()) == {1.0}


def test_the_terms_bound_the_total_and_replay_takes_the_routing_away():
    learner, engine = sides(Recipe(rollout="nvfp4", learner="weights"))
    completions = sampled(engine)
    term = routing_term(learner, PROMPTS, completions)
    assert term.routing.mean > 0
    assert term.total.mean <= term.routing.mean + term.arithmetic.mean
    assert term.arithmetic.mean < term.total.mean
    assert 0.5 < term.agreement["routing/agreement"] < 1
    split = routing_term(learner, PROMPTS, completions, micro_batch_tokens=40)
    assert split.total.mean == pytest.approx(term.total.mean, rel=1e-3)
    assert split.agreement == pytest.approx(term.agreement, abs=0.01)


def test_completions_without_routes_are_refused():
    learner, engine = sides(Recipe())
    engine.record_routing = False
    with pytest.raises(ValueError, match="completions carry no routes"):
        routing_term(learner, PROMPTS, sampled(engine, 1))


def test_block_distances_name_whole_model_layers_and_ignore_padding():
    recipe = Recipe(rollout="nvfp4", learner="weights", residual=0.5)
    learner, engine = sides(recipe, mlp_only_layers=[0], num_hidden_layers=3)
    ids, real = torch.randint(3, 128, (2, 6)), torch.ones(2, 6, dtype=torch.bool)
    real[1, :3] = False

    def run(model, ids=ids):
        with real_tokens(model, real):
            return model(input_ids=ids, attention_mask=real.long())

    blocks = block_distances(learner, engine.model, run, real)
    assert [b.layer for b in blocks] == [1, 2]
    assert all(0 < b.input < b.input_norm and b.output > 0 for b in blocks)
    other = ids.clone()
    other[1, :3] = 9
    again = block_distances(learner, engine.model, lambda model: run(model, other), real)
    assert [b.input for b in again] == pytest.approx([b.input for b in blocks], rel=1e-4)
    same = block_distances(learner, learner, run, real)
    assert all(b.input == b.output == 0 for b in same)
