"""Which backend, kernel variant and share of K for how many tokens: read from a table that a script measured.

``w4a16_choices.json`` is written by ``benchmarks/choose_products.py`` on the GPU it names. A shape that is not in
it takes the row of the nearest one; another GPU than the table's takes the same rows, as the best guess there is.
"""

from __future__ import annotations

import functools
import itertools
import json
import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

CHUNK = 128
TOKENS_A_TILE = 8
# 0 begins when the launch before has ended, 1 once that has only sums left to add, 2 at once. All in the table
# are 0 until a GPU has shown that overlapping products read what the one before wrote (test_products_cuda.py).
OVERLAPS = (0, 1, 2)
TABLE = Path(__file__).parent / "w4a16_choices.json"
BUILT = Path(__file__).parent / "cuda" / "w4a16_variants.h"


@dataclass(frozen=True)
class Variant:
    """A CUDA kernel that is built: ``tiles`` * 8 tokens, ``warps`` * ``rows`` * 16 weight rows a CTA, ``stages`` ahead.

    grouped: four warps multiply together (wgmma, sm90 alone). shares: warps that take turns at the columns of one
    row tile, so that a CTA does ``shares`` times fewer rows.
    """

    tiles: int
    rows: int
    warps: int
    stages: int
    grouped: bool = False
    shares: int = 1

    @property
    def round(self) -> int:
        """Chunks of K that a CTA has in flight."""
        return self.stages * self.shares

    @property
    def height(self) -> int:
        """Weight rows a CTA does."""
        return self.warps // self.shares * self.rows * 16


def built() -> list[Variant]:
    """Every variant that the library holds, in its list's order."""
    rows = re.findall(r"VARIANT\((\d+), (\d+), (\d+), (\d+), (true|false), (\d+)\)", BUILT.read_text())
    return [
        Variant(int(tiles), int(rows), int(warps), int(stages), grouped == "true", int(shares))
        for tiles, rows, warps, stages, grouped, shares in rows
    ]


class Plan(NamedTuple):
    """How one product runs: shares of K and overlap as in `Choice`."""

    variant: Variant
    splits: int
    overlap: int


class Choice(NamedTuple):
    """A row of the table: ``backend`` "cuda" or "cublas" up to ``tokens`` of (``n``, ``k``) weights.

    overlap: one of OVERLAPS. beats_bf16: reading bytes took less time than cuBLAS on weights that were decoded before.
    """

    nvfp4: bool
    grouped: bool
    tokens: int
    n: int
    k: int
    backend: str
    variant: Variant
    splits: int
    overlap: int
    beats_bf16: bool


@functools.cache
def measured_on() -> str | None:
    """The GPU that the table's variants were checked and measured on; None while the table is a guess.

    Until a GPU has run them, models multiply decoded weights: these products are called by name only.
    """
    return json.loads(TABLE.read_text())["gpu"]


@functools.cache
def table() -> tuple[Choice, ...]:
    """Every row, in the file's order."""
    rows = json.loads(TABLE.read_text())["rows"]
    return tuple(Choice(**row | {"variant": Variant(*row["variant"])}) for row in rows)


@functools.cache
def rows_for(nvfp4: bool, n: int, k: int, grouped: bool = False) -> tuple[Choice, ...]:
    """The rows of the nearest shape, by tokens."""
    rows = [row for row in table() if row.nvfp4 == nvfp4 and row.grouped == grouped]
    nearest = min((abs(math.log(n / r.n)) + abs(math.log(k / r.k)), r.n, r.k) for r in rows)
    return tuple(sorted((r for r in rows if (r.n, r.k) == nearest[1:]), key=lambda r: r.tokens))


def choice_for(nvfp4: bool, tokens: int, n: int, k: int, grouped: bool = False) -> Choice:
    """The row of the nearest shape for the least tabled token count that holds ``tokens`` (or the greatest).

    Args:
        tokens: rows of x; grouped: rows of a block of one expert.
    """
    rows = rows_for(nvfp4, n, k, grouped)
    return next((row for row in rows if row.tokens >= tokens), rows[-1])


def splits_that_fit(choice: Choice, k: int) -> int:
    """The row's shares of K, fewer where a share of this K would be shorter than what is in flight."""
    chunks, splits = -(-k // CHUNK), choice.splits
    while splits > 1 and chunks // splits < choice.variant.round:
        splits //= 2
    return splits


def prefers_cublas(nvfp4: bool, tokens: int, n: int, k: int) -> bool:
    """Whether a product should decode its weight first and call the library."""
    return choice_for(nvfp4, tokens, n, k).backend == "cublas"


@functools.cache
def tokens_by_bytes(nvfp4: bool, n: int, k: int) -> int:
    """Tokens up to which a product by bytes takes less time than cuBLAS with the weight decoded before."""
    winning = itertools.takewhile(lambda row: row.beats_bf16, rows_for(nvfp4, n, k))
    return max((row.tokens for row in winning), default=0)
