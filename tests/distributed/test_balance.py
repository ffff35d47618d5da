"""Dealing a batch: every row once, as many passes for each rank, rounds of like length."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lowbitrl.distributed.balance import Pass, deal
from lowbitrl.trainer.batch import micro_batches

LENGTHS = st.lists(st.integers(1, 60), min_size=1, max_size=40)


def cutting(lengths, layout):
    return lambda tokens: micro_batches(lengths, tokens, layout)


@given(LENGTHS, st.integers(1, 5), st.sampled_from(["padded", "packed"]))
def test_every_row_is_dealt_once_and_ranks_make_equally_many_passes(lengths, ranks, layout):
    dealt = deal(cutting(lengths, layout), 64, lengths, ranks)[:ranks]
    counted = {p.index: p for passes in dealt for p in passes if p.index is not None}
    assert len({len(passes) for passes in dealt}) == 1
    assert sorted(row for p in counted.values() for row in p.rows) == list(range(len(lengths)))
    assert sorted(counted) == list(range(len(counted)))
    # Company is kept only where there are fewer rows than seats.
    assert len(counted) == ranks * len(dealt[0]) or all(len(p.rows) == 1 for p in counted.values())
    width = max if layout == "padded" else lambda costs: sum(costs) / len(costs)
    assert all(width([lengths[i] for i in p.rows]) * len(p.rows) <= 64 for p in counted.values())


@given(LENGTHS, st.integers(2, 4))
def test_many_rows_of_like_length_make_even_rounds(lengths, ranks):
    lengths = [40 + length % 5 for length in lengths * 8]
    dealt = deal(cutting(lengths, "padded"), 180, lengths, ranks)
    costs = [sum(sum(lengths[i] for i in p.rows) for p in passes) for passes in dealt]
    # A round differs by one row at most, the last one by what did not divide.
    assert max(costs) - min(costs) <= 44 * len(dealt[0])


def test_five_equal_rows_are_three_and_two():
    dealt = deal(cutting([41] * 5, "padded"), 180, [41] * 5, 2)
    assert sorted(len(passes[0].rows) for passes in dealt) == [2, 3]


def test_one_rank_runs_what_one_process_runs():
    lengths = [9, 3, 5, 7, 2]
    groups = micro_batches(lengths, 10, "padded")
    assert [p.rows for p in deal(cutting(lengths, "padded"), 10, lengths, 1)[0]] == groups


def test_fewer_rows_than_ranks_leave_the_others_company_to_keep():
    assert deal(cutting([4], "padded"), 8, [4], 2) == [[Pass([0], 0)], [Pass([0], None)]]


def test_an_empty_batch_has_no_passes():
    assert deal(cutting([], "padded"), 8, [], 2) == [[], []]


@pytest.mark.parametrize(("ranks", "counts"), [(2, [3, 3]), (3, [2, 2, 2])])
def test_a_batch_that_fits_one_pass_is_spread_over_all(ranks, counts):
    dealt = deal(cutting([4] * 6, "padded"), 100, [4] * 6, ranks)
    assert [len(passes[0].rows) for passes in dealt] == counts
