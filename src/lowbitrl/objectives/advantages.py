"""Advantages from the rewards of a group: several responses to one prompt."""

from dataclasses import dataclass

import torch
from torch import Tensor

SCALES = ("std", "none")
BASELINES = ("mean", "leave-one-out")


@dataclass(frozen=True)
class GroupAdvantages:
    """What a group baseline makes of a batch of B rewards in G groups.

    Example, group_size=2, rewards [1, 0, 1, 1], scale="none": advantages [0.5, -0.5, 0, 0],
    informative [True, True, False, False], num_groups 2, num_zero_variance 1.
    """

    advantages: Tensor
    """(B,) fp32; exactly 0 in a group whose rewards are all equal."""
    informative: Tensor
    """(B,) bool: the response's group has rewards that differ. DAPO's dynamic sampling keeps only these."""
    num_groups: int
    num_zero_variance: int
    """Groups that teach nothing: all rewards equal, a group of one included."""


def group_advantages(
    rewards: Tensor,
    group_ids: Tensor | None = None,
    *,
    group_size: int | None = None,
    scale: str = "std",
    baseline: str = "mean",
    eps: float = 1e-6,
) -> GroupAdvantages:
    """(reward - baseline) / scale within each group.

    rewards: (B,), any real dtype. Groups: `group_ids` (B,) integers in any order, or `group_size` consecutive
    responses a group; give exactly one.
    scale: "std" divides by (sample standard deviation + eps) (GRPO, Shao et al. 2024, with verl's n - 1),
    "none" does not (Dr.GRPO). baseline: "mean" of the group, or "leave-one-out", the mean of the others
    (RLOO, Ahmadian et al. 2024).
    Raises ValueError for rewards that are not (B,) or not finite, or groups that do not fit them.
    """
    rewards = _checked(rewards, scale, baseline)
    index, count = _group_index(rewards, group_ids, group_size)
    size = torch.zeros(count, device=rewards.device).index_add_(0, index, torch.ones_like(rewards))
    mean = torch.zeros_like(size).index_add_(0, index, rewards) / size
    # Equal rewards are found by comparing them: their mean, and so their deviation, may round off zero.
    high = torch.full_like(size, -torch.inf).scatter_reduce_(0, index, rewards, "amax")
    low = torch.full_like(size, torch.inf).scatter_reduce_(0, index, rewards, "amin")
    varied = high > low
    centred = torch.where(varied[index], rewards - mean[index], 0.0)
    advantages = centred
    if baseline == "leave-one-out":
        advantages = advantages * (size / (size - 1).clamp(min=1))[index]
    if scale == "std":
        variance = torch.zeros_like(size).index_add_(0, index, centred**2) / (size - 1).clamp(min=1)
        advantages = advantages / (variance.sqrt() + eps)[index]
    return GroupAdvantages(advantages, varied[index], count, int((~varied).sum()))


def _checked(rewards: Tensor, scale: str, baseline: str) -> Tensor:
    if scale not in SCALES:
        raise ValueError(f"scale={scale!r} is not one of {', '.join(SCALES)}")
    if baseline not in BASELINES:
        raise ValueError(f"baseline={baseline!r} is not one of {', '.join(BASELINES)}")
    rewards = rewards.detach().float()
    if rewards.dim() != 1 or not bool(rewards.isfinite().all()):
        raise ValueError(f"rewards must be finite and of shape (B,), got shape {tuple(rewards.shape)}")
    return rewards


def _group_index(rewards: Tensor, group_ids: Tensor | None, group_size: int | None) -> tuple[Tensor, int]:
    """Group number of each response, 0..G-1, and G."""
    if (group_ids is None) == (group_size is None):
        raise ValueError("give exactly one of group_ids and group_size")
    if group_size is not None:
        if group_size < 1 or len(rewards) % group_size:
            raise ValueError(f"{len(rewards)} rewards do not divide into groups of group_size={group_size}")
        group_ids = torch.arange(len(rewards), device=rewards.device) // group_size
    if group_ids is None or group_ids.shape != rewards.shape:
        raise ValueError(f"group_ids must have the shape of rewards, {tuple(rewards.shape)}")
    names, index = group_ids.to(rewards.device).unique(return_inverse=True)
    return index, len(names)
