"""Batches that the tests of `objectives` share: one worked by hand, one for loops, random ones."""

import math

import torch

from lowbitrl.objectives import get_objective, policy_loss

BUILT_IN = ("grpo", "dr_grpo", "dapo", "gspo", "tbpo", "sapo", "cispo", "positive_only", "reinforce")
NAN, INF = float("nan"), float("inf")


def hand_2x3(dtype=torch.float64):
    """Ratios [1.5, 1, 0.5 | 1.5, 0.5, -], mismatch weights [3, 1, 1.125 | 0.5, 0.5, -], A = [1, -2].

    Geometric means: ratio 0.75 ** (1/3) and 0.75 ** (1/2), weight 1.5 and 0.5.
    Products: weight 3.375 and 0.25.
    """
    old = torch.tensor([[0.4, 0.5, 0.8], [0.4, 0.6, 0.9]], dtype=dtype).log()
    new = torch.tensor([[0.6, 0.5, 0.4], [0.6, 0.3, 0.1]], dtype=dtype).log()
    weight = torch.tensor([[3.0, 1.0, 1.125], [0.5, 0.5, 7.0]], dtype=dtype).log()
    return {
        "logprobs": new.requires_grad_(),
        "old_logprobs": old,
        "rollout_logprobs": old - weight,
        "advantages": torch.tensor([1.0, -2.0], dtype=dtype),
        "mask": torch.tensor([[1, 1, 1], [1, 1, 0]]),
    }


def batch_3x4(dtype=torch.float64):
    """Responses of length 4, 2 and 3, a hole in the mask, ratios 0.4 to 4, A = [0.7, -1.3, -0.4]."""
    ratio = torch.tensor([[1.1, 0.9, 1.6, 0.4], [4.0, 1.2, 0.3, 9.0], [0.95, 2.5, 1.05, 0.7]], dtype=dtype)
    old = torch.tensor(
        [[-1.0, -0.2, -3.0, -0.7], [-2.0, -0.1, -0.4, -9.0], [-0.3, -1.5, -0.8, -2.2]], dtype=dtype
    )
    weight = torch.tensor([[1.2, 0.8, 0.9, 1.3], [0.3, 0.6, 5.5, 1.0], [1.0, 1.05, 6.0, 0.97]], dtype=dtype)
    return {
        "logprobs": (old + ratio.log()).requires_grad_(),
        "old_logprobs": old,
        "rollout_logprobs": old - weight.log(),
        "advantages": torch.tensor([0.7, -1.3, -0.4], dtype=dtype),
        "mask": torch.tensor([[1, 1, 1, 1], [1, 1, 0, 0], [1, 0, 1, 1]]),
    }


def random_batch(seed, num_responses=5, num_tokens=7, dtype=torch.float64, spread=0.3, mismatch=0.2):
    """A batch with random masks (rows may be empty), a gradient on logprobs, plausible log-probabilities."""
    generator = torch.Generator().manual_seed(seed)

    def normal():
        return torch.randn(num_responses, num_tokens, generator=generator, dtype=dtype)

    old = -normal().abs()
    return {
        "logprobs": (old + spread * normal()).requires_grad_(),
        "old_logprobs": old,
        "rollout_logprobs": old + mismatch * normal(),
        "advantages": normal()[:, 0],
        "mask": torch.rand(num_responses, num_tokens, generator=generator) > 0.3,
    }


def run(name, batch, **options):
    """(PolicyLoss, gradient of its loss with respect to logprobs) on a copy of `batch`."""
    logprobs = batch["logprobs"].detach().clone().requires_grad_()
    out = policy_loss(name, **(batch | {"logprobs": logprobs}), **options)
    (gradient,) = torch.autograd.grad(out.loss, logprobs)
    return out, gradient


def detached(batch):
    return {key: value.detach().clone() for key, value in batch.items()}


def textbook(name, batch, **parameters):
    """(loss, gradient) of a surrogate by the papers' min and max, in Python floats, one token at a time."""
    chosen = get_objective(name).parameters | parameters
    new, old, weight = (batch[k].tolist() for k in ("logprobs", "old_logprobs", "rollout_logprobs"))
    rows = [[t for t, valid in enumerate(row) if valid] for row in batch["mask"].tolist()]
    lengths, count = [len(row) for row in rows], sum(map(len, rows))
    num = sum(1 for length in lengths if length)
    divisor = {
        "seq-mean-token-mean": lambda i: num * lengths[i],
        "seq-mean-token-sum": lambda i: num,
        "token-mean": lambda i: count,
    }[get_objective(name).aggregate]
    loss, gradient = 0.0, [[0.0] * len(row) for row in new]
    for i, row in enumerate(rows):
        advantage = batch["advantages"][i].item()
        diffs = [new[i][t] - old[i][t] for t in row]
        scale = 1.0
        if chosen.get("tis_cap"):
            scale = min(math.exp(sum(old[i][t] - weight[i][t] for t in row) / len(row)), chosen["tis_cap"])
        for t in row:
            whole = name in ("gspo", "tbpo")
            ratio = math.exp(sum(diffs) / len(row)) if whole else math.exp(new[i][t] - old[i][t])
            value, slope = _textbook_term(name, ratio, new[i][t], advantage, chosen)
            loss -= scale * value / divisor(i)
            gradient[i][t] -= scale * slope / divisor(i)
    return loss, torch.tensor(gradient, dtype=torch.float64)


def _textbook_term(name, ratio, logprob, advantage, p):
    """(objective to maximize, its derivative by the token's log-probability), before any division."""
    if name == "reinforce":
        return advantage * logprob, advantage
    if name == "cispo":
        weight = min(max(ratio, 1 - p["clip_low"]), 1 + p["clip_high"])
        return weight * advantage * logprob, weight * advantage
    if name == "sapo":
        tau = p["tau_positive"] if advantage > 0 else p["tau_negative"]
        gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
        return 4 / tau * gate * advantage, 4 * gate * (1 - gate) * ratio * advantage
    if name == "tbpo":
        low, high = (0, 1 + p["eps_high"]) if advantage >= 0 else (1 - p["delta_low"], 1 + p["delta_high"])
        clipped = min(max(ratio, low), high)
        return clipped * advantage, advantage * ratio * (clipped == ratio)
    advantage = max(advantage, 0) if name == "positive_only" else advantage
    clipped = min(max(ratio, 1 - p["clip_low"]), 1 + p["clip_high"])
    value, slope = min((ratio * advantage, ratio * advantage), (clipped * advantage, 0.0))
    if ratio == clipped:
        slope = ratio * advantage
    floor = p["dual_clip"] * advantage if p.get("dual_clip") else -INF
    return (floor, 0.0) if advantage < 0 and floor > value else (value, slope)
