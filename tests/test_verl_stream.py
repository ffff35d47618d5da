"""Published bytes as verl's weight stream: what `publish` ships, sealed by a manifest; without verl."""

from __future__ import annotations

import pytest
import torch

from lowbitrl.integrations.verl.stream import MANIFEST, Arrivals, published_stream, sealed_stream
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe


def sides(moe):
    """A learner, its plan, and an engine that wears the same."""
    make = (lambda: tiny_moe("qwen3_moe")) if moe else tiny_llama
    learner, rollout = make(), make()
    plan = prepare(learner, Recipe(rollout="nvfp4-w4a16"), "learner")
    prepare(rollout, plan, "rollout")
    return learner, plan, EmbeddedEngine(rollout)


def named(model):
    return [(name, parameter.detach()) for name, parameter in model.named_parameters()]


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_the_stream_is_what_publish_ships(moe):
    learner, plan, _ = sides(moe)
    published = publish(learner, 3)
    # Members of a fused group need not come together.
    streamed = dict(published_stream(reversed(named(learner)), plan))
    assert streamed.keys() == published.tensors.keys()
    for name, tensor in published.tensors.items():
        assert streamed[name].dtype == tensor.dtype
        assert streamed[name].reshape(-1).view(torch.uint8).equal(tensor.reshape(-1).view(torch.uint8)), name


@pytest.mark.parametrize("moe", [False, True], ids=["dense", "experts"])
def test_what_arrives_is_served(moe):
    learner, plan, engine = sides(moe)
    arrivals = Arrivals()
    for pair in sealed_stream(named(learner), plan, 7):
        arrivals.take([pair])
    engine.update(arrivals.tensors.items(), arrivals.manifest())
    assert engine.version == 7
    ids = torch.tensor([[3, 5, 8, 13]])
    with torch.no_grad():
        assert engine.model(input_ids=ids).logits.equal(learner(input_ids=ids).logits)


def test_a_stream_that_was_cut_off_or_changed_is_no_version():
    learner, plan, engine = sides(False)
    pairs = list(sealed_stream(named(learner), plan, 0))
    assert pairs[-1][0] == MANIFEST
    cut = Arrivals()
    cut.take(pairs[:-1])
    with pytest.raises(ValueError, match="without a manifest"):
        cut.manifest()
    changed = Arrivals()
    changed.take(pairs[1:])
    with pytest.raises(ValueError, match="never arrived"):
        engine.update(changed.tensors.items(), changed.manifest())
    assert engine.version == -1


def test_arrivals_survive_the_buffer_they_came_in():
    arrivals, buffer = Arrivals(), torch.ones(4)
    arrivals.take([("weight", buffer)])
    buffer.zero_()
    assert arrivals.tensors["weight"].equal(torch.ones(4))


def test_damage_in_the_learner_is_named():
    learner, plan, _ = sides(False)
    with pytest.raises(ValueError, match=r"layers\.1.*never came"):
        list(published_stream([pair for pair in named(learner) if "layers.1" not in pair[0]], plan))
    with torch.no_grad():
        learner.model.norm.weight[0] = torch.nan
    with pytest.raises(ValueError, match=r"model\.norm\.weight holds NaN"):
        list(published_stream(named(learner), plan))
