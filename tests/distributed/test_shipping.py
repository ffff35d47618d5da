"""A version that goes piece by piece arrives as one that is published whole; broken off, it is not served."""

import pytest

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.types import Sampling
from lowbitrl.sync.manifest import entries_of
from lowbitrl.sync.publisher import pieces, publish
from tests.conftest import tiny_llama
from tests.distributed import work
from tests.distributed.processes import run_ranks

STATIC = {"rollout": "nvfp4", "residual": 0.0, "activation_scale": "static"}


@pytest.mark.parametrize("keep", [True, False])
@pytest.mark.parametrize(
    ("kind", "recipe"),
    [("dense", STATIC), ("dense", {"rollout": "bf16"}), ("qwen3_moe", {"rollout": "nvfp4"})],
)
def test_the_first_version_is_the_one_of_a_single_process(tmp_path, kind, recipe, keep):
    """The second is compared between ranks alone: it is of other gradients, by the order of sums."""
    (alone,) = run_ranks(0, tmp_path / "one", work.shipped, kind, recipe, {})
    ours, other = run_ranks(2, tmp_path / "two", work.shipped, kind, recipe, {"keep_bytes": keep})
    assert ours["manifests"][0].entries == alone["manifests"][0].entries
    assert entries_of(ours["served"]) == entries_of(other["served"])
    assert ours["manifests"][1].entries == {
        name: entry
        for name, entry in entries_of(ours["served"]).items()
        if name in ours["manifests"][1].entries
    }
    assert ours["changes"][0] == 0.0
    assert (ours["changes"][1] > 0) == (recipe["rollout"] != "bf16")
    assert (max(ours["held"]) > 0) == (keep and recipe["rollout"] != "bf16")


def test_one_group_of_whole_weights_lives_at_a_time(tmp_path):
    for peaks, largest in run_ranks(2, tmp_path, work.shipping_peaks):
        assert peaks["ship"] == largest
        assert peaks["all groups"] > 4 * largest


def sides():
    learner = tiny_llama()
    plan = prepare(learner, Recipe(rollout="nvfp4-w4a16", residual=0.0))
    model = tiny_llama()
    prepare(model, plan, "rollout")
    return learner, plan, EmbeddedEngine(model, "batch")


def test_pieces_are_what_publish_ships():
    learner, _, _ = sides()
    together = {name: tensor for piece in pieces(learner) for name, tensor in piece.items()}
    assert entries_of(together) == publish(learner, 0).manifest.entries
    assert max(len(piece) for piece in pieces(learner)) == 9, (
        "q, k and v: codes, scales and global scale of each"
    )


def test_a_version_that_breaks_off_is_not_served():
    learner, plan, engine = sides()
    whole = list(pieces(learner))
    engine.receive(iter(whole), 0, plan.digest)
    engine.generate([[3, 4]], 1, Sampling(max_tokens=2))

    def broken():
        yield from whole[:3]
        raise OSError("the connection went away")

    with pytest.raises(OSError, match="went away"):
        engine.receive(broken(), 1, plan.digest)
    with pytest.raises(ValueError, match="an update broke off, so no whole version is served"):
        engine.generate([[3, 4]], 1, Sampling(max_tokens=2))
    with pytest.raises(ValueError, match=r"version 1 is incomplete: .* never arrived"):
        engine.receive(iter(whole[1:]), 1, plan.digest)
    engine.receive(iter(whole), 1, plan.digest)
    assert engine.version == 1
    engine.generate([[3, 4]], 1, Sampling(max_tokens=2))


def test_another_plans_version_is_refused_before_anything_is_adopted():
    learner, _, engine = sides()
    with pytest.raises(ValueError, match="was published under plan"):
        engine.receive(pieces(learner), 0, "other")
    engine.generate([[3, 4]], 1, Sampling(max_tokens=2))
