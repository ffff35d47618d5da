"""Several processes train what one trains: the first forward to the bit, updates up to the order of sums.

The weights have 64 or 96 rows and 4 experts: nothing divides evenly by 3 ranks.
"""

import pytest
import torch

from tests.distributed import work
from tests.distributed.processes import run_ranks

ALIGNED = {"rollout": "nvfp4", "learner": "weights", "residual": 0.5}
# Largest difference of a loss, and of a gradient norm in its own size, over three updates. In fp32 only the
# order of sums differs, which may flip a weight's code. In BF16 each micro-batch's gradient is rounded to
# 8 bits, so other micro-batches are other roundings, of which Adam makes steps of full size.
FP32, FP32_CODES, BF16 = 1e-5, 1e-3, 3e-2
EXACT = {"dtype": torch.float32}
PLAIN = {"rollout": "bf16"}
CASES = [
    (2, "dense", PLAIN, EXACT | {"trainer": {"mini_batch": 6}}, FP32),
    (3, "dense", PLAIN, EXACT | {"trainer": {"mini_batch": 4, "layout": "packed"}}, FP32),
    (3, "dense", ALIGNED, EXACT | {"trainer": {"mini_batch": 6}}, FP32_CODES),
    (2, "dense", ALIGNED, {"trainer": {"mini_batch": 6}}, BF16),
    (3, "dense", ALIGNED, {"trainer": {"gradient_checkpointing": True}}, BF16),
    (2, "dense", ALIGNED, {"optimizer": {"masters": "compute"}}, BF16),
    (3, "qwen3_moe", PLAIN, EXACT | {"trainer": {"mini_batch": 6}}, FP32),
    (3, "qwen3_moe", ALIGNED, EXACT, FP32_CODES),
    (2, "qwen3_moe", ALIGNED, {"trainer": {"gradient_checkpointing": True}}, BF16),
    (2, "gpt_oss", ALIGNED, {}, BF16),
    (3, "qwen3_moe", PLAIN, EXACT | {"optimizer": {"name": "muon", "muon_learning_rate": 1e-3}}, FP32_CODES),
    (2, "dense", ALIGNED, {"objective": {"kl_coef": 0.1}, "distributed": {"cpu_offload": True}}, BF16),
]


@pytest.fixture(scope="module")
def one(tmp_path_factory):
    """Results of one process, by case; made once."""
    made = {}

    def result(*case):
        key = repr(case)
        if key not in made:
            (made[key],) = run_ranks(0, tmp_path_factory.mktemp("one"), work.train, *case)
        return made[key]

    return result


@pytest.mark.parametrize(("size", "kind", "recipe", "options", "drift"), CASES)
def test_three_updates_are_those_of_one_process(tmp_path, one, size, kind, recipe, options, drift):
    alone = one(kind, recipe, options)
    several = run_ranks(size, tmp_path, work.train, kind, recipe, options)
    first = several[0]
    assert torch.equal(first["first"], alone["first"])
    for other in several[1:]:
        assert other["steps"] == first["steps"]
        assert torch.equal(other["last"], first["last"])
        for name, tensor in first["published"][-1].items():
            assert torch.equal(other["published"][-1][name], tensor)
    for ours, theirs in zip(first["steps"], alone["steps"], strict=True):
        assert ours["actor/loss"] == pytest.approx(theirs["actor/loss"], abs=drift)
        assert ours["actor/grad_norm"] == pytest.approx(theirs["actor/grad_norm"], rel=drift)
    assert first["dealt"] == pytest.approx(first["last"], abs=10 * drift)
    moved = torch.cat([(m - alone["masters"][n]).flatten() for n, m in first["masters"].items()])
    assert moved.abs().mean() < drift * 1e-2, "learning rate 1e-3"


def test_the_first_forward_is_equal_with_quantized_activations_too(tmp_path, one):
    """Later ones are not compared: codes that flip move log-probabilities by tenths of a nat, on any two machines."""
    recipe = {"rollout": "nvfp4", "learner": "full"}
    alone = one("dense", recipe, {})
    assert torch.equal(run_ranks(2, tmp_path, work.train, "dense", recipe, {})[1]["first"], alone["first"])


def test_shards_are_shares(tmp_path):
    several = run_ranks(3, tmp_path, work.train, "dense", ALIGNED, {})
    whole = {name: master.numel() for name, master in several[0]["masters"].items()}
    for name, count in whole.items():
        held = [rank["held"][name] for rank in several]
        assert sum(held) == count
        assert max(held) <= -(-count // 3) * 1.1


@pytest.mark.parametrize("size", [2, 3])
def test_completions_are_those_of_one_process(tmp_path, size):
    recipe = {"rollout": "nvfp4-w4a16", "residual": 0.0}
    (alone,) = run_ranks(0, tmp_path / "one", work.sample, "dense", recipe)
    several = run_ranks(size, tmp_path / "several", work.sample, "dense", recipe)
    assert all(rank == several[0] for rank in several)
    assert [c.token_ids for c in several[0]] == [c.token_ids for c in alone]
    assert [(c.prompt_index, c.sample_index) for c in several[0]] == [
        (i, j) for i in range(7) for j in range(3)
    ]
