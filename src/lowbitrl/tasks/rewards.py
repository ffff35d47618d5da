"""A user's reward function: found by name, and held to its promise of a finite number."""

from __future__ import annotations

import importlib
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

Reward = Callable[[str, dict[str, Any]], float]


def import_reward(spec: str) -> Reward:
    """The function `package.module:function`; modules in the working folder are found too.

    Raises ValueError if the spec has another shape, its function is absent or not callable, ImportError
    if the module cannot be imported.
    """
    module_name, _, function_name = spec.partition(":")
    if not module_name or not function_name.isidentifier():
        raise ValueError(f"reward {spec!r}: write it as 'package.module:function'")
    # Last, so that a file in the working folder never hides an installed package.
    if str(Path.cwd()) not in sys.path:
        sys.path.append(str(Path.cwd()))
    try:
        module = importlib.import_module(module_name)
    except Exception as error:
        raise ImportError(
            f"reward {spec!r}: importing {module_name!r} failed with {type(error).__name__}: {error}; "
            f"install it or run from the folder that holds it (now {Path.cwd()})"
        ) from error
    function = getattr(module, function_name, None)
    if not callable(function):
        named = sorted(n for n, v in vars(module).items() if callable(v) and not n.startswith("_"))
        raise ValueError(f"reward {spec!r}: {module_name} has no function {function_name!r}; it has {named}")
    return cast(Reward, function)


def call_reward(spec: str, function: Reward, completion: str, prompt: dict[str, Any]) -> float:
    """`function(completion, prompt)` as a float. Raises ValueError naming the function and the prompt if it
    raises or returns anything but a finite number."""
    where = f"reward {spec!r} on prompt {prompt.get('id')!r}"
    try:
        value = function(completion, prompt)
    except Exception as error:
        raise ValueError(
            f"{where} raised {type(error).__name__}: {error} (completion {completion[:80]!r}); "
            "it must return a number for every completion, the empty one included"
        ) from error
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise ValueError(f"{where} returned {value!r}, a {type(value).__name__}; it must return a number")
    if not math.isfinite(float(value)):
        raise ValueError(f"{where} returned {value!r}; it must return a finite number")
    return float(value)
