"""From per-token losses to one number. The only file of this package that divides a loss.

With x the per-token loss, L_i the tokens counted in response i, and N the responses with L_i > 0:

    token-mean               sum_it x / sum_i L_i            DAPO eq. 8
    seq-mean-token-mean      (1/N) sum_i (1/L_i) sum_t x     GRPO; QUADS eq. 1, its "sample-averaged loss"
    seq-mean-token-sum       (1/N) sum_i sum_t x             Dr.GRPO
    seq-mean-token-sum-norm  (1/(N max_tokens)) sum_it x     Dr.GRPO with its constant

The names are verl's. Each is numerator / denominator with a numerator that is a sum over responses, so any
split of a batch over micro-batches and ranks adds up to the whole batch's loss once all divide by the whole
batch's denominator: sum `denominator_of` over the splits first, then pass the sum to every one of them.
"""

import torch
from torch import Tensor

from lowbitrl.objectives.ratios import zero_outside

AGGREGATES = ("token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm")


def denominator_of(counted_BT: Tensor, aggregate: str, *, max_tokens: int | None = None) -> Tensor:
    """What `aggregate` divides by: a 0-d float32 tensor, additive over any split of the responses.

    `counted_BT` (B, T) marks the tokens that count: the response mask, or mask & keep where rejected tokens
    leave the denominator. `max_tokens` is the constant of "seq-mean-token-sum-norm", usually the longest
    response allowed; it has no default because the padded width changes from batch to batch.
    May be 0 (nothing counted). Raises ValueError for an unknown mode or a missing `max_tokens`.
    """
    counted_BT = counted_BT.bool()
    _check(aggregate, max_tokens)
    if aggregate == "token-mean":
        return counted_BT.sum().float()
    return counted_BT.any(-1).sum().float() * (max_tokens or 1)


def aggregate_loss(
    per_token_BT: Tensor,
    kept_BT: Tensor,
    aggregate: str,
    *,
    counted_BT: Tensor | None = None,
    denominator: Tensor | float | None = None,
    max_tokens: int | None = None,
) -> Tensor:
    """Sum `per_token_BT` over `kept_BT` and divide as `aggregate` says: a 0-d tensor.

    `kept_BT` (B, T) marks the tokens that contribute, `counted_BT` those that count in the denominator
    (default: the kept ones). `denominator` replaces this batch's own, for micro-batches and ranks.
    Where it is 0, nothing was kept anywhere and the loss is 0, still attached to the graph.
    """
    counted_BT = kept_BT if counted_BT is None else counted_BT
    own = denominator_of(counted_BT, aggregate, max_tokens=max_tokens)
    total = _numerator(zero_outside(per_token_BT, kept_BT), counted_BT, aggregate)
    divisor = torch.as_tensor(own if denominator is None else denominator).to(total)
    return total / torch.where(divisor > 0, divisor, torch.ones_like(divisor))


def _numerator(kept_loss_BT: Tensor, counted_BT: Tensor, aggregate: str) -> Tensor:
    if aggregate == "seq-mean-token-mean":
        return (kept_loss_BT.sum(-1) / counted_BT.sum(-1).clamp(min=1)).sum()
    return kept_loss_BT.sum()


def _check(aggregate: str, max_tokens: int | None) -> None:
    if aggregate not in AGGREGATES:
        raise ValueError(f"aggregate={aggregate!r} is not one of {', '.join(AGGREGATES)}")
    constant = aggregate == "seq-mean-token-sum-norm"
    if constant and (max_tokens is None or max_tokens < 1):
        raise ValueError(f"aggregate={aggregate!r} needs max_tokens >= 1 (the longest response allowed)")
    if max_tokens is not None and not constant:
        raise ValueError(f"max_tokens belongs to 'seq-mean-token-sum-norm', not to aggregate={aggregate!r}")
