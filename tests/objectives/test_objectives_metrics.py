"""Metrics by hand."""

import math

import pytest
import torch
from objective_cases import NAN, hand_2x3, random_batch, run

from lowbitrl.objectives import error_token_metrics, mismatch_metrics, repetition

LN2 = math.log(2)


def by_hand():
    """d = old - rollout = [ln 2, 0 | -ln 2, -]: w = [2, 1 | 0.5]."""
    old = torch.tensor([[-1.0, -2.0], [-3.0, NAN]])
    return old, old - torch.tensor([[LN2, 0.0], [-LN2, 0.0]]), torch.tensor([[1, 1], [1, 0]])


def test_mismatch_worked_by_hand():
    got = {key: value.item() for key, value in mismatch_metrics(*by_hand()).items()}
    expected = {
        "rollout_corr/kl": 0.0,
        "rollout_corr/k3_kl": (2 + 1 + 0.5) / 3 - 1,
        "rollout_corr/chi2_token": (4 + 1 + 0.25) / 3 - 1,
        "rollout_corr/chi2_seq": (4 + 0.25) / 2 - 1,
        "rollout_corr/training_ppl": (math.exp(1.5) + math.exp(3)) / 2,
        "rollout_corr/training_log_ppl": (1.5 + 3) / 2,
        "rollout_corr/rollout_ppl": (math.exp(1.5) * 2**0.5 + math.exp(3) / 2) / 2,
        "rollout_corr/rollout_log_ppl": (1.5 + LN2 / 2 + 3 - LN2) / 2,
        "rollout_corr/log_ppl_diff": (-LN2 / 2 + LN2) / 2,
        "rollout_corr/log_ppl_abs_diff": (LN2 / 2 + LN2) / 2,
        "rollout_corr/log_ppl_diff_max": LN2,
        "rollout_corr/log_ppl_diff_min": -LN2 / 2,
        "rollout_corr/ppl_ratio": (2**-0.5 + 2) / 2,
        "mismatch/abs_mean": 2 * LN2 / 3,
        "mismatch/abs_p99": LN2,
        "mismatch/abs_max": LN2,
        "mismatch/token_mult_prob_error": (2 + 1 + 2) / 3,
        "token_mult_prob_error": (2 + 1 + 2) / 3,
        "train_rollout_logprob_abs_diff": 2 * LN2 / 3,
    }
    assert got == pytest.approx(expected, abs=1e-6)


def test_equal_sides_have_no_mismatch():
    batch = random_batch(0)
    metrics = mismatch_metrics(batch["old_logprobs"], batch["old_logprobs"], batch["mask"])
    for key, value in metrics.items():
        one = key.endswith(("ppl_ratio", "token_mult_prob_error"))
        if "ppl" not in key or "diff" in key or one:
            assert value.item() == pytest.approx(float(one), abs=1e-12), key


def test_p99_leaves_the_largest_hundredth_out():
    diff = torch.zeros(1, 1000)
    diff[0, :11] = torch.arange(11) + 1.0
    metrics = mismatch_metrics(diff, torch.zeros_like(diff), torch.ones_like(diff))
    assert metrics["mismatch/abs_p99"].item() == 1.0
    assert metrics["mismatch/abs_max"].item() == 11.0


@pytest.mark.parametrize("shape", [(0, 4), (3, 0), (3, 4)])
def test_an_empty_mask_gives_zeros(shape):
    nothing = torch.full(shape, NAN)
    for value in mismatch_metrics(nothing, nothing, torch.zeros(shape)).values():
        assert value.item() in (0.0, 1.0)
    for value in error_token_metrics(nothing, torch.zeros(shape[0]), torch.zeros(shape)).values():
        assert value.item() == 0


def test_extreme_mismatch_stays_finite():
    old = torch.tensor([[1e4, -1e4, 0.0]])
    for value in mismatch_metrics(old, -old, torch.ones(1, 3)).values():
        assert value.isfinite()


def test_metrics_carry_no_gradient():
    batch = random_batch(1)
    extras = {"entropy": batch["logprobs"] * 2, "ref_logprobs": batch["old_logprobs"]}
    out, _ = run("tbpo", batch | extras)
    mismatch = mismatch_metrics(batch["logprobs"], batch["old_logprobs"], batch["mask"])
    assert not any(value.requires_grad for value in [*out.metrics.values(), *mismatch.values()])
    assert all(value.dim() == 0 for value in out.metrics.values())


def test_ratio_and_entropy_metrics_worked_by_hand():
    batch = hand_2x3()
    entropy = torch.tensor([[1.0, 2.0, 3.0], [4.0, 5.0, NAN]], dtype=torch.float64)
    metrics = run("grpo", batch | {"entropy": entropy})[0].metrics
    assert metrics["actor/entropy"].item() == pytest.approx(3)
    assert metrics["actor/ratio_mean"].item() == pytest.approx((1.5 + 1 + 0.5 + 1.5 + 0.5) / 5)
    assert metrics["actor/ppo_kl"].item() == pytest.approx(-2 * math.log(0.75) / 5)
    assert metrics["actor/ratio_geometric_mean"].item() == pytest.approx((0.75 ** (1 / 3) + 0.75**0.5) / 2)
    assert metrics["actor/tokens"].item() == 5


def test_error_tokens_are_split_by_sign():
    logprobs = torch.tensor([[0.5, 0.01, 0.9], [0.001, 0.001, 0.5], [0.001, 0.9, 0.9]]).log()
    mask = torch.tensor([[1, 1, 1], [1, 1, 0], [1, 1, 1]])
    tokens = torch.tensor([[1, 1, 1], [2, 3, 2], [4, 5, 6]])
    got = error_token_metrics(logprobs, torch.tensor([1.0, -1.0, 0.0]), mask, tokens=tokens, ngram=1)
    assert got["rollout/low_prob"].item() == pytest.approx(4 / 8)
    assert got["rollout/low_prob_positive"].item() == pytest.approx(1 / 3)
    assert got["rollout/low_prob_negative"].item() == pytest.approx(2 / 2)
    assert got["rollout/repetition"].item() == pytest.approx((2 / 3 + 0 + 0) / 3)
    assert got["rollout/repetition_positive"].item() == pytest.approx(2 / 3)
    assert got["rollout/repetition_negative"].item() == 0


def test_repetition_counts_ngrams_seen_before():
    tokens = torch.tensor([[1, 2, 1, 2, 1, 2], [1, 2, 3, 4, 5, 6], [7, 7, 7, 7, 7, 7], [1, 2, 0, 0, 0, 0]])
    mask = torch.ones_like(tokens)
    mask[3, 2:] = 0
    # Trigrams: 121 212 121 212 (2 of 4 seen before); all new; 3 of 4; none at all.
    assert repetition(tokens, mask, ngram=3).tolist() == pytest.approx([0.5, 0, 0.75, 0])
    with pytest.raises(ValueError, match="ngram"):
        repetition(tokens, mask, ngram=0)
