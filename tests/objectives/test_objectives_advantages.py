"""Group baselines by hand and by property."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from lowbitrl.objectives import group_advantages

rewards_of_groups = st.lists(st.lists(st.integers(-4, 4), min_size=4, max_size=4), min_size=1, max_size=6)


def test_values_worked_by_hand():
    rewards = torch.tensor([1.0, 0.0, 0.0, 1.0, 2.0, 3.0, 4.0, 5.0])
    plain = group_advantages(rewards, group_size=4, scale="none")
    assert plain.advantages.tolist() == [0.5, -0.5, -0.5, 0.5, -1.5, -0.5, 0.5, 1.5]
    assert plain.informative.all()
    assert (plain.num_groups, plain.num_zero_variance) == (2, 0)

    # Sample deviations: sqrt(1 / 3) and sqrt(5 / 3).
    scaled = group_advantages(rewards, group_size=4, eps=0.0).advantages
    assert scaled.tolist() == pytest.approx(
        [0.8660254, -0.8660254, -0.8660254, 0.8660254, -1.1618950, -0.3872983, 0.3872983, 1.1618950]
    )
    # 1 - mean(0, 0, 1), 0 - mean(1, 0, 1), ...
    others = group_advantages(rewards, group_size=4, scale="none", baseline="leave-one-out").advantages
    assert others[:4].tolist() == pytest.approx([2 / 3, -2 / 3, -2 / 3, 2 / 3])


def test_a_group_without_variance_teaches_nothing_and_is_counted():
    # The mean of three 0.9 is not 0.9 in fp32: only comparing the rewards finds them equal.
    rewards = torch.tensor([0.9, 0.9, 0.9, 0.0, 1.0, 0.0, 1.0, 1.0, 1.0])
    for scale in ("std", "none"):
        out = group_advantages(rewards, group_size=3, scale=scale)
        assert out.advantages[[0, 1, 2, 6, 7, 8]].tolist() == [0.0] * 6
        assert out.informative.tolist() == [False] * 3 + [True] * 3 + [False] * 3
        assert (out.num_groups, out.num_zero_variance) == (3, 2)


@pytest.mark.parametrize("baseline", ["mean", "leave-one-out"])
def test_a_group_of_one_has_no_advantage(baseline):
    out = group_advantages(torch.tensor([3.0, 1.0, 2.0]), torch.tensor([7, 5, 5]), baseline=baseline)
    assert out.advantages[0] == 0
    assert out.informative.tolist() == [False, True, True]


@given(rewards_of_groups, st.sampled_from(["std", "none"]), st.sampled_from(["mean", "leave-one-out"]))
@settings(max_examples=40, deadline=None)
def test_groups_do_not_touch_each_other_and_their_order_is_free(groups, scale, baseline):
    options = {"scale": scale, "baseline": baseline}
    together = group_advantages(torch.tensor(groups).flatten(), group_size=4, **options)
    alone = [group_advantages(torch.tensor(group), group_size=4, **options) for group in groups]
    torch.testing.assert_close(together.advantages, torch.cat([one.advantages for one in alone]))
    assert together.num_zero_variance == sum(one.num_zero_variance for one in alone)

    interleaved = torch.arange(len(groups)).repeat(4) * 13 - 5
    shuffled = group_advantages(torch.tensor(groups).T.flatten(), interleaved, **options)
    torch.testing.assert_close(shuffled.advantages.view(4, -1).T.flatten(), together.advantages)
    sums = together.advantages.view(-1, 4).sum(-1)
    torch.testing.assert_close(sums, torch.zeros_like(sums), rtol=0, atol=1e-5)


@given(rewards_of_groups, st.floats(-3, 3), st.floats(0.5, 4))
@settings(max_examples=20, deadline=None)
def test_std_advantages_ignore_the_scale_of_rewards(groups, shift, factor):
    rewards = torch.tensor(groups).flatten().double()
    plain = group_advantages(rewards, group_size=4, eps=0.0)
    moved = group_advantages(rewards * factor + shift, group_size=4, eps=0.0)
    kept = plain.informative
    torch.testing.assert_close(moved.advantages[kept], plain.advantages[kept], rtol=1e-3, atol=1e-4)


def test_an_empty_batch_is_empty():
    out = group_advantages(torch.zeros(0), group_size=4)
    assert out.advantages.shape == (0,)
    assert out.num_groups == 0


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({}, "exactly one"),
        ({"group_size": 2, "group_ids": torch.zeros(5)}, "exactly one"),
        ({"group_size": 2}, "do not divide"),
        ({"group_size": 0}, "do not divide"),
        ({"group_ids": torch.zeros(4)}, "shape of rewards"),
        ({"group_size": 5, "scale": "var"}, "std, none"),
        ({"group_size": 5, "baseline": "loo"}, "leave-one-out"),
    ],
)
def test_wrong_arguments_are_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        group_advantages(torch.ones(5), **arguments)


def test_rewards_must_be_finite():
    with pytest.raises(ValueError, match="finite"):
        group_advantages(torch.tensor([1.0, float("nan")]), group_size=2)
