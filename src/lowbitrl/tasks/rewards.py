"""A user's reward function: found by name, and held to its promise of a finite number."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

from lowbitrl.imports import import_from_here
from lowbitrl.tasks.limits import kind_of_error

Reward = Callable[[str, dict[str, Any]], float]
LARGEST = (2 - 2**-23) * 2.0**127  # of fp32, where advantages are made


@dataclass(frozen=True)
class Failure:
    """Why a completion has no reward: one of `limits.KINDS`, and a sentence that names function and prompt.

    Example:
        Failure("timeout", "reward 'my:f' on prompt 'p/3' took more than 10 s")
    """

    kind: str
    message: str


class RewardError(ValueError):
    """A reward function broke its promise."""

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


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


def where(spec: str, prompt: dict[str, Any]) -> str:
    """How a failure names its function and its prompt."""
    return f"reward {spec!r} on prompt {prompt.get('id')!r}"


def call_reward(spec: str, function: Reward, completion: str, prompt: dict[str, Any]) -> float:
    """`function(completion, prompt)` as a float. Raises RewardError naming the function and the prompt if it
    raises, exits, or returns anything but a number that is finite in fp32, where advantages are made."""
    here = where(spec, prompt)
    try:
        value = function(completion, prompt)
    # SystemExit is no Exception: a reward that runs sampled code would end the run, and with it all since
    # the last checkpoint, as if it had succeeded.
    except (Exception, SystemExit) as error:
        message = (
            f"{here} raised {type(error).__name__}: {error} (completion {completion[:80]!r}); "
            "it must return a number for every completion, the empty one included"
        )
        raise RewardError(Failure(kind_of_error(error), message)) from error
    return _number(here, value)


def _number(here: str, value: Any) -> float:
    if isinstance(value, str | bytes) or not hasattr(value, "__float__"):
        raise _broken(here, value, f", a {type(value).__name__}; it must return a number")
    try:
        number = float(value)
    except Exception as error:
        raise _broken(here, value, f", which is no single number: {error}") from error
    if not abs(number) <= LARGEST:
        raise _broken(here, value, "; it must return a finite number, in fp32 too")
    return number


def _broken(here: str, value: Any, problem: str) -> RewardError:
    return RewardError(Failure("value", f"{here} returned {_shown(value)}{problem}"))


def _shown(value: Any) -> str:
    try:
        return repr(value)[:500]
    # A repr is the user's code too, and one of more than 4300 digits is refused by Python.
    except Exception:
        return "something that cannot be shown"
