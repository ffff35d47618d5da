"""Averages by hand, and that micro-batches and ranks add up to the whole batch."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from objective_cases import BUILT_IN, random_batch, run

from lowbitrl.objectives import AGGREGATES, aggregate_loss, batch_denominator, denominator_of

LOSS = torch.tensor([[1.0, 2.0, 3.0], [4.0, 100.0, 100.0], [5.0, 7.0, 100.0], [100.0, 100.0, 100.0]])
MASK = torch.tensor([[1, 1, 1], [1, 0, 0], [1, 1, 0], [0, 0, 0]]).bool()
# (denominator, loss) of the six tokens above; the last row is not a response.
BY_HAND = {
    "token-mean": (6, 22 / 6),
    "seq-mean-token-mean": (3, (2 + 4 + 6) / 3),
    "seq-mean-token-sum": (3, 22 / 3),
    "seq-mean-token-sum-norm": (30, 22 / 30),
}


@pytest.mark.parametrize("mode", AGGREGATES)
def test_values_worked_by_hand(mode):
    max_tokens = 10 if mode == "seq-mean-token-sum-norm" else None
    denominator, loss = BY_HAND[mode]
    assert denominator_of(MASK, mode, max_tokens=max_tokens).item() == denominator
    assert aggregate_loss(LOSS, MASK, mode, max_tokens=max_tokens).item() == pytest.approx(loss)


@pytest.mark.parametrize(
    ("mode", "counted", "uncounted"),
    [
        ("token-mean", 15 / 6, 15 / 4),
        ("seq-mean-token-mean", ((1 + 2) / 3 + 0 + 12 / 2) / 3, ((1 + 2) / 2 + 12 / 2) / 2),
        ("seq-mean-token-sum", 15 / 3, 15 / 2),
    ],
)
def test_rejected_tokens_leave_the_denominator_only_when_asked(mode, counted, uncounted):
    kept = MASK.clone()
    kept[0, 2] = kept[1, 0] = False
    assert aggregate_loss(LOSS, kept, mode, counted_BT=MASK).item() == pytest.approx(counted)
    assert aggregate_loss(LOSS, kept, mode).item() == pytest.approx(uncounted)


@pytest.mark.parametrize("name", BUILT_IN)
@pytest.mark.parametrize("mode", AGGREGATES)
@given(seed=st.integers(0, 10_000), correction=st.sampled_from(["none", "mis", "rejection"]))
@settings(max_examples=8, deadline=None)
def test_any_split_adds_up_to_the_whole_batch(name, mode, seed, correction):
    """In fp32, over random splits by response, to 1e-6: micro-batches in a row or ranks side by side."""
    off = {"tis_cap": None} if name == "tbpo" and correction == "mis" else {}
    options = {"aggregate": mode, "correction": correction}
    options |= {"max_tokens": 9} if mode == "seq-mean-token-sum-norm" else {}
    batch = random_batch(seed, num_responses=8, dtype=torch.float32)
    whole, whole_gradient = run(name, batch, **options, **off)

    part_of = torch.randint(0, 3, (8,), generator=torch.Generator().manual_seed(seed))
    parts = [{k: v[part_of == p] for k, v in batch.items()} for p in range(3)]
    sides = ("mask", "old_logprobs", "rollout_logprobs")
    shares = [batch_denominator(name, **{k: part[k] for k in sides}, **options) for part in parts]
    outs = [run(name, part, denominator=sum(shares), **options, **off) for part in parts]
    total = sum(out.loss for out, _ in outs)
    gradient = torch.zeros_like(whole_gradient)
    for p, (_, part_gradient) in enumerate(outs):
        gradient[part_of == p] = part_gradient
    torch.testing.assert_close(total, whole.loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(gradient, whole_gradient, rtol=1e-6, atol=1e-6)


def test_the_denominator_may_be_a_number_and_less_than_one():
    batch = random_batch(2)
    whole, _ = run("grpo", batch)
    share = batch_denominator("grpo", mask=batch["mask"])
    averaged, _ = run("grpo", batch, denominator=share.item() / 64)
    assert averaged.loss.item() == pytest.approx(64 * whole.loss.item())


def test_per_token_is_what_an_engine_needs_to_average_itself():
    batch = random_batch(5, mismatch=0.8)
    out, _ = run("grpo", batch, correction="icepop", aggregate="token-mean")
    mask = batch["mask"]
    by_hand = out.per_token[mask & out.keep].sum() / mask.sum()
    assert out.loss.item() == pytest.approx(by_hand.item())
    assert (out.per_token[~mask] == 0).all()


def test_modes_and_constants_that_do_not_fit_are_refused():
    with pytest.raises(ValueError, match="token-mean, seq-mean-token-mean"):
        aggregate_loss(LOSS, MASK, "mean")
    with pytest.raises(ValueError, match="max_tokens"):
        aggregate_loss(LOSS, MASK, "seq-mean-token-sum-norm")
    with pytest.raises(ValueError, match="max_tokens belongs to"):
        denominator_of(MASK, "token-mean", max_tokens=5)
