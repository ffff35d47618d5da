"""Seeded sampling by inverse transform: one uniform number a token, drawn before it is known.

A request's stream of uniforms depends on its seed alone, so its randomness does not change with
the other requests of a batch, the batch's order or its size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

SEED_LIMIT = 2**63


def uniforms(seed: int, sample: int, count: int) -> Tensor:
    """The first `count` numbers in [0, 1) of stream (seed, sample), fp32 on the CPU.

    Raises:
        ValueError: a seed that is negative or not below 2^63.
    """
    if not 0 <= seed < SEED_LIMIT:
        raise ValueError(f"seed={seed} must be from 0 to 2^63 - 1")
    stream = np.random.Generator(np.random.Philox(key=np.array([seed, sample], dtype=np.uint64)))
    return torch.from_numpy(stream.random(count, dtype=np.float32))


def sample(logits: Tensor, temperature: float, uniform: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Draw one token a row from softmax(logits / temperature).

    Args:
        logits: (R, V), any float dtype; the arithmetic is fp32.
        temperature: 0 is greedy: the distribution is then certain, and the log-probability 0.
        uniform: (R,) numbers in [0, 1).

    Returns:
        tokens (R,) int64, their log-probabilities (R,) fp32, and logsumexp (R,) fp32: where it is not finite, the
        row's logits hold NaN or +Inf, and its token means nothing.
    """
    scaled = logits.float() / (temperature or 1.0)
    total = scaled.logsumexp(-1)
    if temperature == 0.0:
        return scaled.argmax(-1), torch.zeros_like(total), total
    cumulative = (scaled - total[:, None]).exp_().cumsum_(-1)
    # Scaled by the last entry, since rounding leaves the sum a little off 1; right=True never
    # lands on a token of probability zero.
    target = uniform.to(cumulative) * cumulative[:, -1]
    tokens = torch.searchsorted(cumulative, target[:, None], right=True).squeeze(-1)
    tokens = tokens.clamp_(max=logits.shape[-1] - 1)
    return tokens, scaled.gather(-1, tokens[:, None]).squeeze(-1) - total, total
