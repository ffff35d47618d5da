"""What every adapter asks of an objective and of a framework's tensors; torch alone, no framework."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from lowbitrl.objectives.corrections import LEAVE_DENOMINATOR
from lowbitrl.trainer.config import ObjectiveConfig


def make_objective(
    settings: Mapping[str, Any] | str, owner: str, owned: Mapping[str, str]
) -> ObjectiveConfig:
    """An objective from a name or its settings, once nothing in them is for the framework to decide.

    Args:
        owner: the framework, for messages.
        owned: settings that it decides, and what sets them there.

    Raises:
        ValueError: an unknown name or setting; one of `owned` that is not its default; a correction that takes
            rejected tokens out of the denominator, which frameworks fix before the loss runs.
    """
    given: dict[str, Any] = {"name": settings} if isinstance(settings, str) else dict(settings)
    objective = ObjectiveConfig(**given)
    for name, remedy in owned.items():
        if getattr(objective, name) != ObjectiveConfig.model_fields[name].default:
            raise ValueError(
                f"objective.{name}={getattr(objective, name)!r} is {owner}'s to decide: {remedy}; leave it unset"
            )
    counts = objective.count_rejected
    leaves = objective.correction in LEAVE_DENOMINATOR if counts is None else not counts
    if leaves and objective.correction != "none":
        raise ValueError(
            f"correction={objective.correction!r} takes rejected tokens out of the denominator, which {owner} fixes "
            "before the loss has scored them; set count_rejected=true"
        )
    return objective


OWNED = {
    "advantage_scale": "advantages come ready",
    "advantage_baseline": "advantages come ready",
    "drop_uninformative": "groups are chosen before the loss",
    "overlong_filter": "masks come ready",
    "overlong_buffer": "rewards come ready",
    "kl_coef": "not wired here",
}
"""Settings of an objective that come before any framework's loss."""


def one_a_response(advantages: Tensor, mask: Tensor) -> Tensor:
    """(B,) fp32 of advantages a token, (B, T); 0 for a response without a token.

    Raises:
        ValueError: they differ within a response.
    """
    mask = mask.bool()
    lowest = torch.where(mask, advantages, torch.inf).amin(-1)
    highest = torch.where(mask, advantages, -torch.inf).amax(-1)
    if bool((highest - lowest > 1e-5).any()):
        raise ValueError(
            "advantages differ within a response; these objectives take one a response: use GRPO's, RLOO's or another "
            "estimator of outcomes"
        )
    return torch.where(mask.any(-1), highest, 0.0).float()


def padded(parts: Sequence[Tensor], lengths: Sequence[int], what: str) -> Tensor:
    """(B, T) fp32 of B sequences, padded with 0 on the right.

    Raises:
        ValueError: a sequence of another length than its response: a part of it, under context parallelism.
    """
    for part, length in zip(parts, lengths, strict=True):
        if part.numel() != length:
            raise ValueError(
                f"{what} holds {part.numel()} of a response's {length} tokens: responses are split over ranks, and "
                "these objectives need them whole; set the context parallel size to 1"
            )
    return nn.utils.rnn.pad_sequence([part.float() for part in parts], batch_first=True)


def flat(per_token: Tensor, lengths: Sequence[int]) -> Tensor:
    """What `padded` padded, without the padding: (sum of lengths,)."""
    return torch.cat([row[:length] for row, length in zip(per_token, lengths, strict=True)])
