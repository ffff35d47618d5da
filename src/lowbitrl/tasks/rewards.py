"""A user's reward function: found by name, and held to its promise of a finite number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import numpy as np

from lowbitrl.imports import import_from_here

Reward = Callable[[str, dict[str, Any]], float]
LARGEST = float(np.finfo(np.float32).max)


def import_reward(spec: str) -> Reward:
    """The function `package.module:function`; modules in the working folder are found too.

    Raises ValueError if the spec has another shape, its function is absent or not callable, ImportError
    if the module cannot be imported.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ValueError(f"reward {spec!r}: write it as 'package.module:function'")
    module = import_from_here(module_name, f"reward {spec!r}")
    function = getattr(module, function_name, None)
    if not callable(function):
        named = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(f"reward {spec!r}: {module_name} has no function {function_name!r}; it has {named}")
    return cast(Reward, function)


def call_reward(spec: str, function: Reward, completion: str, prompt: dict[str, Any]) -> float:
    """`function(completion, prompt)` as a float. Raises ValueError naming the function and the prompt if it
    raises, exits, or returns anything but a number that is finite in fp32, where advantages are made."""
    where = f"reward {spec!r} on prompt {prompt.get('id')!r}"
    try:
        value = function(completion, prompt)
    # SystemExit is no Exception: a reward that runs sampled code would end the run, and with it all since
    # the last checkpoint, as if it had succeeded.
    except (Exception, SystemExit) as error:
        raise ValueError(
            f"{where} raised {type(error).__name__}: {error} (completion {completion[:80]!r}); "
            "it must return a number for every completion, the empty one included"
        ) from error
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{where} returned {value!r}, a {type(value).__name__}; it must return a number")
    try:
        number = float(cast(Any, value))
    except Exception as error:
        raise ValueError(f"{where} returned {value!r}, which is no single number: {error}") from error
    if not abs(number) <= LARGEST:
        raise ValueError(f"{where} returned {value!r}; it must return a finite number, in fp32 too")
    return number
