"""A task from a file of prompts: .jsonl, .parquet, or a dataset on the Hugging Face hub.

A row has `prompt` (a string, or a list of chat messages) or `messages` (a list of chat messages), `answer`
where a scorer needs it, and whatever else the reward wants: it is given the whole row. `held_out` distinct
prompts, those with the smallest hash, are kept from training with all their duplicates, whatever the seed.
Train goes through the remaining rows in epochs, each in an order of its own.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from lowbitrl.tasks.config import RewardsConfig, TaskConfig
from lowbitrl.tasks.judge import Judge
from lowbitrl.tasks.rewards import Failure
from lowbitrl.tasks.scorers import NUMBER_SCORERS, parse_number
from lowbitrl.tasks.splits import digest
from lowbitrl.tasks.task import Prompt, Scored, Split, check_held_out_range, encode_prompt, only_scores

Row = dict[str, Any]


class FileTask:
    """`make_task` of a config with a path. Raises FileNotFoundError for a missing file; ValueError for an
    empty one, a row of another shape (with its number), too few rows, a number scorer on answers that are
    no numbers; what `import_reward` raises; RewardError if the reward fails on the empty completion; OSError
    if a hub dataset cannot be had."""

    def __init__(self, config: TaskConfig, rewards: RewardsConfig | None = None) -> None:
        self.config = config
        self.name = config.path or ""
        self.scorer = "reward" if config.reward else str(config.scorer)
        prompts = [self._prompt(number, row) for number, row in enumerate(read_rows(config))]
        if not prompts:
            raise ValueError(f"task.path = {self.name!r} has no rows; give at least one prompt")
        self._train, self._held_out = self._split(prompts)
        self._order = lru_cache(maxsize=2)(self._epoch_order)
        self._judge = self._make_judge(rewards or RewardsConfig())

    @property
    def held_out_count(self) -> int:
        return len(self._held_out)

    @property
    def train_count(self) -> int:
        return len(self._train)

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """See `Task.prompts`. In train the ids repeat from epoch to epoch."""
        if split == "train":
            return [self._train_prompt(position) for position in range(start, start + count)]
        check_held_out_range(self.name, start, count, self.held_out_count)
        return self._held_out[start : start + count]

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Scored]:
        """`reward`: the user's, if there is one; the number scorers where the answer is a number."""
        if self._judge is None:
            return [Scored(self._number_scores(*pair)) for pair in pairs]
        given = [(completion, _given(prompt)) for prompt, completion in pairs]
        return [
            Scored(self._number_scores(*pair), (outcome,))
            if isinstance(outcome, Failure)
            else Scored(self._number_scores(*pair) | {"reward": outcome})
            for pair, outcome in zip(pairs, self._judge(given), strict=True)
        ]

    def scores(self, prompt: Prompt, completion: str) -> dict[str, float]:
        """See `Task.scores`."""
        return only_scores(self.score_all([(prompt, completion)])[0])

    def reward(self, prompt: Prompt, completion: str) -> float:
        """See `Task.reward`."""
        return self.scores(prompt, completion)[self.scorer]

    def close(self) -> None:
        """See `Task.close`."""
        if self._judge is not None:
            self._judge.close()

    def _make_judge(self, rewards: RewardsConfig) -> Judge | None:
        if self.config.reward is None:
            return None
        judge = Judge(self.config.reward, rewards, ("", _given(self._train[0])), rewards.contain != "none")
        judge.prove()
        return judge

    def _number_scores(self, prompt: Prompt, completion: str) -> dict[str, float]:
        if parse_number(prompt.answer) is None:
            return {}
        return {name: scorer(completion, prompt.answer) for name, scorer in NUMBER_SCORERS.items()}

    def encode(self, tokenizer: Any, prompt: Prompt) -> list[int]:
        return encode_prompt(tokenizer, prompt, self.config.max_prompt_tokens)

    def split_report(self) -> dict[str, Any]:
        """Counts of rows; `overlap` of prompt texts is 0 by construction, counted all the same."""
        train, held_out = {_text(p) for p in self._train}, {_text(p) for p in self._held_out}
        return {
            "held_out": len(self._held_out),
            "train": len(self._train),
            "train_distinct": len(train),
            "overlap": len(train & held_out),
        }

    def _split(self, prompts: list[Prompt]) -> tuple[list[Prompt], list[Prompt]]:
        first = {}
        for prompt in prompts:
            first.setdefault(_text(prompt), prompt)
        if self.config.held_out >= len(first):
            raise ValueError(
                f"task.held_out = {self.config.held_out}, {self.name!r} has {len(first)} different "
                f"prompts: none is left to train on; set it below {len(first)} (0: no held-out split)"
            )
        kept = sorted(first, key=digest)[: self.config.held_out]
        return [p for p in prompts if _text(p) not in set(kept)], [first[text] for text in kept]

    def _train_prompt(self, position: int) -> Prompt:
        epoch, offset = divmod(position, len(self._train))
        return self._train[self._order(epoch)[offset]]

    def _epoch_order(self, epoch: int) -> list[int]:
        rows = len(self._train)
        return random.Random(f"{self.config.seed}/{epoch}").sample(range(rows), rows)

    def _prompt(self, number: int, row: Row) -> Prompt:
        where = f"task.path = {self.name!r}, row {number}"
        answer = None if row.get("answer") is None else str(row["answer"])
        if self.scorer in NUMBER_SCORERS and parse_number(answer) is None:
            raise ValueError(
                f"{where}: scorer = {self.scorer!r} needs a number as answer, not {row.get('answer')!r}; "
                "mend the row, or set reward = 'package.module:function'"
            )
        messages, text = self._wording(where, row)
        return Prompt(
            id=str(row.get("id", f"{Path(self.name).name}/{number}")),
            messages=messages,
            text=text,
            prefill=self._prefill(where, row),
            answer=answer,
            metadata=row,
        )

    def _wording(self, where: str, row: Row) -> tuple[tuple[dict[str, str], ...], str | None]:
        content = row.get("messages") or row.get("prompt")
        if not content:
            raise ValueError(f"{where} has neither prompt nor messages; it has {sorted(row)}")
        if isinstance(content, str) and not self.config.chat:
            return (), content
        messages = [{"role": "user", "content": content}] if isinstance(content, str) else content
        if not isinstance(messages, list) or not all(_is_message(message) for message in messages):
            raise ValueError(f"{where}: messages must be a list of {{role, content}}, not {content!r}")
        if self.config.system is not None:
            messages = [{"role": "system", "content": self.config.system}, *messages]
        return tuple(messages), None

    def _prefill(self, where: str, row: Row) -> str | None:
        if self.config.prefill is False:
            return None
        template = "{prefill}" if self.config.prefill is True else str(self.config.prefill)
        try:
            return template.format(**row)
        except (KeyError, IndexError, ValueError) as error:
            raise ValueError(
                f"{where}: task.prefill = {self.config.prefill!r} failed, {type(error).__name__}: {error}; "
                f"the row has {sorted(row)}"
            ) from error


def read_rows(config: TaskConfig) -> list[Row]:
    """The rows of a .jsonl or .parquet file, or of a hub dataset (`options` go to `load_dataset`)."""
    path = Path(config.path or "").expanduser()
    local = path.exists() or path.suffix in (".jsonl", ".parquet", ".json", ".csv") or path.is_absolute()
    if not local:
        return _hub_rows(str(config.path), config.options)
    if not path.is_file():
        raise FileNotFoundError(f"task.path = {config.path!r}: no such file in {Path.cwd()}")
    if config.options:
        raise ValueError(f"task.options = {config.options}: a local file has none; remove them")
    if path.suffix == ".parquet":
        from pyarrow import parquet

        try:
            return parquet.read_table(path).to_pylist()
        except ValueError as error:
            raise ValueError(f"task.path = {config.path!r} is not parquet: {error}") from error
    if path.suffix == ".jsonl":
        return _jsonl_rows(path)
    raise ValueError(f"task.path = {config.path!r}: only .jsonl and .parquet are read, not {path.suffix!r}")


def _jsonl_rows(path: Path) -> list[Row]:
    rows = []
    for number, line in enumerate(path.read_bytes().split(b"\n"), start=1):
        if line.strip():
            try:
                rows.append(json.loads(line))
            except ValueError as error:
                raise ValueError(f"task.path = {str(path)!r}, line {number} is not JSON: {error}") from error
            if not isinstance(rows[-1], dict):
                raise ValueError(f"task.path = {str(path)!r}, line {number} is {rows[-1]!r}, not an object")
    return rows


def _hub_rows(name: str, options: dict[str, Any]) -> list[Row]:
    from datasets import Dataset, load_dataset

    options = {"split": "train", **options}
    try:
        dataset = load_dataset(name, **options)
    except (OSError, ValueError) as error:
        raise OSError(
            f"task.path = {name!r} is no local file and load_dataset({name!r}, **{options}) failed: {error}; "
            "check the path, the name and the connection"
        ) from error
    if not isinstance(dataset, Dataset):
        raise ValueError(f"task.path = {name!r}: options {options} give no single split; name one")
    return dataset.to_list()


def _is_message(value: object) -> bool:
    return isinstance(value, dict) and all(isinstance(value.get(key), str) for key in ("role", "content"))


def _given(prompt: Prompt) -> Row:
    """What a reward is told of its prompt."""
    return {**prompt.metadata, "id": prompt.id}


def _text(prompt: Prompt) -> str:
    return prompt.text or json.dumps(prompt.messages, sort_keys=True)
