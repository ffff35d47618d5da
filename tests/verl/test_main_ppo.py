"""Unmodified verl runs whole: Ray, TransferQueue, FSDP2, our engine, published bytes, our rollout, our losses.

Weights only (W4A16), fp32, on a CPU: there the two sides agree to the last bits exactly where the learner
multiplies by the bytes that the rollout serves, and nowhere else. A run takes about a minute.
"""

from __future__ import annotations

import math

import pytest

from tests.verl import ppo

ALIGNED, NAIVE = {"learner": "weights"}, {"learner": "bf16"}
GRPO = {"name": "grpo", "parameters": {"clip_low": 0.2, "clip_high": 0.27}}
TBPO = {"name": "tbpo"}
RUNS = {
    "dense, 1 rank, TBPO": (False, 1, {"recipe": ALIGNED, "objective": TBPO}),
    "dense, 2 ranks, GRPO": (False, 2, {"recipe": ALIGNED, "objective": GRPO}),
    "experts, 2 ranks, TBPO": (True, 2, {"recipe": ALIGNED, "objective": TBPO}),
    "experts, 1 rank, Muon": (True, 1, {"recipe": ALIGNED, "objective": GRPO, "optimizer": {"name": "muon"}}),
    "dense, 1 rank, not aligned": (False, 1, {"recipe": NAIVE, "objective": GRPO}),
    "experts, 2 ranks, not aligned": (True, 2, {"recipe": NAIVE, "objective": TBPO}),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_sides_agree_exactly_where_they_share_bytes(name, tmp_path):
    moe, ranks, sections = RUNS[name]
    ppo.write_inputs(tmp_path, moe)
    steps = ppo.run(tmp_path, ppo.recipe(tmp_path, **sections), ranks)
    print(name, *(f"rollout_corr/kl {step['rollout_corr/kl']:.1e}" for step in steps))
    assert len(steps) == 2
    for version, step in enumerate(steps):
        kl, gap = abs(step["rollout_corr/kl"]), step["actor/mismatch/abs_mean"]
        if sections["recipe"] is ALIGNED:
            assert kl < 1e-6
            assert gap < 1e-5
        else:
            assert kl > 1e-4
            assert gap > 1e-2
        assert step["actor/sync/version"] == version
        assert step["actor/sync/sentinel"] == pytest.approx(gap, rel=0.5)
        assert step["actor/grad_norm"] > 0
        assert all(math.isfinite(value) for value in step.values() if isinstance(value, float))
    parts = {k.removeprefix("actor/decomposition/"): v for k, v in steps[0].items() if "decomposition" in k}
    assert parts["engine_abs"] < 1e-5
    assert parts["total"] == pytest.approx(parts["engine"] + parts.get("weights", 0.0), abs=1e-6)
    if sections["recipe"] is NAIVE:
        assert parts["weights_abs"] == pytest.approx(parts["total_abs"], rel=1e-3)
    weighed = sections["objective"] is TBPO
    assert ("actor/rollout_corr/rollout_is_mean" in steps[0]) == weighed


@pytest.mark.slow
def test_what_remains_in_bf16_with_quantized_activations_comes_apart(tmp_path):
    ppo.write_inputs(tmp_path, moe=False)
    recipe = {"rollout": "nvfp4", "learner": "weights", "residual": 1.0}
    lines = ppo.recipe(tmp_path, recipe=recipe, model={"dtype": "bfloat16"})
    first, _ = ppo.run(tmp_path, lines, 1)
    parts = {k.removeprefix("actor/decomposition/"): v for k, v in first.items() if "decomposition" in k}
    print(parts)
    terms = ("activations", "residual", "engine")
    assert parts["total"] == pytest.approx(sum(parts[t] for t in terms), abs=1e-5)
    # The residual takes back what quantized activations did; other kernels and batches are the least of it.
    assert parts["total_abs"] < parts["activations_abs"] / 3
    assert parts["engine_abs"] < parts["total_abs"]
