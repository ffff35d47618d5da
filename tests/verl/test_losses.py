"""Our objectives through verl's `ppo_loss`: the same loss and gradient, whole or in parts; what is refused."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict
from verl.utils import tensordict_utils as tu
from verl.workers.config import FSDPActorConfig
from verl.workers.utils.losses import ppo_loss

from lowbitrl.integrations.verl.config import LowbitPolicyLoss
from lowbitrl.integrations.verl.losses import with_rollout_logprobs
from lowbitrl.objectives import get_objective, objective_names, policy_loss

LENGTHS = torch.tensor([5, 3, 6, 1])
PROMPT = 2


def nested(rows):
    return torch.nested.as_nested_tensor(list(rows), layout=torch.jagged)


def batch(seed=0):
    """Responses of different lengths: log-probabilities of three policies and advantages, as lists of rows."""
    generator = torch.Generator().manual_seed(seed)
    rows = {
        name: [-torch.rand(n, generator=generator) * 2 for n in LENGTHS]
        for name in ("new", "old_log_probs", "rollout_log_probs")
    }
    rows["advantages"] = [
        a.expand(n) for a, n in zip(torch.randn(4, generator=generator), LENGTHS, strict=True)
    ]
    return rows


def as_verl(rows, chosen, leave_out=()):
    """verl's batch of `chosen` responses, and the model's output with gradient, full sequences."""
    fields = {k: nested(rows[k][i] for i in chosen) for k in rows if k != "new" and k not in leave_out}
    lengths = [int(LENGTHS[i]) for i in chosen]
    fields["response_mask"] = nested(torch.ones(n) for n in lengths)
    fields["prompts"] = nested(torch.zeros(PROMPT, dtype=torch.long) for _ in lengths)
    fields["responses"] = nested(torch.zeros(n, dtype=torch.long) for n in lengths)
    data = TensorDict(fields, batch_size=len(lengths))
    total = int(LENGTHS.sum())
    tu.assign_non_tensor(data, dp_size=1, batch_num_tokens=total, global_batch_size=len(LENGTHS))
    # The log-probability of a token stands at the position before it.
    pad = torch.zeros(PROMPT - 1), torch.zeros(1)
    flat = torch.cat([torch.cat([pad[0], rows["new"][i], pad[1]]) for i in chosen]).requires_grad_()
    offsets = torch.tensor([0, *(PROMPT + n for n in lengths)]).cumsum(0)
    return data, {"log_probs": torch.nested.nested_tensor_from_jagged(flat, offsets)}, flat


def actor(name, **settings):
    loss = LowbitPolicyLoss(loss_mode=f"lowbitrl_{name}", lowbitrl=settings)
    return FSDPActorConfig(
        strategy="fsdp2",
        rollout_n=1,
        ppo_micro_batch_size_per_gpu=1,
        policy_loss=loss,
        loss_agg_mode=get_objective(name).aggregate,
    )


def padded(rows):
    return torch.nn.utils.rnn.pad_sequence(list(rows), batch_first=True)


def ours(name, rows, **settings):
    """Loss and gradient by `policy_loss` on the whole batch."""
    new = padded(rows["new"]).requires_grad_()
    parameters = settings.pop("parameters", {})
    out = policy_loss(
        name,
        logprobs=new,
        old_logprobs=padded(rows["old_log_probs"]),
        rollout_logprobs=padded(rows["rollout_log_probs"]),
        advantages=torch.stack([a[0] for a in rows["advantages"]]),
        mask=padded(torch.ones(int(n)) for n in LENGTHS),
        **settings,
        **parameters,
    )
    return out.loss.detach(), torch.autograd.grad(out.loss, new)[0]


def theirs(name, rows, parts, **settings):
    """Loss and gradient summed over micro-batches by verl."""
    whole = with_rollout_logprobs(partial(ppo_loss, config=actor(name, **settings)))
    losses, gradients = [], []
    for chosen in parts:
        data, output, flat = as_verl(rows, chosen)
        loss, metrics = whole(model_output=output, data=data)
        assert metrics
        losses.append(loss.detach())
        gradient = torch.autograd.grad(loss, flat)[0]
        ends = torch.tensor([PROMPT + int(LENGTHS[i]) for i in chosen]).cumsum(0)
        gradients += [
            gradient[e - LENGTHS[i] - 1 : e - 1] for e, i in zip(ends.tolist(), chosen, strict=True)
        ]
    return sum(losses), padded(gradients)


SETTINGS = {
    "tbpo": {"parameters": {"tis_cap": 1.2}},
    "grpo": {"correction": "mis", "level": "geometric", "cap": 1.3},
    "dapo": {"correction": "tis"},
}


@pytest.mark.parametrize("parts", [[[0, 1, 2, 3]], [[0, 1], [2, 3]], [[0], [1], [2], [3]]], ids=len)
@pytest.mark.parametrize("name", objective_names())
def test_losses_in_verl_are_ours_however_the_batch_is_cut(name, parts):
    rows, settings = batch(), SETTINGS.get(name, {})
    loss, gradient = theirs(name, rows, parts, **settings)
    expected, expected_gradient = ours(name, rows, **settings)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-7)
    torch.testing.assert_close(gradient, expected_gradient, rtol=1e-5, atol=1e-7)


def test_tbpo_without_the_samplers_word_is_refused_with_the_remedy():
    data, output, _ = as_verl(batch(), [0, 1])
    with pytest.raises(ValueError, match="VERL_ENGINE_VENDOR=lowbitrl") as refusal:
        ppo_loss(config=actor("tbpo"), model_output=output, data=data)
    assert "summed log-ratio" in str(refusal.value)
    ppo_loss(config=actor("tbpo", parameters={"tis_cap": None}), model_output=output, data=data)


def test_tbpo_where_the_rollout_gave_no_logprobs_is_refused():
    data, output, _ = as_verl(batch(), [0, 1], leave_out=["rollout_log_probs"])
    with pytest.raises(ValueError, match="calculate_log_probs"):
        with_rollout_logprobs(partial(ppo_loss, config=actor("tbpo")))(model_output=output, data=data)


def test_two_mismatch_weights_are_refused():
    rows = batch()
    rows["rollout_is_weights"] = [torch.ones(int(n)) for n in LENGTHS]
    data, output, _ = as_verl(rows, [0, 1])
    whole = with_rollout_logprobs(partial(ppo_loss, config=actor("tbpo")))
    with pytest.raises(ValueError, match="already weighs"):
        whole(model_output=output, data=data)
    with_rollout_logprobs(partial(ppo_loss, config=actor("grpo")))(model_output=output, data=data)


def test_token_level_advantages_are_refused():
    rows = batch()
    rows["advantages"] = [torch.arange(float(n)) for n in LENGTHS]
    data, output, _ = as_verl(rows, [0, 1])
    with pytest.raises(ValueError, match="one a response"):
        ppo_loss(config=actor("grpo"), model_output=output, data=data)
