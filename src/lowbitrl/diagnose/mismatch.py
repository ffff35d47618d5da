"""The distance between sampler and learner on tokens that the sampler drew.

    mismatch_t = old_logprobs_t - rollout_logprobs_t        nats, per token
    k3         = mean(exp(d) - d - 1)                       an estimate of KL(rollout || learner)
    mult_error = mean(exp|d|)                               1.05 is a common alarm level
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.objectives import mismatch_metrics
from lowbitrl.rollout import Completion
from lowbitrl.trainer.batch import micro_batches
from lowbitrl.trainer.logprobs import response_logprobs


@dataclass(frozen=True)
class Mismatch:
    """A mismatch in numbers: absolute mean, 99th percentile and maximum in nats, k3, exp error, token count."""

    mean: float
    p99: float
    max: float
    k3: float
    token_mult_prob_error: float
    tokens: int

    def __str__(self) -> str:
        return (
            f"mean {self.mean:.4f}  p99 {self.p99:.3f}  max {self.max:.2f} nats  k3 {self.k3:.4f}  "
            f"exp error {self.token_mult_prob_error:.3f}  on {self.tokens} tokens"
        )


def compare(learner: Sequence[Tensor], rollout: Sequence[Tensor]) -> Mismatch:
    """Mismatch of two scorings of the same responses, one (T_i,) tensor a response each.

    Raises:
        ValueError: nothing to compare.
    """
    if not learner:
        raise ValueError("no responses to compare; sample at least one")
    old = torch.cat([t.float().cpu() for t in learner])[None]
    new = torch.cat([t.float().cpu() for t in rollout])[None]
    metrics = mismatch_metrics(old, new, torch.ones_like(old, dtype=torch.bool))
    names = ("mismatch/abs_mean", "mismatch/abs_p99", "mismatch/abs_max", "rollout_corr/k3_kl", "token_mult_prob_error")
    return Mismatch(*(float(metrics[name]) for name in names), tokens=old.numel())


@torch.no_grad()
def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    temperature: float = 1.0,
    micro_batch_tokens: int = 8192,
) -> list[Tensor]:
    """A model's log-probabilities of sampled responses, (T_i,) fp32 each, in the order given."""
    lengths = [len(prompts[c.prompt_index]) + len(c.token_ids) for c in completions]
    scored: dict[int, Tensor] = {}
    for rows in micro_batches(lengths, micro_batch_tokens, "padded"):
        chosen = [completions[i] for i in rows]
        logprobs, _ = response_logprobs(
            model,
            [prompts[c.prompt_index] for c in chosen],
            [c.token_ids for c in chosen],
            temperature=temperature,
        )
        scored.update((i, row[: len(completions[i].token_ids)].cpu()) for i, row in zip(rows, logprobs, strict=True))
    return [scored[i] for i in range(len(completions))]


def measure(
    learner: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    temperature: float = 1.0,
) -> Mismatch:
    """Score an engine's completions with the learner and compare with what the engine said.

    Args:
        learner: prepared or not.
        prompts: the token ids given to `engine.generate`.
        completions: what it returned, with its own log-probabilities.
    """
    rollout = [torch.tensor(c.rollout_logprobs) for c in completions]
    return compare(score(learner, prompts, completions, temperature=temperature), rollout)
