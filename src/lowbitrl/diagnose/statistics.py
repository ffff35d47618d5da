"""Intervals by bootstrap over responses: tokens of one response are not independent, responses are.

The same draw of responses is used for every figure, so a difference of two figures on the same
tokens is a paired one.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

RESAMPLES = 500
LEVEL = 0.95
RATIO_LIMIT = 20.0  # log-ratios are cut to +-20 before exp, as in lowbitrl.objectives
Statistic = Literal["mean", "p99", "max", "effective_share"]
Values = NDArray[np.float64]


class Estimate(NamedTuple):
    """A figure and the ends of its 95% interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.4g} [{self.low:.4g}, {self.high:.4g}]"


def bootstrap(values: Sequence[Tensor], statistic: Statistic = "mean") -> Estimate:
    """A statistic over all tokens of all responses, with its interval.

    Args:
        values: one (T_i,) tensor a response.

    Raises:
        ValueError: no responses.
    """
    if not values:
        raise ValueError("no responses to measure; sample at least one")
    rows = [v.double().cpu().numpy() for v in values]
    whole = STATISTICS[statistic](np.concatenate(rows))
    draws = _draws(len(rows))
    if statistic == "mean":
        sums, counts = np.array([r.sum() for r in rows]), np.array([len(r) for r in rows])
        drawn = sums[draws].sum(1) / counts[draws].sum(1)
    else:
        drawn = np.array([STATISTICS[statistic](np.concatenate([rows[i] for i in draw])) for draw in draws])
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(whole, float(low), float(high))


def paired_gain(before: Sequence[Tensor], after: Sequence[Tensor]) -> Estimate:
    """Mean |before| - mean |after| over the same tokens; above zero where `after` is closer."""
    return bootstrap([b.abs() - a.abs() for b, a in zip(before, after, strict=True)])


def share_of(term: Sequence[Tensor], total: Sequence[Tensor]) -> Estimate:
    """sum(term * total) / sum(total^2): the shares of terms that add up to `total` add up to 1."""
    products = np.array([float((a.double() * b.double()).sum()) for a, b in zip(term, total, strict=True)])
    squares = np.array([float(b.double().square().sum()) for b in total])
    if not squares.sum():
        return Estimate(0.0, 0.0, 0.0)
    draws = _draws(len(squares))
    drawn = products[draws].sum(1) / np.maximum(squares[draws].sum(1), np.finfo(float).tiny)
    low, high = np.quantile(drawn, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Estimate(float(products.sum() / squares.sum()), float(low), float(high))


def _draws(count: int) -> NDArray[np.int64]:
    return np.random.default_rng(0).integers(count, size=(RESAMPLES, count))


def _p99(values: Values) -> float:
    """The smallest value with 99% at or below it, as in `lowbitrl.objectives`."""
    rank = math.ceil(0.99 * len(values)) - 1
    return float(np.partition(values, rank)[rank])


def _effective_share(weights: Values) -> float:
    return float(weights.sum() ** 2 / (len(weights) * np.square(weights).sum()))


STATISTICS: dict[Statistic, Callable[[Values], float]] = {
    "mean": lambda values: float(values.mean()),
    "p99": _p99,
    "max": lambda values: float(values.max()),
    "effective_share": _effective_share,
}
