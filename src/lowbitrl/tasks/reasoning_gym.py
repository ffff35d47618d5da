"""Tasks of reasoning-gym (https://github.com/open-thought/reasoning-gym): procedural, each with a scorer.

A split is a stream of chunks; chunk c is a dataset of its own seed, hashed from (split, seed, c), because
reasoning-gym draws item i from `seed + i`: neighbouring seeds give the same items shifted. The border
between the splits is by question text (`splits.py`): a position redraws until its question falls on the
right side. So the splits are disjoint in tiny spaces too (1-digit sums: 200 questions), and both follow the
dataset's own distribution. They repeat questions as it does: `split_report` counts the distinct ones.
"""

from __future__ import annotations

import dataclasses
import difflib
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import lru_cache
from typing import Any

from reasoning_gym.factory import DATASETS, create_dataset

from lowbitrl.tasks.config import RewardsConfig, TaskConfig
from lowbitrl.tasks.gym_score import SPEC, is_plain
from lowbitrl.tasks.judge import Judge
from lowbitrl.tasks.rewards import Failure
from lowbitrl.tasks.scorers import NUMBER_SCORERS, parse_number
from lowbitrl.tasks.splits import digest, is_held_out
from lowbitrl.tasks.task import Prompt, Scored, Split, check_held_out_range, encode_prompt, only_scores

CHUNK = 64  # positions of a split that share one seeded dataset
TRIES = 16  # items for each position in one dataset; all on the wrong side: then the next dataset
ROUNDS = 8  # datasets tried before a space counts as one-sided: 0.75 ** 128 otherwise
EXPRESSION_DATASETS = ("chain_sum", "products", "basic_arithmetic")


class ReasoningGymTask:
    """`make_task` of a config with a name. Raises ValueError for an unknown dataset or option, options the
    dataset refuses, a number scorer on answers that are no numbers, and what `import_reward` raises; RewardError
    if the reward fails on the empty completion."""

    def __init__(self, config: TaskConfig, rewards: RewardsConfig | None = None) -> None:
        self.config = config
        self.name = _known_dataset(config.name or "")
        _check_options(self.name, config)
        self._dataset = lru_cache(maxsize=16)(self._make_dataset)
        self.scorer = "reward" if config.reward else config.scorer or "reasoning-gym"
        self._judges = self._make_judges(rewards or RewardsConfig(), self._first_prompt())

    @property
    def held_out_count(self) -> int:
        return self.config.held_out

    @property
    def train_count(self) -> None:
        return None

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """See `Task.prompts`. The items of a position do not depend on the other positions asked for."""
        if split == "held_out":
            check_held_out_range(self.name, start, count, self.held_out_count)
        return [self._prompt_at(split, position) for position in range(start, start + count)]

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Scored]:
        """`reasoning-gym`: its own score, see `own_score`. The number scorers where the answer is a number.
        `reward`: the user's, if there is one."""
        judged = {
            name: judge([(completion, self._given(name, prompt)) for prompt, completion in pairs])
            for name, judge in self._judges.items()
        }
        return [
            self._scored(*pair, {n: outcomes[i] for n, outcomes in judged.items()})
            for i, pair in enumerate(pairs)
        ]

    def scores(self, prompt: Prompt, completion: str) -> dict[str, float]:
        """See `Task.scores`."""
        return only_scores(self.score_all([(prompt, completion)])[0])

    def reward(self, prompt: Prompt, completion: str) -> float:
        """See `Task.reward`."""
        return self.scores(prompt, completion)[self.scorer]

    def close(self) -> None:
        """See `Task.close`."""
        for judge in self._judges.values():
            judge.close()

    def _scored(self, prompt: Prompt, completion: str, outcomes: dict[str, float | Failure]) -> Scored:
        scores: dict[str, float] = {
            name: value for name, value in outcomes.items() if not isinstance(value, Failure)
        }
        if parse_number(prompt.answer) is not None:
            scores |= {name: scorer(completion, prompt.answer) for name, scorer in NUMBER_SCORERS.items()}
        elif self.scorer in NUMBER_SCORERS:
            # A dataset may mix answers that are numbers with some that are not.
            scores[self.scorer] = 0.0
        return Scored(scores, tuple(v for v in outcomes.values() if isinstance(v, Failure)))

    def _given(self, scorer: str, prompt: Prompt) -> dict[str, Any]:
        """What a scorer is told of its prompt."""
        entry = prompt.metadata["entry"]
        if scorer == "reward":
            return {"id": prompt.id, "answer": prompt.answer, **entry}
        return {"id": prompt.id, "dataset": self.name, "options": self.config.options, "entry": entry}

    def _make_judges(self, rewards: RewardsConfig, first: Prompt) -> dict[str, Judge]:
        own = rewards.contain == "all" or (rewards.contain == "auto" and not is_plain(self.name))
        judges = {"reasoning-gym": Judge(SPEC, rewards, ("", self._given("reasoning-gym", first)), own)}
        if self.config.reward:
            check = ("", self._given("reward", first))
            judges["reward"] = Judge(self.config.reward, rewards, check, rewards.contain != "none")
            judges["reward"].prove()
        return judges

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        return encode_prompt(tokenizer, prompt, self.config.max_prompt_tokens)

    def split_report(self) -> dict[str, Any]:
        """Of all held-out and the first 1024 train prompts. `overlap` counts shared question texts: 0 by
        construction, counted all the same."""
        train = [_question(prompt) for prompt in self.prompts("train", 0, 1024)]
        held_out = [_question(prompt) for prompt in self.prompts("held_out", 0, self.held_out_count)]
        return {
            "held_out": len(held_out),
            "held_out_distinct": len(set(held_out)),
            "train_sampled": len(train),
            "train_distinct": len(set(train)),
            "overlap": len(set(train) & set(held_out)),
        }

    def _prompt_at(self, split: Split, position: int) -> Prompt:
        chunk, offset = divmod(position, CHUNK)
        for attempt in range(TRIES * ROUNDS):
            round_, row = divmod(attempt, TRIES)
            entry = self._entry(split, f"{chunk}/{round_}", offset + row * CHUNK)
            if not self.config.held_out or is_held_out(entry["question"]) == (split == "held_out"):
                return self._prompt(split, position, entry)
        raise ValueError(
            f"task {self.name!r} with {self.config.options} has too few different questions to hold any out: "
            f"none for {split} in {TRIES * ROUNDS} draws; set task.held_out = 0 or widen its options"
        )

    def _entry(self, split: Split, chunk: str, index: int) -> dict[str, Any]:
        # Held-out prompts must not move with the seed of a run.
        seed = self.config.seed if split == "train" else 0
        dataset_seed = digest(f"{split}/{seed}/{chunk}") % 2**31
        with _global_rng(dataset_seed + index):
            return self._dataset(dataset_seed)[index]

    def _make_dataset(self, seed: int) -> Any:
        try:
            return create_dataset(self.name, seed=seed, size=CHUNK * TRIES, **self.config.options)
        except (AssertionError, TypeError, ValueError) as error:
            raise ValueError(
                f"reasoning-gym refuses task.options = {self.config.options} for {self.name!r}: {error}"
            ) from error

    def _prompt(self, split: Split, position: int, entry: dict[str, Any]) -> Prompt:
        question, prefill = self._wording(entry)
        messages = [{"role": "user", "content": question}]
        if self.config.system is not None:
            messages.insert(0, {"role": "system", "content": self.config.system})
        return Prompt(
            id=f"{self.name}/{split}/{position}",
            messages=tuple(messages) if self.config.chat else (),
            text=None if self.config.chat else question + ("\n" if prefill else ""),
            prefill=prefill,
            answer=entry["answer"],
            metadata={"entry": entry},
        )

    def _wording(self, entry: dict[str, Any]) -> tuple[str, str | None]:
        if self.config.prefill is False:
            return entry["question"], None
        if self.config.prefill is True:
            expression = " ".join(entry["metadata"]["expression"].split())
            return f"What is {expression}?", f"{expression} ="
        fields = {**entry["metadata"], "question": entry["question"]}
        try:
            return entry["question"], str(self.config.prefill).format(**fields)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"task.prefill = {self.config.prefill!r}: {type(error).__name__} {error}; "
                f"{self.name!r} has the fields {sorted(fields)}"
            ) from error

    def _first_prompt(self) -> Prompt:
        """The first one, with what the config promises of all of them checked on it."""
        if self.config.prefill is True and self.name not in EXPRESSION_DATASETS:
            raise ValueError(
                f"task.prefill = true can begin {', '.join(EXPRESSION_DATASETS)}, not {self.name!r}; "
                "give a template, or set prefill = false"
            )
        prompt = self._prompt_at("train", 0)
        if self.scorer in NUMBER_SCORERS and parse_number(prompt.answer) is None:
            raise ValueError(
                f"scorer = {self.scorer!r} needs answers that are numbers, {self.name!r} has "
                f"{prompt.answer!r}; use scorer = 'reasoning-gym'"
            )
        if self.config.held_out:
            self._prompt_at("held_out", 0)
        return prompt


@contextmanager
def _global_rng(seed: int) -> Iterator[None]:
    """reasoning-gym 0.1.25 draws some items (of list_functions) from Python's global generator: they would
    depend on all that was drawn before. Seeded for one item, then put back."""
    state = random.getstate()
    random.seed(seed)
    try:
        yield
    finally:
        random.setstate(state)


def _question(prompt: Prompt) -> str:
    return prompt.metadata["entry"]["question"]


def _known_dataset(name: str) -> str:
    if name in DATASETS:
        return name
    near = difflib.get_close_matches(name, DATASETS, n=3, cutoff=0.5)
    hint = f"did you mean {', '.join(near)}?" if near else f"there are {len(DATASETS)}, chain_sum among them"
    raise ValueError(f"task.name = {name!r} is no reasoning-gym dataset; {hint}")


def _check_options(name: str, config: TaskConfig) -> None:
    known = [f.name for f in dataclasses.fields(DATASETS[name][1]) if f.name not in ("seed", "size")]
    for option in config.options:
        if option == "seed":
            raise ValueError("task.options.seed: the seed belongs in task.seed")
        if option == "size":
            raise ValueError("task.options.size: train prompts have no end; held_out sets how many are kept")
        if option not in known:
            near = difflib.get_close_matches(option, known, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ValueError(f"task.options.{option}: no option of {name!r}; {hint}it has {sorted(known)}")
