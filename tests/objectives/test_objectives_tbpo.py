"""TBPO beside GSPO with a dual clip: one surrogate, and the three places where they part (QaRL section 3.2)."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import batch_3x4, hand_2x3, random_batch, run

from lowbitrl.objectives import policy_loss

bounds = st.floats(0.01, 0.5)


def twins(eps_high, delta_low, delta_high):
    """Parameters under which theory says that both have the same surrogate."""
    band = {"eps_high": eps_high, "delta_low": delta_low, "delta_high": delta_high}
    clip = {"clip_low": delta_low, "clip_high": eps_high, "dual_clip": 1 + delta_high}
    return band, clip


@given(seed=st.integers(0, 10_000), eps_high=bounds, delta_low=bounds, delta_high=bounds)
@settings(max_examples=40, deadline=None)
def test_without_its_weight_it_is_gspo_with_a_dual_clip(seed, eps_high, delta_low, delta_high):
    batch = random_batch(seed, spread=0.8)
    band, clip = twins(eps_high, delta_low, delta_high)
    ours, our_gradient = run("tbpo", batch, tis_cap=None, **band)
    theirs, their_gradient = run("gspo", batch, **clip)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(our_gradient, their_gradient)


@given(seed=st.integers(0, 10_000), cap=st.floats(1.01, 1.5))
@settings(max_examples=20, deadline=None)
def test_its_weight_is_geometric_tis(seed, cap):
    batch = random_batch(seed, spread=0.8)
    band, clip = twins(0.2, 0.1, 0.3)
    ours, our_gradient = run("tbpo", batch, tis_cap=cap, **band)
    theirs, their_gradient = run("gspo", batch, correction="tis", level="geometric", cap=cap, **clip)
    assert torch.equal(ours.loss, theirs.loss)
    assert torch.equal(our_gradient, their_gradient)
    assert torch.equal(ours.weights, theirs.weights)


def test_it_differs_from_gspo_without_a_dual_clip_above_the_band_of_a_negative_response():
    batch = hand_2x3()
    batch["logprobs"] = (batch["old_logprobs"] + math.log(1.4)).requires_grad_()
    band, clip = twins(0.3, 0.2, 0.25)
    plain = clip | {"dual_clip": None}
    ours, our_gradient = run("tbpo", batch, tis_cap=None, **band)
    theirs, their_gradient = run("gspo", batch, **plain)
    # A = -2 at ratio 1.4: 2 * 1.25 inside TBPO's band, 2 * 1.4 for GSPO; A = 1 is clipped at 1.3 by both.
    assert ours.loss.item() == pytest.approx((-1.3 + 2.5) / 2)
    assert theirs.loss.item() == pytest.approx((-1.3 + 2.8) / 2)
    assert (our_gradient == 0).all()
    assert their_gradient[1].tolist() == pytest.approx([0.7, 0.7, 0])


def test_it_differs_under_the_token_weight_of_other_recipes():
    batch, (band, clip) = batch_3x4(), twins(0.5, 0.5, 0.5)
    ours, _ = run("tbpo", batch, tis_cap=2.0, **band)
    theirs, _ = run("gspo", batch, correction="tis", level="token", cap=2.0, **clip)
    assert not torch.allclose(ours.loss, theirs.loss)
    assert not torch.allclose(ours.weights, theirs.weights)


def test_it_differs_in_the_unit_of_the_mean_from_a_token_mean():
    batch, (band, clip) = batch_3x4(), twins(0.5, 0.5, 0.5)
    ours, _ = run("tbpo", batch, tis_cap=None, **band)
    theirs, _ = run("gspo", batch, aggregate="token-mean", **clip)
    assert not torch.allclose(ours.loss, theirs.loss)


@given(seed=st.integers(0, 10_000))
@settings(max_examples=30, deadline=None)
def test_outside_the_band_a_response_has_no_gradient_and_inside_all_of_it_has(seed):
    batch = random_batch(seed, spread=0.8)
    out, gradient = run("tbpo", batch)
    mask = batch["mask"]
    length = mask.sum(-1).clamp(min=1)
    ratio = ((batch["logprobs"].detach() - batch["old_logprobs"]) * mask).sum(-1).div(length).exp()
    positive = batch["advantages"] >= 0
    inside = torch.where(positive, ratio <= 1.1, (ratio >= 0.9) & (ratio <= 1.1))
    expected = (inside & (batch["advantages"] != 0)).unsqueeze(-1) & mask
    assert torch.equal(gradient != 0, expected)
    negatives = ~positive & mask.any(-1)
    if negatives.any():
        share = (~inside[negatives]).double().mean().item()
        assert out.metrics["actor/outside_band_negative"].item() == pytest.approx(share)


def test_the_positive_side_has_no_floor():
    batch = hand_2x3()
    batch["logprobs"] = (batch["old_logprobs"] - 3).requires_grad_()
    _, gradient = run("tbpo", batch)
    assert (gradient[0] < 0).all()
    assert (gradient[1] == 0).all()


def test_a_response_that_stands_on_the_edge_still_learns():
    batch = hand_2x3()
    batch["logprobs"] = batch["old_logprobs"].clone().requires_grad_()
    _, gradient = run("tbpo", batch, eps_high=0.0, delta_low=0.0, delta_high=0.0)
    assert (gradient[batch["mask"].bool()] != 0).all()


def test_the_weight_has_no_gradient_and_is_capped():
    batch = hand_2x3()
    batch["old_logprobs"].requires_grad_()
    batch["rollout_logprobs"] = batch["rollout_logprobs"].detach().requires_grad_()
    out = policy_loss("tbpo", **batch, tis_cap=1.2)
    out.loss.backward()
    assert batch["old_logprobs"].grad is None
    assert batch["rollout_logprobs"].grad is None
    assert out.weights[:, 0].tolist() == pytest.approx([1.2, 0.5])


def test_missing_rollout_logprobs_name_the_way_out():
    batch = hand_2x3() | {"rollout_logprobs": None}
    with pytest.raises(ValueError, match="tis_cap=None"):
        run("tbpo", batch)
    assert run("tbpo", batch, tis_cap=None)[0].loss.isfinite()


@pytest.mark.parametrize("correction", ["tis", "mis", "icepop"])
def test_two_mismatch_weights_at_once_are_refused(correction):
    with pytest.raises(ValueError, match="tis_cap=None hands that to"):
        run("tbpo", hand_2x3(), correction=correction)
    assert run("tbpo", hand_2x3(), correction=correction, tis_cap=None)[0].loss.isfinite()


def test_a_pure_selection_composes_with_its_weight():
    out, gradient = run("tbpo", hand_2x3(), correction="rejection", level="geometric", floor=0.4, cap=1.4)
    assert out.weights[:, 0].tolist() == pytest.approx([1.5, 0.5])
    assert out.keep.tolist() == [[False] * 3, [True] * 3]
    assert (gradient[0] == 0).all()
