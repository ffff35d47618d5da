"""What a task is: prompts in a fixed order, a verifiable reward, and the token ids an engine samples from.

Nothing here samples or trains. `train` is endless and seekable: `prompts("train", 640, 32)` is the same
32 prompts in every process, whatever was asked before, so a resumed run needs only its step number.
`held_out` is a finite list that shares no prompt text with `train` and does not depend on the seed, so
runs with different seeds are evaluated on the same prompts.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, Protocol

from lowbitrl.tasks.rewards import Failure, RewardError

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

Split = Literal["train", "held_out"]


@dataclass(frozen=True, kw_only=True)
class Prompt:
    """One question. Exactly one of `messages` (goes through the chat template) and `text` (as it is).

    Example::

        Prompt(id="chain_sum/train/0", messages=({"role": "user", "content": "What is 7 + 5?"},),
               prefill="7 + 5 =", answer="12", metadata={"num_terms": 2})
    """

    id: str
    """Unique within its split, stable across runs with the same configuration."""
    messages: tuple[dict[str, str], ...] = ()
    text: str | None = None
    prefill: str | None = None
    """How the reply is begun for the model; part of the prompt's tokens, not of the completion."""
    answer: str | None = None
    metadata: Mapping[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if bool(self.messages) == bool(self.text):
            raise ValueError(f"prompt {self.id!r}: give exactly one of messages and text, neither empty")


@dataclass(frozen=True)
class Scored:
    """What the scorers make of one completion; a scorer that failed is in `failures` and not in `scores`.

    Example:
        Scored({"last-number": 1.0}, (Failure("timeout", "reward 'my:f' on prompt 'p/3' took more than 10 s"),))
    """

    scores: dict[str, float]
    failures: tuple[Failure, ...] = ()


class Task(Protocol):
    """Made by `make_task`; implemented by `ReasoningGymTask` and `FileTask`."""

    name: str
    scorer: str
    """Which of `scores` is the reward."""

    @property
    def held_out_count(self) -> int:
        """How many held-out prompts there are."""
        ...

    @property
    def train_count(self) -> int | None:
        """How many train prompts there are before they repeat; None where they are drawn without end."""
        ...

    def prompts(self, split: Split, start: int, count: int) -> list[Prompt]:
        """Prompts start .. start+count-1. Raises ValueError past the end of `held_out`."""
        ...

    def score_all(self, pairs: Sequence[tuple[Prompt, str]]) -> list[Scored]:
        """Every scorer that applies, by name; the reward is one of them, the others are for the log.

        A completion is what was sampled after the prefill, without special tokens. An empty one scores
        as a wrong answer; one cut off at its token limit is scored as it stands.
        """
        ...

    def scores(self, prompt: Prompt, completion: str) -> dict[str, float]:
        """`score_all` of one completion. Raises RewardError if a scorer fails."""
        ...

    def reward(self, prompt: Prompt, completion: str) -> float:
        """`scores(prompt, completion)[scorer]`: finite."""
        ...

    def close(self) -> None:
        """End the processes in which rewards run, if there are any; a later call starts new ones."""
        ...

    def encode(self, tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> list[int]:
        """The ids to sample from. Raises ValueError naming the prompt if there are too many."""
        ...

    def split_report(self) -> dict[str, Any]:
        """How train and held-out were kept apart, as numbers for the run folder."""
        ...


def only_scores(scored: Scored) -> dict[str, float]:
    """The scores, where none failed. Raises RewardError with the first failure."""
    if scored.failures:
        raise RewardError(scored.failures[0])
    return scored.scores


def encode_prompt(tokenizer: PreTrainedTokenizerBase, prompt: Prompt, max_tokens: int) -> list[int]:
    """Ids of the chat template with the generation prompt, then the prefill. At least one, at most `max_tokens`.

    Template and prefill are tokenized as one string: the ids are those of the finished reply's text.
    Raises ValueError naming the prompt.
    """
    if prompt.text is not None:
        text, special = prompt.text + (prompt.prefill or ""), True
    else:
        text, special = _chat_text(tokenizer, prompt), False
    try:
        ids = tokenizer(text, add_special_tokens=special).input_ids
    except TypeError as error:  # What tokenizers raise for half a surrogate pair, "\ud800".
        raise ValueError(f"prompt {prompt.id!r} holds text that is no Unicode ({error}); mend it") from error
    if not ids:
        raise ValueError(f"prompt {prompt.id!r} has no tokens: its text is {text[:40]!r}; drop it")
    if len(ids) > max_tokens:
        raise ValueError(
            f"prompt {prompt.id!r} has {len(ids)} tokens, task.max_prompt_tokens is {max_tokens}; "
            "raise the limit or drop the prompt"
        )
    return list(ids)


def _chat_text(tokenizer: PreTrainedTokenizerBase, prompt: Prompt) -> str:
    if not tokenizer.chat_template:
        raise ValueError(
            f"prompt {prompt.id!r} is a chat and the tokenizer {tokenizer.name_or_path!r} has no chat "
            "template; set task.chat = false to send plain text, or use an instruct model"
        )
    text = tokenizer.apply_chat_template(list(prompt.messages), add_generation_prompt=True, tokenize=False)
    return str(text) + (prompt.prefill or "")


def completion_text(tokenizer: PreTrainedTokenizerBase, token_ids: Sequence[int]) -> str:
    """What a reward is given: the sampled ids as text, special tokens (the end token too) dropped."""
    ids = list(token_ids)
    return str(tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False))


def check_lengths(task: Task, tokenizer: PreTrainedTokenizerBase, train_count: int) -> int:
    """Encode every held-out prompt and those of train; the longest length in tokens.

    Of a train split without end the first `train_count`, of any other all: a prompt that is too long must
    not end a run hours after its start. Raises the ValueError of `encode` at the first of them: call it
    before any work is done.
    """
    train_count = train_count if task.train_count is None else task.train_count
    prompts = task.prompts("held_out", 0, task.held_out_count) + task.prompts("train", 0, train_count)
    return max((len(task.encode(tokenizer, prompt)) for prompt in prompts), default=0)


def check_held_out_range(name: str, start: int, count: int, available: int) -> None:
    """The rule of `Task.prompts("held_out", ...)`. Raises ValueError."""
    if start < 0 or count < 0 or start + count > available:
        raise ValueError(
            f"task {name!r}: held-out prompts {start} .. {start + count - 1} asked for, there are "
            f"{available}; ask for fewer or raise task.held_out"
        )
