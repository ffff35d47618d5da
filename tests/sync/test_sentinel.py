import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from lowbitrl.sync.sentinel import Sentinel, SentinelConfig, SentinelError, blame_bytes, blame_layer
from tests.conftest import tiny_llama


def watched(gaps, rollout="nvfp4-w4a16", **config):
    values = iter(gaps)
    return Sentinel(
        SentinelConfig(**config),
        Recipe(rollout=rollout),
        [[1, 2, 3]],
        lambda sequences: [torch.zeros(2) for _ in sequences],
        lambda sequences: [torch.full((2,), next(values)) for _ in sequences],
    )


def test_a_jump_over_the_runs_own_floor_stops_with_the_blame():
    sentinel = watched([0.2, 0.25, 0.2, 0.9])
    for version in range(3):
        sentinel.check(version, str)
    with pytest.raises(SentinelError, match=r"version 3.*0\.900 nats.*floor is 0\.200\. layer 7"):
        sentinel.check(3, lambda: "layer 7")
    assert sentinel.history == pytest.approx([0.2, 0.25, 0.2])


def test_slow_growth_and_small_noise_pass():
    sentinel = watched([0.001, 0.09, 0.05, 0.12, 0.2, 0.3])
    assert [round(sentinel.check(v, str), 3) for v in range(6)] == [0.001, 0.09, 0.05, 0.12, 0.2, 0.3]


@pytest.mark.parametrize(
    ("rollout", "slack", "fault"), [("nvfp4-w4a16", None, 0.11), ("nvfp4", None, 0.31), ("nvfp4", 0.2, 0.21)]
)
def test_over_a_floor_of_nothing_the_slack_is_what_rounded_activations_amplify(rollout, slack, fault):
    sentinel = watched([0.0, fault - 0.02, fault], rollout, slack=slack, window=1)
    sentinel.check(0, str)
    sentinel.check(1, str)
    sentinel.history = [0.0]
    with pytest.raises(SentinelError, match=r"floor is 0\.000"):
        sentinel.check(2, str)


def test_nan_is_a_jump():
    sentinel = watched([0.2, float("nan")])
    sentinel.check(0, str)
    with pytest.raises(SentinelError):
        sentinel.check(1, str)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_what_is_not_finite_is_a_fault_before_there_is_a_floor(value):
    sentinel = watched([value])
    with pytest.raises(SentinelError, match=r"version 0.*layer 7"):
        sentinel.check(0, lambda: "layer 7")
    assert sentinel.history == []


def test_sequences_of_one_token_have_nothing_to_compare():
    scores = lambda sequences: [torch.zeros(len(s) - 1) for s in sequences]  # noqa: E731
    sentinel = Sentinel(SentinelConfig(), Recipe(), [[5], [1, 2, 3]], scores, scores)
    assert sentinel.sequences == [[1, 2, 3]]
    assert sentinel.check(0, str) == 0.0


def test_off_means_off():
    assert Sentinel(SentinelConfig(sequences=0), Recipe(), [], None, None).check(0, str) == 0.0


def test_blame_names_the_tensor_or_the_layer():
    recipe = Recipe(rollout="nvfp4-w4a16")
    learner, rollout = tiny_llama(torch.float32), tiny_llama(torch.float32)
    prepare(learner, recipe, "learner")
    prepare(rollout, recipe, "rollout")
    engine, published = EmbeddedEngine(rollout), publish(learner, 0)
    engine.update(published.stream(), published.manifest)
    served = engine.served()
    assert blame_bytes(published.manifest, served) is None
    broken = served | {"model.layers.1.mlp.up_proj.scale": served["model.layers.1.mlp.up_proj.scale"][:0]}
    assert "model.layers.1.mlp.up_proj.scale" in blame_bytes(published.manifest, broken)
    # A stale decoded cache: the bytes agree, the arithmetic does not.
    rollout.model.layers[1].self_attn.o_proj.weight.data.mul_(3)
    ids = torch.tensor([[5, 6, 7, 8]])
    assert "model.layers.1.self_attn.o_proj adds most" in blame_layer(
        learner, rollout, lambda m: m(input_ids=ids)
    )
