"""Two tensor-parallel ranks on a CPU: each cuts its shards from the published bytes."""

from __future__ import annotations

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.quant import Recipe
from lowbitrl.sync.publisher import publish
from tests.vllm.test_engine import FLOOR, both_sides, flipped, gap, push, train
from tests.vllm.tiny import dense, moe

DAMAGED = {
    "dense": "model.layers.1.mlp.up_proj.qdata",
    "moe": "model.layers.1.mlp.experts.gate_up_proj.qdata",
}


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_two_ranks_are_at_the_floor_and_refuse_as_one(kind, tmp_path, monkeypatch):
    # One NUMA node: vLLM would want one a rank.
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    folder = dense(tmp_path) if kind == "dense" else moe(tmp_path)
    with both_sides(folder, Recipe(rollout="nvfp4-w4a16"), tensor_parallel_size=2) as (learner, engine):
        push(learner, engine, 0)
        train(learner)
        push(learner, engine, 1)
        assert gap(learner, engine)[0] < FLOOR
        state, held = engine.state(), engine.states()
        assert len(held) == 2
        assert held[0] == state
        # The ranks hold different halves of the same matrices, and the same norms.
        assert held[0].keys() == held[1].keys()
        shards = {name for name in state if held[0][name] != held[1][name]}
        assert {name for name in state if name.endswith("qdata")} <= shards
        assert "model.norm.weight" not in shards
        published = publish(learner, 2)
        with pytest.raises(ValueError, match=f"{DAMAGED[kind]} of version 2 arrived as"):
            engine.update(flipped(published, DAMAGED[kind]).items(), published.manifest)
        assert engine.states() == held
        assert engine.version == 1
        train(learner)
        push(learner, engine, 3)
        assert gap(learner, engine)[0] < FLOOR
