"""An update that meets requests under way: they finish, resume or mix, and every token knows its version."""

from __future__ import annotations

import copy
import dataclasses

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.quant import Recipe
from lowbitrl.rollout.types import Sampling
from lowbitrl.rollout.vllm.inflight import Flight
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.logprobs import response_logprobs
from tests.vllm.test_engine import FLOOR, PROMPTS, both_sides, train
from tests.vllm.tiny import dense

RECIPE = Recipe(rollout="nvfp4-w4a16")
SAMPLING = Sampling(max_tokens=14, stop_token_ids=(1,))
BEFORE = 5


@torch.no_grad()
def scores(learner, completion):
    rows, _ = response_logprobs(
        learner, [PROMPTS[completion.prompt_index]], [list(completion.token_ids)], temperature=1.0
    )
    return rows[0, : len(completion.token_ids)]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dense(tmp_path_factory.mktemp("flight"))


def fly(folder, policy):
    """Five steps of version 0, an update, the rest: (learner 0, learner 1, completions, later completions)."""
    with both_sides(folder, RECIPE, in_flight=policy) as (learner, engine):
        first = publish(learner, 0)
        engine.update(first.stream(), first.manifest)
        old = copy.deepcopy(learner)
        flight = Flight(engine)
        flight.add(PROMPTS, 2, SAMPLING, seeds=[3, 4])
        done = [c for _ in range(BEFORE) for c in flight.step()]
        assert len(flight) == 4 - len(done)
        train(learner, 0.05)
        second = publish(learner, 1)
        done += flight.update(second.stream(), second.manifest)
        done += flight.drain()
        later = engine.generate(PROMPTS, 1, SAMPLING)
        assert len(done) == 4
        return old, learner, done, later


def gaps(learner, completion, part):
    return (scores(learner, completion) - torch.tensor(completion.rollout_logprobs)).abs()[part]


def test_finished_requests_have_one_version(folder):
    old, new, done, later = fly(folder, "finish")
    for completion in done:
        assert set(completion.versions) == {0}
        assert gaps(old, completion, slice(None)).mean() < FLOOR
    for completion in later:
        assert gaps(new, completion, slice(None)).mean() < FLOOR


def test_resumed_requests_are_each_versions_own_over_the_whole_text(folder):
    old, new, done, later = fly(folder, "resume")
    assert any(len(set(c.versions)) == 2 for c in done)
    for completion in done:
        at = completion.versions.count(0)
        assert completion.versions == (0,) * at + (1,) * (len(completion.token_ids) - at)
        assert completion.version == 0
        assert 0 < at <= BEFORE
        assert gaps(old, completion, slice(0, at)).mean() < FLOOR
        if at < len(completion.token_ids):
            assert gaps(new, completion, slice(at, None)).mean() < FLOOR
            assert gaps(old, completion, slice(at, None)).mean() > 100 * FLOOR
    for completion in later:
        assert gaps(new, completion, slice(None)).mean() < FLOOR


def test_mixed_requests_go_on_over_the_old_cache(folder):
    old, new, done, later = fly(folder, "mix")
    mixed = [c for c in done if len(set(c.versions)) == 2]
    assert mixed
    for completion in mixed:
        at = completion.versions.count(0)
        assert gaps(old, completion, slice(0, at)).mean() < FLOOR
        # Neither version's alone: new weights, keys and values of both.
        for learner in (old, new):
            assert gaps(learner, completion, slice(at, None)).mean() > 10 * FLOOR
    # What begins after the update sees nothing of the old cache.
    for completion in later:
        assert gaps(new, completion, slice(None)).mean() < FLOOR


def test_a_refused_update_leaves_requests_under_way(folder):
    with both_sides(folder, RECIPE, in_flight="resume") as (learner, engine):
        first = publish(learner, 0)
        engine.update(first.stream(), first.manifest)
        flight = Flight(engine)
        flight.add(PROMPTS, 1, SAMPLING)
        flight.step()
        other = dataclasses.replace(first.manifest, plan_digest="00")
        with pytest.raises(ValueError, match="under plan 00"):
            flight.update(first.stream(), other)
        done = flight.drain()
        assert len(done) == len(PROMPTS)
        for completion in done:
            assert set(completion.versions) == {0}
            assert gaps(learner, completion, slice(None)).mean() < FLOOR
