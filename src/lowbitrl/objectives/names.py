"""Looking things up by name, with errors that name the nearest known one."""

import difflib
import inspect
from collections.abc import Callable, Iterable, Mapping
from typing import Any, TypeVar

Value = TypeVar("Value")
EMPTY = inspect.Parameter.empty


def unknown(kind: str, name: str, known: Iterable[str]) -> ValueError:
    """The error for a name nobody knows: its nearest neighbour, then the allowed set."""
    known = list(known)
    near = difflib.get_close_matches(name, known, n=1, cutoff=0.0)
    hint = f"; did you mean {near[0]!r}?" if near else ""
    return ValueError(f"unknown {kind} {name!r}{hint} Known: {', '.join(known) or 'none'}")


def find(kind: str, name: str, table: Mapping[str, Value]) -> Value:
    """`table[name]`, or ValueError naming the nearest key and all of them."""
    if name not in table:
        raise unknown(kind, name, table)
    return table[name]


def keyword_defaults(function: Callable[..., Any]) -> dict[str, Any]:
    """The keyword-only parameters of `function` with their defaults: what a recipe may set."""
    parameters = inspect.signature(function).parameters.values()
    return {p.name: p.default for p in parameters if p.kind is inspect.Parameter.KEYWORD_ONLY}


def check_parameters(owner: str, given: Iterable[str], allowed: Iterable[str]) -> None:
    """Raise ValueError for the first name in `given` that `owner` does not take."""
    allowed = list(allowed)
    for name in given:
        if name not in allowed:
            raise unknown(f"parameter of {owner}:", name, allowed)
