"""How well an engine does a task: pass@k, average reward, and how sure we are of them.

With c_i of n_i samples of prompt i correct (reward of at least `success`), over P prompts:

    pass@k  = mean_i (1 - C(n_i - c_i, k) / C(n_i, k))     unbiased; Chen et al. 2021, eq. 1
    pass@1  = mean_i c_i / n_i
    avg@n   = mean_i (mean reward of prompt i)             equals pass@1 for 0/1 rewards
    SE      = std_i(prompt's value, ddof = 1) / sqrt(P)

The error is clustered by prompt: samples of one prompt are not independent, so the prompts, not the samples,
are counted. It says how far another draw of prompts would move the figure; NaN for a single prompt.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any, Protocol

from lowbitrl.tasks import Prompt, Scored, Split, Task, completion_text

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class Completion(Protocol):
    """What is read of an engine's completion."""

    @property
    def prompt_index(self) -> int: ...
    @property
    def token_ids(self) -> Sequence[int]: ...
    @property
    def finish_reason(self) -> str: ...


class Engine(Protocol):
    """What is asked of an engine: n completions of each prompt's ids, in any order."""

    def generate(self, prompts: Any, n: int, sampling: Any, seeds: Any = None) -> Sequence[Completion]: ...


@dataclass(frozen=True, kw_only=True)
class Evaluation:
    """Figures of one task on one set of prompts. Every mean is over prompts first."""

    task: str
    scorer: str
    """Whose score decided what is correct."""
    prompts: int
    n: int
    k: int
    pass_at_1: float
    pass_at_1_error: float
    pass_at_k: float
    pass_at_k_error: float
    avg_at_n: float
    avg_at_n_error: float
    scores: dict[str, float]
    """Mean of every scorer, the chosen one included, over the prompts that it applies to."""
    truncated: float
    """Share of the samples cut off at the token limit."""
    aborted: int
    """Samples the engine gave up; they are in no figure."""
    failed: int
    """Samples whose reward failed: it counts as 0."""
    mean_tokens: float

    def metrics(self, prefix: str = "eval") -> dict[str, float]:
        """Flat, for metrics.jsonl: `eval/pass@1`, `eval/pass@8`, `eval/score/last-number` ..."""
        figures = {
            "pass@1": self.pass_at_1,
            "pass@1_error": self.pass_at_1_error,
            f"pass@{self.k}": self.pass_at_k,
            f"pass@{self.k}_error": self.pass_at_k_error,
            f"avg@{self.n}": self.avg_at_n,
            f"avg@{self.n}_error": self.avg_at_n_error,
            "truncated": self.truncated,
            "aborted": float(self.aborted),
            "failed": float(self.failed),
            "mean_tokens": self.mean_tokens,
        } | {f"score/{name}": value for name, value in self.scores.items()}
        return {f"{prefix}/{name}": value for name, value in figures.items()}

    def to_dict(self) -> dict[str, Any]:
        """All fields, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class _Sample:
    reward: float
    scores: dict[str, float]
    tokens: int
    truncated: bool
    failed: bool


def evaluate(
    engine: Engine,
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    *,
    count: int | None = None,
    n: int = 1,
    sampling: Any,
    k: int | None = None,
    split: Split = "held_out",
    seed: int | None = None,
    success: float = 1.0,
) -> Evaluation:
    """Sample n completions of each of the first `count` prompts of `split` (None: all held out), score them.

    k defaults to n. With a `seed`, prompt i is sampled with the seed `seed + i`. Raises ValueError for
    n, k, count out of range and where aborts leave a prompt fewer than k samples; RuntimeError if the engine
    does not return n completions of every prompt. A completion whose reward fails, or that ended in logits which
    are not finite, is no correct one.
    """
    k = n if k is None else k
    count = task.held_out_count if count is None else count
    _check_counts(task, count, n, k)
    prompts = task.prompts(split, 0, count)
    ids = [task.encode(tokenizer, prompt) for prompt in prompts]
    seeds = {} if seed is None else {"seeds": [seed + i for i in range(count)]}
    completions = engine.generate(ids, n, sampling, **seeds)
    return _summarize(
        task, _samples(task, tokenizer, prompts, _grouped(completions, count, n)), n, k, success
    )


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Chance that k of n samples, drawn without replacement, hold a correct one.

    >>> pass_at_k(4, 1, 2)
    0.5
    """
    if not 0 <= correct <= n or not 1 <= k <= n:
        raise ValueError(f"pass@{k} of {n} samples, {correct} correct: needs 1 <= k <= n, 0 <= correct <= n")
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def mean_and_error(values: Sequence[float]) -> tuple[float, float]:
    """Mean and standard error of independent values, one a prompt; the error of a single one is NaN."""
    mean = math.fsum(values) / len(values)
    if len(values) == 1:
        return mean, math.nan
    variance = math.fsum((value - mean) ** 2 for value in values) / (len(values) - 1)
    return mean, math.sqrt(variance / len(values))


def _check_counts(task: Task, count: int, n: int, k: int) -> None:
    if count < 1:
        raise ValueError(f"evaluate count = {count} on {task.name!r}: nothing to evaluate; set task.held_out")
    if not 1 <= k <= n:
        raise ValueError(f"evaluate k = {k}, n = {n}: pass@k needs 1 <= k <= n")


def _grouped(completions: Sequence[Completion], count: int, n: int) -> list[tuple[int, Completion]]:
    """(prompt index, completion) of those that ran to their end or their limit."""
    indices = [completion.prompt_index for completion in completions]
    wrong = [i for i in range(count) if indices.count(i) != n]
    if wrong or len(indices) != count * n:
        raise RuntimeError(
            f"the engine returned {len(indices)} completions for {count} prompts x {n}"
            + (f"; prompt {wrong[0]} has {indices.count(wrong[0])}" if wrong else "")
        )
    return [(c.prompt_index, c) for c in completions if c.finish_reason != "abort"]


def _samples(
    task: Task,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    done: Sequence[tuple[int, Completion]],
) -> list[list[_Sample]]:
    """What was sampled of each prompt, scored."""
    texts = [completion_text(tokenizer, c.token_ids) for _, c in done]
    scored = task.score_all([(prompts[index], text) for (index, _), text in zip(done, texts, strict=True)])
    samples: list[list[_Sample]] = [[] for _ in prompts]
    for (index, completion), one in zip(done, scored, strict=True):
        samples[index].append(_sample(task.scorer, completion, one))
    return samples


def _sample(scorer: str, completion: Completion, scored: Scored) -> _Sample:
    broken = completion.finish_reason == "nonfinite"
    scores = dict.fromkeys(scored.scores, 0.0) if broken else {scorer: 0.0} | scored.scores
    return _Sample(
        reward=scores.get(scorer, 0.0),
        scores=scores,
        tokens=len(completion.token_ids),
        truncated=completion.finish_reason == "length",
        failed=scorer not in scored.scores,
    )


def _summarize(task: Task, samples: list[list[_Sample]], n: int, k: int, success: float) -> Evaluation:
    short = [i for i, group in enumerate(samples) if len(group) < k]
    if short:
        raise ValueError(
            f"aborts left prompt {short[0]} only {len(samples[short[0]])} samples, k = {k} needs more"
        )
    correct = [sum(sample.reward >= success for sample in group) for group in samples]
    at_1, at_1_error = mean_and_error([c / len(g) for c, g in zip(correct, samples, strict=True)])
    at_k, at_k_error = mean_and_error(
        [pass_at_k(len(g), c, k) for c, g in zip(correct, samples, strict=True)]
    )
    average, average_error = mean_and_error([_mean([s.reward for s in group]) for group in samples])
    flat = [sample for group in samples for sample in group]
    return Evaluation(
        task=task.name,
        scorer=task.scorer,
        prompts=len(samples),
        n=n,
        k=k,
        pass_at_1=at_1,
        pass_at_1_error=at_1_error,
        pass_at_k=at_k,
        pass_at_k_error=at_k_error,
        avg_at_n=average,
        avg_at_n_error=average_error,
        scores={name: _mean([_mean(values) for values in _values(samples, name)]) for name in _names(flat)},
        truncated=_mean([float(sample.truncated) for sample in flat]),
        aborted=len(samples) * n - len(flat),
        failed=sum(sample.failed for sample in flat),
        mean_tokens=_mean([float(sample.tokens) for sample in flat]),
    )


def _values(samples: list[list[_Sample]], name: str) -> list[list[float]]:
    """A scorer's scores by prompt, of the prompts that it applies to; samples on which it failed are left out."""
    found = [[s.scores[name] for s in group if name in s.scores] for group in samples]
    return [values for values in found if values]


def _names(samples: list[_Sample]) -> list[str]:
    return sorted({name for sample in samples for name in sample.scores})


def _mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)
