"""Divergence, entropy and length terms by hand, by gradient and by expectation."""

import math

import pytest
import torch
from objective_cases import NAN, hand_2x3, random_batch, run

from lowbitrl.objectives import (
    entropy_of,
    kl_estimate,
    overlong_filter,
    penalize_kl,
    policy_loss,
    soft_overlong_penalty,
)

LN2 = math.log(2)
MASK = torch.tensor([[1, 1, 0]])
D = torch.tensor([[LN2, -LN2, NAN]])


@pytest.mark.parametrize(
    ("kind", "values"),
    [("k1", [LN2, -LN2, 0]), ("k2", [LN2**2 / 2] * 2 + [0]), ("k3", [0.5 + LN2 - 1, 2 - LN2 - 1, 0])],
)
def test_estimates_worked_by_hand(kind, values):
    reference = torch.full((1, 3), -1.0)
    assert kl_estimate(D + reference, reference, MASK, kind=kind)[0].tolist() == pytest.approx(values)


def test_in_expectation_k1_and_k3_are_the_kl_and_k2_has_its_gradient():
    logits = torch.randn(6, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    logits.requires_grad_()
    reference = torch.log_softmax(torch.arange(6, dtype=torch.float64) / 3, 0)
    logprobs = torch.log_softmax(logits, 0)
    probs = logprobs.exp().detach()
    kl = (logprobs.exp() * (logprobs - reference)).sum()
    (true_gradient,) = torch.autograd.grad(kl, logits, retain_graph=True)
    sides = logprobs.unsqueeze(0), reference.unsqueeze(0), torch.ones(1, 6)
    gradient = {}
    for kind in ("k1", "k2", "k3"):
        expected = (probs * kl_estimate(*sides, kind=kind)[0]).sum()
        (gradient[kind],) = torch.autograd.grad(expected, logits, retain_graph=True)
        if kind != "k2":
            assert expected.item() == pytest.approx(kl.item())
    torch.testing.assert_close(gradient["k2"], true_gradient)
    torch.testing.assert_close(gradient["k1"], torch.zeros_like(true_gradient))
    assert not torch.allclose(gradient["k3"], true_gradient)


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_extreme_divergence_stays_finite(kind):
    ends = torch.tensor([[1e4, -1e4, 0.0]], requires_grad=True)
    value = kl_estimate(ends, torch.zeros(1, 3), torch.ones(1, 3), kind=kind).sum()
    value.backward()
    assert value.isfinite()
    assert ends.grad.isfinite().all()


def test_kl_and_entropy_enter_the_loss_with_their_sign():
    batch = hand_2x3()
    extras = {"ref_logprobs": batch["old_logprobs"], "entropy": torch.full((2, 3), 2.0, dtype=torch.float64)}
    plain, _ = run("grpo", batch | extras)
    both, _ = run("grpo", batch | extras, kl_coef=0.1, kl_kind="k1", entropy_coef=0.01)
    # k1 sums to ln 0.75 in either response: means ln 0.75 / 3 and ln 0.75 / 2.
    kl = (math.log(0.75) / 3 + math.log(0.75) / 2) / 2
    assert both.loss.item() == pytest.approx(plain.loss.item() + 0.1 * kl - 0.01 * 2)
    assert both.metrics["actor/kl_loss"].item() == pytest.approx(2 * math.log(0.75) / 5)


def test_the_entropy_bonus_has_a_gradient():
    batch = random_batch(0)
    entropy = torch.rand_like(batch["old_logprobs"]).requires_grad_()
    out = policy_loss("dapo", **batch, entropy=entropy, entropy_coef=0.5)
    (gradient,) = torch.autograd.grad(out.loss, entropy)
    torch.testing.assert_close(gradient, -0.5 * batch["mask"].double() / batch["mask"].sum())


def test_reward_side_kl_is_the_summed_estimate():
    rewards = penalize_kl(torch.tensor([1.0]), D, torch.zeros(1, 3), MASK, coef=0.5, kind="k3")
    assert rewards.item() == pytest.approx(1 - 0.5 * ((0.5 + LN2 - 1) + (2 - LN2 - 1)))
    unchanged = penalize_kl(torch.tensor([1.0]), D, torch.zeros(1, 3), MASK, coef=0.5)
    assert unchanged.item() == pytest.approx(1)


def test_soft_overlong_penalty_is_dapos_ramp():
    lengths = torch.tensor([10, 80, 85, 90, 100, 500])
    assert soft_overlong_penalty(lengths, max_length=100, buffer=20).tolist() == pytest.approx(
        [0, 0, -0.25, -0.5, -1, -1]
    )
    with pytest.raises(ValueError, match="buffer"):
        soft_overlong_penalty(lengths, max_length=10, buffer=11)


def test_overlong_filter_takes_the_response_out_of_loss_and_denominator():
    batch = random_batch(2)
    truncated = torch.tensor([False, True, False, False, True])
    filtered, gradient = run("grpo", batch | {"mask": overlong_filter(batch["mask"], truncated)})
    alone, alone_gradient = run("grpo", {k: v[~truncated] for k, v in batch.items()})
    assert filtered.loss.item() == pytest.approx(alone.loss.item())
    torch.testing.assert_close(gradient[~truncated], alone_gradient)
    assert (gradient[truncated] == 0).all()


def test_entropy_of_logits():
    logits = torch.tensor([[0.0, 0.0, 0.0, 0.0], [0.0, 0.0, -math.inf, -math.inf]], requires_grad=True)
    entropy = entropy_of(logits)
    assert entropy.tolist() == pytest.approx([math.log(4), math.log(2)])
    entropy.sum().backward()
    assert logits.grad.isfinite().all()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"kl_coef": 0.1}, "needs ref_logprobs"),
        ({"entropy_coef": 0.1}, "needs entropy"),
    ],
)
def test_a_penalty_needs_its_tensor(options, message):
    with pytest.raises(ValueError, match=message):
        run("grpo", hand_2x3(), **options)


def test_an_unknown_estimate_is_refused():
    with pytest.raises(ValueError, match="k1, k2, k3"):
        kl_estimate(D, D, MASK, kind="k4")
