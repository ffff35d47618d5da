"""What went wrong with single completions of a step: counted by kind, and named the first time. docs/faults.md."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from lowbitrl.rollout import Completion
from lowbitrl.tasks import Scored
from lowbitrl.tasks.limits import KINDS

LOST = ("nonfinite_logits", "aborted", "empty")
"""Completions that there is nothing to train on: logits or log-probabilities that are not finite, given up by the
engine, without a token."""
COUNTED = (*LOST, "not_utf8", *(f"reward_{kind}" for kind in KINDS), "dropped")
REPLACEMENT = "\N{REPLACEMENT CHARACTER}"


@dataclass
class Faults:
    """Counts by kind, and a sentence about the first of each."""

    counts: Counter[str] = field(default_factory=Counter)
    first: dict[str, str] = field(default_factory=dict)

    def add(self, kind: str, message: str) -> None:
        """Count one."""
        self.counts[kind] += 1
        self.first.setdefault(f"faults/{kind}", message)

    def __add__(self, later: Faults) -> Faults:
        return Faults(self.counts + later.counts, later.first | self.first)

    def metrics(self) -> dict[str, float]:
        """`faults/KIND`: completions of the step, 0 included."""
        return {f"faults/{kind}": float(self.counts[kind]) for kind in COUNTED}

    def news(self, known: set[str]) -> list[str]:
        """A line for each kind that is not in `known`, which they then are."""
        fresh = [metric for metric in self.first if metric not in known]
        known.update(fresh)
        return [f"{metric}: {self.first[metric]} (said once; the metric counts)" for metric in fresh]


def fault_of(completion: Completion) -> str | None:
    """Which of `LOST` a completion is, or None for a sound one."""
    if completion.finish_reason == "nonfinite" or not all(map(math.isfinite, completion.rollout_logprobs)):
        return "nonfinite_logits"
    if completion.finish_reason == "abort":
        return "aborted"
    return None if completion.token_ids else "empty"


def sound(
    completions: Sequence[Completion], names: Sequence[str], most: float, faults: Faults
) -> list[Completion]:
    """The completions that can be trained on; the others leave their groups, and are counted.

    Args:
        names: of the prompts. most: share that may be lost.

    Raises:
        RuntimeError: more are lost.
    """
    kept = []
    for completion in completions:
        kind = fault_of(completion)
        if kind is None:
            kept.append(completion)
        else:
            where = f"sample {completion.sample_index} of prompt {names[completion.prompt_index]!r}"
            faults.add(kind, f"{where}, after {len(completion.token_ids)} tokens")
    lost = len(completions) - len(kept)
    if lost > most * len(completions):
        metric, message = next(iter(faults.first.items()))
        raise RuntimeError(
            f"{lost} of {len(completions)} completions of version {completions[0].version} are lost, "
            f"rollout.most_lost is {most:g}: the weights served are broken, or the engine is. First {metric}: {message}"
        )
    return kept


def count_not_utf8(texts: Iterable[str], faults: Faults) -> None:
    """Count texts whose tokens are no UTF-8: decoding has put U+FFFD for what cannot be read."""
    for text in texts:
        if REPLACEMENT in text:
            faults.add("not_utf8", f"a completion's bytes are no UTF-8; its reward is given {text[:60]!r}")


def settle(scored: Sequence[Scored], scorer: str, rule: str, faults: Faults) -> list[dict[str, float] | None]:
    """Scores with a reward for each, by `rewards.on_failure`; None where the completion is to be left out.

    Raises:
        RuntimeError: the rule is "raise", or every single reward failed.
    """
    for failure in (failure for one in scored for failure in one.failures):
        faults.add(f"reward_{failure.kind}", failure.message)
    failed = [scorer not in one.scores for one in scored]
    if any(failed) and (rule == "raise" or all(failed)):
        message = next(one.failures[0].message for one in scored if scorer not in one.scores)
        share = "every reward of the step failed" if all(failed) else "rewards.on_failure is 'raise'"
        raise RuntimeError(f"{message}; {share}")
    settled: list[dict[str, float] | None] = []
    for one in scored:
        if scorer not in one.scores and rule == "drop":
            faults.add("dropped", "its reward failed")
            settled.append(None)
        else:
            settled.append({scorer: 0.0} | one.scores)
    return settled
