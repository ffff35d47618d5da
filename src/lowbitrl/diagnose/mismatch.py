"""The distance between sampler and learner on tokens that the sampler drew.

d_t             = old_logprobs_t - rollout_logprobs_t    nats, per token
k3              = mean(exp(d) - d - 1)                   an estimate of KL(rollout || learner)
mult error      = mean(exp|d|)                           1.05 is a common alarm level
outside         = share of tokens with exp(d) outside 1 +- eps
effective share = (sum w)^2 / (n sum w^2), w = exp(sum_t d) of each of n responses
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.diagnose.statistics import RATIO_LIMIT, Estimate, bootstrap
from lowbitrl.objectives import mismatch_metrics
from lowbitrl.rollout import Completion
from lowbitrl.trainer.batch import micro_batches
from lowbitrl.trainer.logprobs import response_logprobs
from lowbitrl.trainer.routes import RoutePass

EPS = 0.2  # of "outside 1 +- eps": PPO's usual clip range


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
    names = (
        "mismatch/abs_mean",
        "mismatch/abs_p99",
        "mismatch/abs_max",
        "rollout_corr/k3_kl",
        "token_mult_prob_error",
    )
    return Mismatch(*(float(metrics[name]) for name in names), tokens=old.numel())


def differences(learner: Sequence[Tensor], rollout: Sequence[Tensor]) -> list[Tensor]:
    """Per response learner - rollout, (T_i,) fp32 on the CPU."""
    return [a.float().cpu() - b.float().cpu() for a, b in zip(learner, rollout, strict=True)]


def estimates(diffs: Sequence[Tensor], eps: float = EPS) -> dict[str, Estimate]:
    """Every figure of this module with its 95% interval by bootstrap over responses.

    Args:
        diffs: (T_i,) nats of each response, T_i >= 1.

    Raises:
        ValueError: no responses.
    """
    cut = [d.clamp(-RATIO_LIMIT, RATIO_LIMIT) for d in diffs]
    per_token = {
        "mean": [d.abs() for d in diffs],
        "k3": [d.exp() - d - 1 for d in cut],
        "token_mult_prob_error": [d.abs().exp() for d in cut],
        "outside": [((d.exp() - 1).abs() > eps).float() for d in cut],
    }
    figures = {name: bootstrap(values, "mean") for name, values in per_token.items()}
    figures["p99"] = bootstrap([d.abs() for d in diffs], "p99")
    figures["max"] = bootstrap([d.abs() for d in diffs], "max")
    figures["effective_share"] = bootstrap(
        [d.sum().clamp(-RATIO_LIMIT, RATIO_LIMIT).exp()[None] for d in diffs], "effective_share"
    )
    return figures


@torch.no_grad()
def score(
    model: PreTrainedModel,
    prompts: Sequence[Sequence[int]],
    completions: Sequence[Completion],
    *,
    temperature: float = 1.0,
    micro_batch_tokens: int = 8192,
    replay: bool = False,
) -> list[Tensor]:
    """A model's log-probabilities of sampled responses, (T_i,) fp32 each, in the order given.

    Args:
        replay: send tokens to the experts that the completions say they took (a mixture of experts).
    """
    lengths = [len(prompts[c.prompt_index]) + len(c.token_ids) for c in completions]
    scored: dict[int, Tensor] = {}
    for rows in micro_batches(lengths, micro_batch_tokens, "padded"):
        chosen = [completions[i] for i in rows]
        logprobs, _ = response_logprobs(
            model,
            [prompts[c.prompt_index] for c in chosen],
            [c.token_ids for c in chosen],
            temperature=temperature,
            routes=RoutePass([c.routes for c in chosen if c.routes is not None], replay=True)
            if replay
            else None,
        )
        scored.update(
            (i, row[: len(completions[i].token_ids)].cpu()) for i, row in zip(rows, logprobs, strict=True)
        )
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
