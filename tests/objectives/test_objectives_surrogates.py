"""Every surrogate by hand, by the papers' formulas in scalar loops, by finite differences, by property."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import BUILT_IN, INF, NAN, batch_3x4, detached, hand_2x3, random_batch, run, textbook

from lowbitrl.objectives import get_objective, policy_loss

LN6, LN5, LN4, LN3 = (math.log(p) for p in (0.6, 0.5, 0.4, 0.3))

# On hand_2x3 with every default. Loss, then the gradient of the five valid tokens.
BY_HAND = {
    # -(1.27 + 1 + 0.5) / 3 and (3 + 1.6) / 2, halved
    "grpo": (0.6883333333, [0, -1 / 6, -1 / 12, 0.75, 0]),
    # (-(1.2 + 1 + 0.5) + 4.6) / 2
    "dr_grpo": (0.95, [0, -0.5, -0.25, 1.5, 0]),
    # (-(1.28 + 1 + 0.5) + 4.6) / 5
    "dapo": (0.364, [0, -0.2, -0.1, 0.6, 0]),
    # s = 0.75^(1/3) passes; 0.75^(1/2) < 0.9997 is clipped: (-0.9085603 + 1.9994) / 2
    "gspo": (0.5454198518, [-0.1514267161] * 3 + [0, 0]),
    # weights 1.5 and 0.5; 0.75^(1/2) is under the band's 0.9: (-1.5 * 0.9085603 + 0.5 * 1.8) / 2
    "tbpo": (-0.2314202223, [-0.2271400741] * 3 + [0, 0]),
    # gates 2.4898373 + 2 + 1.5101627 = 6, and 4 / 1.05 for the pair around 1: (-6 / 3 + 4 / 1.05) / 2
    "sapo": (0.9047619048, [-0.2350037122, -1 / 6, -0.0783345707, 0.7006048675, 0.2335349558]),
    "cispo": (
        (-(1.5 * LN6 + LN5 + 0.5 * LN4) + 2 * (1.5 * LN6 + 0.5 * LN3)) / 5,
        [-0.3, -0.2, -0.1, 0.6, 0.2],
    ),
    "positive_only": (-0.4616666667, [0, -1 / 6, -1 / 12, 0, 0]),
    "reinforce": ((-(LN6 + LN5 + LN4) + 2 * (LN6 + LN3)) / 5, [-0.2, -0.2, -0.2, 0.4, 0.4]),
}


@pytest.mark.parametrize("name", BUILT_IN)
def test_value_and_gradient_worked_by_hand(name):
    loss, gradient = BY_HAND[name]
    out, got = run(name, hand_2x3())
    assert out.loss.item() == pytest.approx(loss, abs=1e-9)
    assert got.flatten().tolist() == pytest.approx([*gradient, 0], abs=1e-9)


VARIANTS = [(name, {}) for name in BUILT_IN] + [
    ("grpo", {"dual_clip": 2.0}),
    ("dapo", {"dual_clip": 1.1, "clip_low": 0.05}),
    ("gspo", {"clip_low": 0.3, "clip_high": 0.01}),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.3, "dual_clip": 1.5}),
    ("gspo", {"clip_low": 0.5, "clip_high": 0.3, "token_gradient": True}),
    ("tbpo", {"eps_high": 0.01, "delta_low": 0.02, "delta_high": 2.0, "tis_cap": 1.01}),
    ("cispo", {"clip_low": 0.2, "clip_high": 0.3}),
]


@pytest.mark.parametrize(("name", "parameters"), VARIANTS)
def test_value_and_gradient_by_the_papers_formulas(name, parameters):
    batch = batch_3x4()
    loss, gradient = textbook(name, batch, **parameters)
    out, got = run(name, batch, **parameters)
    assert out.loss.item() == pytest.approx(loss, abs=1e-12)
    torch.testing.assert_close(got, gradient, rtol=0, atol=1e-12)


# CISPO and GSPO-token stop a gradient on purpose: their derivative is not that of their value.
@pytest.mark.parametrize("name", [n for n in BUILT_IN if n != "cispo"])
@pytest.mark.parametrize("seed", range(3))
def test_gradient_by_finite_differences(name, seed):
    batch = random_batch(seed)
    _, gradient = run(name, batch, entropy_coef=0.0)
    step = 1e-6
    for index in torch.nonzero(batch["mask"]).tolist():
        ends = []
        for sign in (1, -1):
            moved = detached(batch)
            moved["logprobs"][tuple(index)] += sign * step
            ends.append(policy_loss(name, **moved).loss.item())
        assert gradient[tuple(index)].item() == pytest.approx((ends[0] - ends[1]) / (2 * step), abs=2e-8)


@pytest.mark.parametrize("name", BUILT_IN)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=15, deadline=None)
def test_on_policy_is_the_plain_policy_gradient(name, seed):
    batch = random_batch(seed, spread=0.0, mismatch=0.0)
    _, gradient = run(name, batch, aggregate="token-mean")
    advantages, mask = batch["advantages"].unsqueeze(-1), batch["mask"]
    advantages = advantages.clamp(min=0) if name == "positive_only" else advantages
    torch.testing.assert_close(gradient, -advantages * mask / mask.sum().clamp(min=1))


@pytest.mark.parametrize("name", BUILT_IN)
@given(seed=st.integers(0, 10_000))
@settings(max_examples=10, deadline=None)
def test_order_of_responses_and_padding_change_nothing(name, seed):
    batch = random_batch(seed)
    out, gradient = run(name, batch)
    order = torch.randperm(5, generator=torch.Generator().manual_seed(seed))
    shuffled, shuffled_gradient = run(name, {k: v[order] for k, v in batch.items()})
    torch.testing.assert_close(shuffled.loss, out.loss)
    torch.testing.assert_close(shuffled_gradient, gradient[order])

    padded = {k: torch.nn.functional.pad(v, (1, 2)) if v.dim() == 2 else v for k, v in batch.items()}
    wide, wide_gradient = run(name, padded)
    torch.testing.assert_close(wide.loss, out.loss)
    torch.testing.assert_close(wide_gradient[:, 1:-2], gradient)


@pytest.mark.parametrize("poison", [NAN, INF, -INF, 1e30])
@pytest.mark.parametrize("name", BUILT_IN)
def test_masked_positions_may_hold_anything(name, poison):
    batch = random_batch(4, dtype=torch.float32)
    batch["mask"][2] = False
    clean, clean_gradient = run(name, batch, kl_coef=0.1, ref_logprobs=batch["old_logprobs"])
    dirty = {
        k: v if v.dim() == 1 or k == "mask" else v.detach().masked_fill(~batch["mask"], poison)
        for k, v in batch.items()
    }
    dirty["advantages"] = batch["advantages"].index_fill(0, torch.tensor(2), NAN)
    out, gradient = run(name, dirty, kl_coef=0.1, ref_logprobs=dirty["old_logprobs"])
    assert out.loss.equal(clean.loss)
    assert gradient.equal(clean_gradient)
    assert (gradient[~batch["mask"]] == 0).all()
    assert {k: v.item() for k, v in out.metrics.items()} == {k: v.item() for k, v in clean.metrics.items()}
    assert out.per_token.isfinite().all()


@pytest.mark.parametrize("correction", ["none", "tis", "mis", "icepop", "rejection", "sequence-error"])
@pytest.mark.parametrize("name", BUILT_IN)
def test_extreme_log_ratios_stay_finite(name, correction):
    off = {"tis_cap": None} if name == "tbpo" and correction in ("tis", "mis", "icepop") else {}
    batch = random_batch(1, num_responses=4, dtype=torch.float32)
    batch["mask"][:] = True
    batch["logprobs"] = torch.tensor([[-1e4], [1e4], [0.0], [-1e4]]).expand(4, 7)
    batch["old_logprobs"] = torch.tensor([[0.0], [-1e4], [-1e4], [1e4]]).expand(4, 7)
    batch["rollout_logprobs"] = torch.tensor([[1e4], [1e4], [-1e4], [-1e4]]).expand(4, 7)
    batch["advantages"] = torch.tensor([1.0, -1.0, -2.0, 0.0])
    out, gradient = run(name, batch, correction=correction, **off)
    assert out.loss.isfinite()
    assert gradient.isfinite().all()
    assert all(value.isfinite() for value in out.metrics.values())


@pytest.mark.parametrize("num_responses", [0, 3])
@pytest.mark.parametrize("name", BUILT_IN)
def test_nothing_to_learn_from_is_a_zero_loss(name, num_responses):
    batch = random_batch(0, num_responses=num_responses)
    batch["mask"] = torch.zeros_like(batch["mask"])
    out, gradient = run(name, batch)
    assert out.loss.item() == 0
    assert (gradient == 0).all()
    assert all(value.isfinite() for value in out.metrics.values())


def test_a_row_without_tokens_is_no_response():
    batch = random_batch(3)
    batch["mask"][0] = False
    without, _ = run("grpo", {k: v[1:] for k, v in batch.items()})
    assert run("grpo", batch)[0].loss.item() == pytest.approx(without.loss.item())


def test_gspo_token_differs_only_once_single_tokens_are_treated_apart():
    batch, wide = random_batch(7), {"clip_low": 0.9, "clip_high": 9.0}
    same = [run("gspo", batch, token_gradient=flag, **wide) for flag in (False, True)]
    assert same[0][0].loss.item() == pytest.approx(same[1][0].loss.item())
    torch.testing.assert_close(same[0][1], same[1][1])
    apart = [run("gspo", batch, token_gradient=flag, correction="tis", **wide)[1] for flag in (False, True)]
    assert not torch.allclose(apart[0], apart[1])


def test_dr_grpo_with_its_constant_is_the_sum_over_a_constant():
    batch = batch_3x4()
    plain, _ = run("dr_grpo", batch)
    normed, _ = run("dr_grpo", batch, aggregate="seq-mean-token-sum-norm", max_tokens=50)
    assert normed.loss.item() == pytest.approx(plain.loss.item() / 50)


@pytest.mark.parametrize(
    ("name", "parameters"),
    [
        ("grpo", {"clip_low": 1.5}),
        ("grpo", {"clip_high": -0.1}),
        ("gspo", {"dual_clip": 1.0}),
        ("tbpo", {"delta_low": 1.2}),
        ("tbpo", {"eps_high": -0.1}),
        ("tbpo", {"tis_cap": 0.0}),
        ("sapo", {"tau_negative": 0.0}),
        ("cispo", {"clip_low": -1.0}),
    ],
)
def test_bounds_that_bound_nothing_are_refused(name, parameters):
    with pytest.raises(ValueError, match=next(iter(parameters))):
        run(name, batch_3x4(), **parameters)


def test_clip_metrics_count_by_sign_of_the_advantage():
    out, _ = run("grpo", hand_2x3())
    assert out.metrics["actor/pg_clipfrac"].item() == pytest.approx(2 / 5)
    assert out.metrics["actor/pg_clipfrac_positive"].item() == pytest.approx(1 / 3)
    assert out.metrics["actor/pg_clipfrac_negative"].item() == pytest.approx(1 / 2)
    assert out.metrics["actor/outside_band_negative"].item() == 0
    band, _ = run("tbpo", hand_2x3())
    assert band.metrics["actor/outside_band_positive"].item() == 0
    assert band.metrics["actor/outside_band_negative"].item() == 1


def test_a_response_is_outside_when_every_valid_token_is_and_zero_advantage_has_no_sign():
    batch = hand_2x3()
    batch["logprobs"] = (batch["old_logprobs"] - 1).requires_grad_()
    batch["mask"][0, 0] = 0
    batch["advantages"][1] = -1.0
    metrics = run("grpo", batch)[0].metrics
    assert metrics["actor/outside_band_negative"].item() == 1
    batch["advantages"][0] = 0.0
    with_zero = run("grpo", batch)[0].metrics
    assert with_zero["actor/outside_band_negative"].item() == 1
    assert with_zero["actor/pg_clipfrac_negative"].item() == 1
    assert with_zero["actor/pg_clipfrac_positive"].item() == 0


def test_defaults_are_the_documented_ones():
    assert get_objective("grpo").parameters == {"clip_low": 0.2, "clip_high": 0.27, "dual_clip": None}
    assert get_objective("tbpo").parameters == {
        "eps_high": 0.1,
        "delta_low": 0.1,
        "delta_high": 0.1,
        "tis_cap": 2.0,
    }
