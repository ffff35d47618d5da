"""A batch dealt out to ranks: the same number of passes for each, and in every round passes of like length.

Every pass of a sharded model is a pass of all ranks, layer by layer, so a round takes as long as its longest
micro-batch. Rows are cut by length, so neighbours in length form a round.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

Cut = Callable[[int], list[list[int]]]


@dataclass(frozen=True)
class Pass:
    """One forward pass of a rank.

    Attributes:
        rows: of the batch.
        index: of the micro-batch among all ranks'; None: run for company only, and counts for nothing.

    Example:
        three rows on two ranks: Pass([0, 1], 0) beside Pass([2], 1)
    """

    rows: list[int]
    index: int | None


def deal(cut: Cut, limit: int, lengths: Sequence[int], ranks: int) -> list[list[Pass]]:
    """The passes of every rank.

    Among as many rounds as one process's micro-batches need, the lowest limit of tokens that still fits into
    them makes the passes of a round as equal as rows allow. Where passes are lacking the largest are halved;
    where rows run out, ranks repeat the shortest row without counting it.

    Args:
        cut: tokens -> rows of each micro-batch of at most so many.
        limit: most tokens of a micro-batch. lengths: tokens of every row.
    """
    groups = cut(limit)
    if not groups or ranks == 1:
        return [[Pass(group, index) for index, group in enumerate(groups)] for _ in range(ranks)]
    groups = _filled(_evened(cut, limit, max(lengths), -(-len(groups) // ranks) * ranks), lengths, ranks)
    idle = Pass([min(range(len(lengths)), key=lambda i: lengths[i])], None)
    passes = [Pass(group, index) for index, group in enumerate(groups)]
    passes += [idle] * (-len(passes) % ranks)
    ordered = sorted(passes, key=lambda p: (-_cost(p.rows, lengths), p.index is None))
    return [ordered[rank::ranks] for rank in range(ranks)]


def _evened(cut: Cut, high: int, low: int, seats: int) -> list[list[int]]:
    """Groups of the lowest limit between `low` and `high` that makes at most `seats` of them."""
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if len(cut(middle)) <= seats else (middle + 1, high)
    return cut(high)


def _filled(groups: list[list[int]], lengths: Sequence[int], ranks: int) -> list[list[int]]:
    """Groups, the largest halved until their number is a multiple of `ranks`, as far as rows go."""
    while len(groups) % ranks and any(len(group) > 1 for group in groups):
        largest = max((g for g in groups if len(g) > 1), key=lambda g: _cost(g, lengths))
        half = len(largest) // 2
        groups = [g for g in groups if g is not largest] + [largest[:half], largest[half:]]
    return groups


def _cost(rows: Sequence[int], lengths: Sequence[int]) -> int:
    return sum(lengths[i] for i in rows)
