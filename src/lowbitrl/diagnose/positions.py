"""Mismatch along a response: by position, by length, and where responses go wrong.

An error token is one that the learner gives less than 2% (QaRL section 3.2's example of a tail
token). Repetition starts where an 8-gram first occurs again in its response.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch

from lowbitrl.diagnose.lab import Drawn, Scores
from lowbitrl.diagnose.statistics import bootstrap

PROBABILITY_FLOOR = 0.02
NGRAM = 8
BINS = 12


def by_position(diffs: Scores, bins: int = BINS) -> list[dict[str, Any]]:
    """Mean |d| of tokens by their place in the response: [first, last] of each bin, equal widths."""
    longest = max(len(d) for d in diffs)
    width = math.ceil(longest / bins)
    rows = []
    for first in range(0, longest, width):
        parts = [d[first : first + width].abs() for d in diffs if len(d) > first]
        last = min(first + width, longest) - 1
        rows.append({"first": first, "last": last, "tokens": sum(map(len, parts)), "mean": bootstrap(parts)})
    return rows


def by_length(diffs: Scores) -> list[dict[str, float]]:
    """A row a response: its length, mean |d| and |sum d| (what a sequence-level ratio sees)."""
    return [{"length": len(d), "mean": float(d.abs().mean()), "sum": float(d.sum())} for d in diffs]


def onsets(learner: Scores, drawn: Drawn) -> dict[str, Any]:
    """Where error tokens and repetition start, as positions in the response; None where they never do."""
    floor = math.log(PROBABILITY_FLOOR)
    errors = [_first(scores < floor) for scores in learner]
    repeats = [repetition_onset(c.token_ids) for c in drawn.completions]
    return {
        "error_tokens": sum(int((s < floor).sum()) for s in learner) / drawn.tokens,
        "error_onset": errors,
        "repetition_onset": repeats,
        "responses_with_errors": _share(errors),
        "responses_with_repetition": _share(repeats),
    }


def repetition_onset(tokens: Sequence[int], ngram: int = NGRAM) -> int | None:
    """Position at which an n-gram that occurred earlier in `tokens` first starts again.

    Example:
        >>> repetition_onset([1, 2, 3, 1, 2, 3], ngram=2)
        3
    """
    seen: set[tuple[int, ...]] = set()
    for position in range(len(tokens) - ngram + 1):
        gram = tuple(tokens[position : position + ngram])
        if gram in seen:
            return position
        seen.add(gram)
    return None


def _first(hits: torch.Tensor) -> int | None:
    found = hits.nonzero()
    return int(found[0]) if len(found) else None


def _share(onsets: Sequence[int | None]) -> float:
    return sum(o is not None for o in onsets) / len(onsets)
