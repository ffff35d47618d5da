"""Corrections worked by hand, and what a rejected token may and may not still do."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import BUILT_IN, batch_3x4, hand_2x3, random_batch, run

from lowbitrl.objectives import CORRECTIONS, batch_denominator, correct

# On hand_2x3: mismatch w = [3, 1, 1.125 | 0.5, 0.5], geometric means 1.5 and 0.5, products 3.375 and 0.25.
BY_HAND = [
    ("tis", {}, [2, 1, 1.125, 0.5, 0.5], [1, 1, 1, 1, 1]),
    ("tis", {"level": "sequence", "cap": 3.0}, [3] * 3 + [0.25] * 2, [1, 1, 1, 1, 1]),
    ("tis", {"level": "geometric", "cap": 1.4}, [1.4] * 3 + [0.5] * 2, [1, 1, 1, 1, 1]),
    ("tis", {"cap": float("inf")}, [3, 1, 1.125, 0.5, 0.5], [1, 1, 1, 1, 1]),
    ("mis", {}, [3.375] * 3 + [0.25] * 2, [0, 0, 0, 1, 1]),
    ("mis", {"level": "token"}, [3, 1, 1.125, 0.5, 0.5], [0, 1, 1, 1, 1]),
    ("mis", {"level": "geometric", "cap": 1.6, "floor": 0.6}, [1.5] * 3 + [0.5] * 2, [1, 1, 1, 0, 0]),
    ("icepop", {}, [3, 1, 1.125, 0.5, 0.5], [1, 1, 1, 1, 1]),
    ("icepop", {"cap": 2.0, "floor": 0.6}, [3, 1, 1.125, 0.5, 0.5], [0, 1, 1, 0, 0]),
    ("rejection", {}, [1] * 5, [0, 0, 0, 0, 0]),
    ("rejection", {"level": "geometric", "cap": 1.6}, [1] * 5, [1, 1, 1, 0, 0]),
    ("rejection", {"level": "sequence", "cap": 2.0, "floor": 0.2}, [1] * 5, [0, 0, 0, 1, 1]),
    ("rejection", {"level": "token", "cap": 2.0}, [1] * 5, [0, 1, 1, 0, 0]),
    # mean of max(w, 1/w): (3 + 1 + 1.125) / 3 = 1.708 and 2
    ("sequence-error", {"cap": 1.9}, [1] * 5, [1, 1, 1, 0, 0]),
    ("sequence-error", {"cap": 1.5}, [1] * 5, [0, 0, 0, 0, 0]),
    ("none", {}, [1] * 5, [1, 1, 1, 1, 1]),
]


@pytest.mark.parametrize(("name", "options", "weights", "keep"), BY_HAND)
def test_weights_and_mask_worked_by_hand(name, options, weights, keep):
    batch = hand_2x3()
    # 0.5 is icepop's floor to the last bit only in exact arithmetic.
    batch["rollout_logprobs"] = batch["rollout_logprobs"] - 1e-12
    mask = batch["mask"].bool()
    got = correct(
        name,
        old_logprobs=batch["old_logprobs"],
        rollout_logprobs=batch["rollout_logprobs"],
        mask=mask,
        **options,
    )
    assert got.weights[mask].tolist() == pytest.approx(weights, abs=1e-9)
    assert got.keep[mask].tolist() == [bool(k) for k in keep]
    assert got.weights.isfinite().all()


# grpo on hand_2x3: terms -[1.27, 1, 0.5] and [3, 1.6], slopes -[0, 1, 0.5] and [3, 0].
LOSS_BY_HAND = [
    # weights [2, 1, 1.125 | 0.5, 0.5]: (-(2.54 + 1 + 0.5625) / 3 + 2.3 / 2) / 2
    ("tis", {}, {}, -0.10875, [0, -1 / 6, -0.09375, 0.375, 0]),
    # the first response is rejected and still counted: (0.25 * 4.6 / 2) / 2
    ("mis", {}, {}, 0.2875, [0, 0, 0, 0.1875, 0]),
    ("mis", {}, {"count_rejected": False}, 0.575, [0, 0, 0, 0.375, 0]),
    # tokens 1, 4 and 5 are rejected: -(1 + 1.125 * 0.5) / 3 / 2, and / 2 / 1 where they do not count
    ("icepop", {"cap": 2.0, "floor": 0.6}, {}, -0.2604166667, [0, -1 / 6, -0.09375, 0, 0]),
    (
        "icepop",
        {"cap": 2.0, "floor": 0.6},
        {"count_rejected": False},
        -0.78125,
        [0, -0.5, -0.28125, 0, 0],
    ),
    ("rejection", {"cap": 1.6}, {}, -0.9233333333, [0, -1 / 3, -1 / 6, 0, 0]),
    ("rejection", {"cap": 1.6}, {"count_rejected": True}, -0.4616666667, [0, -1 / 6, -1 / 12, 0, 0]),
    ("sequence-error", {"cap": 1.9}, {}, -0.9233333333, [0, -1 / 3, -1 / 6, 0, 0]),
]


@pytest.mark.parametrize(("name", "bounds", "options", "loss", "gradient"), LOSS_BY_HAND)
def test_loss_and_gradient_worked_by_hand(name, bounds, options, loss, gradient):
    out, got = run("grpo", hand_2x3(), correction=name, **bounds, **options)
    assert out.loss.item() == pytest.approx(loss, abs=1e-9)
    assert got.flatten().tolist() == pytest.approx([*gradient, 0], abs=1e-9)


@pytest.mark.parametrize("correction", ["mis", "icepop", "rejection"])
def test_both_bounds_belong_to_what_is_kept(correction):
    batch = hand_2x3()
    batch["rollout_logprobs"] = batch["old_logprobs"]
    out, _ = run("grpo", batch, correction=correction, floor=1.0, cap=1.0)
    assert out.keep.all()


def test_mis_with_gspo_is_one_line():
    batch, wide = batch_3x4(), {"clip_low": 0.9, "clip_high": 9.0}
    out, gradient = run("gspo", batch, correction="mis", level="sequence", cap=2.0, **wide)
    plain, plain_gradient = run("gspo", batch, **wide)
    # Products of w: 1.2 * 0.8 * 0.9 * 1.3 = 1.1232, 0.3 * 0.6 = 0.18, 1 * 6 * 0.97 = 5.82 (rejected).
    assert out.keep[:, 0].tolist() == [True, True, False]
    weight = torch.tensor([[1.1232], [0.18], [0.0]], dtype=torch.float64)
    torch.testing.assert_close(gradient, plain_gradient * weight)
    assert not torch.allclose(out.loss, plain.loss)


@pytest.mark.parametrize("correction", ["mis", "icepop", "rejection", "sequence-error"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_a_rejected_token_adds_neither_loss_nor_gradient(name, correction):
    off = {"tis_cap": None} if name == "tbpo" else {}
    batch = random_batch(12, mismatch=1.0)
    extras = {"entropy": torch.rand_like(batch["old_logprobs"]), "ref_logprobs": batch["rollout_logprobs"]}
    options = {"correction": correction, "cap": 1.3, "kl_coef": 0.5, "entropy_coef": 0.1}
    out, gradient = run(name, batch | extras, **options, **off)
    rejected = batch["mask"] & ~out.keep
    assert rejected.any()
    assert (gradient[rejected] == 0).all()
    assert out.weights[rejected].gt(0).all()


@pytest.mark.parametrize("name", BUILT_IN)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_uncounted_rejection_equals_never_having_sampled_the_response(name, seed):
    batch = random_batch(seed, mismatch=0.6)
    out, gradient = run(name, batch, correction="rejection", level="geometric", cap=1.1, floor=0.9)
    kept = out.keep.all(-1)
    alone, alone_gradient = run(name, {k: v[kept] for k, v in batch.items()})
    torch.testing.assert_close(out.loss, alone.loss)
    torch.testing.assert_close(gradient[kept], alone_gradient)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_counted_rejection_leaves_the_others_as_they_were(seed):
    batch = random_batch(seed, mismatch=0.6)
    out, gradient = run("grpo", batch, correction="rejection", count_rejected=True)
    _, plain = run("grpo", batch)
    torch.testing.assert_close(gradient, plain * out.keep)


def test_everything_rejected_is_a_zero_loss():
    out, gradient = run("grpo", hand_2x3(), correction="rejection", floor=50.0, cap=60.0)
    assert out.loss.item() == 0
    assert (gradient == 0).all()
    assert out.metrics["rollout_corr/rollout_rs_masked_fraction"].item() == 1
    assert out.metrics["rollout_corr/rollout_rs_seq_masked_fraction"].item() == 1
    assert all(value.isfinite() for value in out.metrics.values())


def test_weight_metrics_worked_by_hand():
    metrics = run("grpo", hand_2x3(), correction="tis")[0].metrics
    mean, square = (2 + 1 + 1.125 + 0.5 + 0.5) / 5, (4 + 1 + 1.265625 + 0.5) / 5
    assert metrics["rollout_corr/rollout_is_mean"].item() == pytest.approx(mean)
    assert metrics["rollout_corr/rollout_is_std"].item() == pytest.approx((square - mean**2) ** 0.5)
    assert metrics["rollout_corr/rollout_is_max"].item() == pytest.approx(2)
    assert metrics["rollout_corr/rollout_is_min"].item() == pytest.approx(0.5)
    assert metrics["rollout_corr/rollout_is_eff_sample_size"].item() == pytest.approx(mean**2 / square)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"].item() == 0


def test_decoupled_ppo_is_an_uncapped_token_weight():
    batch = batch_3x4()
    out, _ = run("grpo", batch, correction="tis", cap=float("inf"))
    mask = batch["mask"].bool()
    mismatch = batch["old_logprobs"] - batch["rollout_logprobs"]
    torch.testing.assert_close(out.weights[mask], mismatch[mask].exp())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tsi"}, "did you mean 'tis'"),
        ({"correction": "ais"}, "Known: tis, mis"),
        ({"correction": "tis", "floor": 0.5}, "Known: level, cap"),
        ({"correction": "icepop", "level": "sequence"}, "Known: cap, floor"),
        ({"correction": "tis", "level": "response"}, "token, sequence, geometric"),
        ({"correction": "none", "cap": 2.0}, "reads no cap or floor"),
    ],
)
def test_a_wrong_option_names_the_right_ones(options, message):
    with pytest.raises(ValueError, match=message):
        run("grpo", hand_2x3(), **options)


@pytest.mark.parametrize("correction", CORRECTIONS)
def test_a_correction_needs_the_engines_logprobs(correction):
    batch = hand_2x3() | {"rollout_logprobs": None}
    assert run("grpo", batch)[0].loss.isfinite()
    with pytest.raises(ValueError, match="rollout_logprobs"):
        run("grpo", batch, correction=correction)
    if correction in ("rejection", "sequence-error"):
        with pytest.raises(ValueError, match="logprobs"):
            batch_denominator("grpo", mask=batch["mask"], correction=correction)
