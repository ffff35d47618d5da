"""What the learner trains on, and how it is cut into forward passes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Layout = Literal["padded", "packed"]


@dataclass(frozen=True)
class TrainingBatch:
    """B responses with what the objective needs; T is the longest response.

    Attributes:
        prompts / responses: token ids, B each.
        rollout_logprobs: (B, T) fp32, the engine's word when it sampled; 0 where masked.
        advantages: (B,) fp32.
        mask: (B, T) bool, True on sampled tokens that train.
        routes: experts that the rollout took, (prompt + response - 1, layers, k) a row; None where
            they were not recorded.

    Example:
        two responses of 3 and 1 tokens: mask = [[1, 1, 1], [1, 0, 0]]
    """

    prompts: tuple[tuple[int, ...], ...]
    responses: tuple[tuple[int, ...], ...]
    rollout_logprobs: Tensor
    advantages: Tensor
    mask: Tensor
    routes: tuple[Tensor, ...] | None = None

    @classmethod
    def build(
        cls,
        prompts: Sequence[Sequence[int]],
        responses: Sequence[Sequence[int]],
        rollout_logprobs: Sequence[Sequence[float]],
        advantages: Tensor,
        routes: Sequence[Tensor] | None = None,
    ) -> TrainingBatch:
        """Pad to (B, T).

        Raises:
            ValueError: a response without tokens (it has no log-probability to train on), a prompt
                without tokens (nothing predicts the response's first), or counts that differ.
        """
        if not len(prompts) == len(responses) == len(advantages):
            raise ValueError(
                f"{len(prompts)} prompts, {len(responses)} responses and {len(advantages)} advantages; give one "
                "of each a row"
            )
        if not all(prompts):
            raise ValueError(
                f"prompt {list(map(bool, prompts)).index(False)} is empty; give at least one token"
            )
        for index, (response, logprobs) in enumerate(zip(responses, rollout_logprobs, strict=True)):
            if not response or len(response) != len(logprobs):
                raise ValueError(
                    f"response {index} has {len(response)} tokens and {len(logprobs)} log-probabilities; "
                    "drop empty responses before training"
                )
        longest = max(map(len, responses), default=0)
        mask = torch.zeros(len(responses), longest, dtype=torch.bool)
        padded = torch.zeros(len(responses), longest)
        for row, logprobs in enumerate(rollout_logprobs):
            padded[row, : len(logprobs)] = torch.tensor(list(logprobs))
            mask[row, : len(logprobs)] = True
        taken = None if routes is None else tuple(routes)
        return cls(tuple(map(tuple, prompts)), tuple(map(tuple, responses)), padded, advantages, mask, taken)

    def __len__(self) -> int:
        return len(self.responses)

    @property
    def lengths(self) -> list[int]:
        """Prompt plus response tokens of each row."""
        return [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]

    def select(self, rows: Sequence[int]) -> TrainingBatch:
        """The given rows, T unchanged."""
        index = torch.tensor(list(rows), dtype=torch.long)
        return TrainingBatch(
            tuple(self.prompts[i] for i in rows),
            tuple(self.responses[i] for i in rows),
            self.rollout_logprobs[index],
            self.advantages[index],
            self.mask[index],
            None if self.routes is None else tuple(self.routes[i] for i in rows),
        )


def micro_batches(lengths: Sequence[int], max_tokens: int, layout: Layout) -> list[list[int]]:
    """Cut rows into groups of at most `max_tokens` tokens (padding counted where there is any).

    Rows go by length, so that padding is small. Every row lands in exactly one group.

    Raises:
        ValueError: one row alone is over the limit.
    """
    groups: list[list[int]] = []
    for row in sorted(range(len(lengths)), key=lambda i: (lengths[i], i)):
        if lengths[row] > max_tokens:
            raise ValueError(
                f"row {row} has {lengths[row]} tokens, over trainer.micro_batch_tokens={max_tokens}; raise it"
            )
        group = groups[-1] if groups else None
        if group is not None and _size(group, row, lengths, layout) <= max_tokens:
            group.append(row)
        else:
            groups.append([row])
    return groups


def _size(group: list[int], row: int, lengths: Sequence[int], layout: Layout) -> int:
    if layout == "packed":
        return sum(lengths[i] for i in group) + lengths[row]
    return (len(group) + 1) * lengths[row]


@dataclass(frozen=True)
class ModelInput:
    """One forward pass over the rows of a micro-batch.

    Attributes:
        ids / positions: (b, L); one row with positions restarting at each sequence when packed.
        real: (b, L) bool.
        attention_mask: (b, L), or None where nothing is padded.
        predicts: (N,) flat indices into b * L of the states that predict the response tokens.
        targets: (N,) response tokens, row after row.
        spans: where each sequence stands in b * L.
    """

    ids: Tensor
    positions: Tensor
    real: Tensor
    attention_mask: Tensor | None
    predicts: Tensor
    targets: Tensor
    spans: tuple[slice, ...]


def arrange(
    prompts: Sequence[Sequence[int]], responses: Sequence[Sequence[int]], layout: Layout, device: torch.device
) -> ModelInput:
    """Lay sequences out for one forward pass: a row each, or all in one row."""
    sequences = [[*p, *r] for p, r in zip(prompts, responses, strict=True)]
    lengths = [len(s) for s in sequences]
    width = sum(lengths) if layout == "packed" else max(lengths)
    starts = (
        [sum(lengths[:i]) for i in range(len(lengths))]
        if layout == "packed"
        else [width * i for i in range(len(lengths))]
    )
    height = 1 if layout == "packed" else len(lengths)
    ids, positions = torch.zeros(2, height * width, dtype=torch.long)
    real = torch.zeros(height * width, dtype=torch.bool)
    places = tuple(slice(start, start + length) for start, length in zip(starts, lengths, strict=True))
    for span, sequence in zip(places, sequences, strict=True):
        ids[span], positions[span], real[span] = torch.tensor(sequence), torch.arange(len(sequence)), True
    spans = [(s + len(p) - 1, len(r)) for s, p, r in zip(starts, prompts, responses, strict=True)]
    predicts = torch.cat([torch.arange(first, first + count) for first, count in spans])
    ids, positions, real = (t.view(height, width).to(device) for t in (ids, positions, real))
    targets = torch.tensor([token for response in responses for token in response], device=device)
    mask = None if bool(real.all()) else real.long()
    return ModelInput(ids, positions, real, mask, predicts.to(device), targets, places)
