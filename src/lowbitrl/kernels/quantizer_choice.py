"""Which backend's kernel quantizes a shape: read from a table that a script measured.

``quantizer_choices.json`` is written by ``benchmarks/choose_quantizers.py`` on the GPU it names. A shape that is not
in it takes the backend of the nearest one; another GPU than the table's takes the same, as the best guess there is.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Mapping
from pathlib import Path

from .backend import TRITON

TABLE = Path(__file__).parent / "quantizer_choices.json"


@functools.cache
def table() -> list[dict]:
    """Every row, in the file's order."""
    return json.loads(TABLE.read_text())["rows"]


@functools.cache
def preferred(op: str, rows: int, width: int) -> str:
    """The faster backend for (rows, width); Triton's while no GPU has measured the op.

    Args:
        op: "fake_quantize" and "quantize", of weights whose maximum is measured too; "residual batch" and, of more
            tokens than a decoding step has, "residual long"; "residual token"; "residual all", which is every channel.
    """
    measured = [row for row in table() if row["op"] == op]

    def distance(row: dict) -> float:
        return abs(math.log(max(rows, 1) / row["rows"])) + abs(math.log(max(width, 1) / row["width"]))

    return min(measured, key=distance)["backend"] if measured else TRITON


def best_first(first: str, candidates: Mapping[str, str | None]) -> dict[str, str | None]:
    """``choose``'s candidates, ``first`` before the others."""
    return {first: candidates[first]} | dict(candidates)
