"""Against verl's own losses, corrections, metrics and advantages: same numbers, same gradients, to 1e-6.

Skipped where verl is not installed; written against verl 0.9.1.
"""

import pytest
import torch
from objective_cases import random_batch, run

from lowbitrl.objectives import correct, group_advantages, kl_estimate, mismatch_metrics

algos = pytest.importorskip(
    "verl.trainer.ppo.core_algos", reason="needs the extra `verl`", exc_type=ImportError
)
corrections = pytest.importorskip("verl.trainer.ppo.rollout_corr_helper", exc_type=ImportError)
workers = pytest.importorskip("verl.workers.config", exc_type=ImportError)

CLOSE = {"rtol": 1e-6, "atol": 1e-6}


def full_batch(seed):
    batch = random_batch(seed, num_responses=6, num_tokens=9, dtype=torch.float32)
    batch["mask"][:, 0] = True
    return batch


def verl_loss(batch, mode, aggregate, weights=None, **settings):
    """(loss, gradient) of verl's registered policy loss `mode`."""
    logprobs = batch["logprobs"].detach().clone().requires_grad_()
    config = workers.FSDPActorConfig(
        strategy="fsdp", rollout_n=1, ppo_micro_batch_size_per_gpu=1, **({"clip_ratio_c": 1e9} | settings)
    )
    loss, _ = algos.get_policy_loss_fn(mode)(
        old_log_prob=batch["old_logprobs"],
        log_prob=logprobs,
        advantages=batch["advantages"].unsqueeze(-1).expand_as(logprobs),
        response_mask=batch["mask"].float(),
        loss_agg_mode=aggregate,
        config=config,
        rollout_is_weights=weights,
    )
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def clip(low, high):
    return {"clip_ratio_low": low, "clip_ratio_high": high}


CASES = {
    "grpo": ("vanilla", "seq-mean-token-mean", clip(0.2, 0.27), {}),
    "grpo with dual clip": (
        "vanilla",
        "seq-mean-token-mean",
        clip(0.2, 0.27) | {"clip_ratio_c": 1.3},
        {"dual_clip": 1.3},
    ),
    "dapo": ("vanilla", "token-mean", clip(0.2, 0.28), {}),
    "dr_grpo": ("vanilla", "seq-mean-token-sum", clip(0.2, 0.2), {}),
    "gspo": ("gspo", "seq-mean-token-mean", clip(3e-4, 4e-4), {}),
    "gspo by token": ("gspo", "seq-mean-token-mean", clip(0.1, 0.2), {"clip_low": 0.1, "clip_high": 0.2}),
    "sapo": ("sapo", "seq-mean-token-mean", {}, {}),
    "cispo": ("cispo", "token-mean", clip(0.2, 0.3), {"clip_low": 0.2, "clip_high": 0.3}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_surrogates_equal_verls(case, seed):
    mode, aggregate, theirs, ours = CASES[case]
    batch = full_batch(seed)
    loss, gradient = verl_loss(batch, mode, aggregate, **theirs)
    out, our_gradient = run(case.split()[0], batch, aggregate=aggregate, **ours)
    torch.testing.assert_close(out.loss, loss, **CLOSE)
    torch.testing.assert_close(our_gradient, gradient, **CLOSE)


def test_gspo_with_a_dual_clip_is_what_verl_does_not_have():
    batch = full_batch(0)
    batch["logprobs"] = batch["old_logprobs"] + 0.5
    theirs = [
        verl_loss(batch, "gspo", "token-mean", clip_ratio_c=c, **clip(0.1, 0.1))[0] for c in (1.05, 3.0)
    ]
    assert theirs[0].equal(theirs[1])
    ours = [run("gspo", batch, dual_clip=c, clip_low=0.1, clip_high=0.1)[0].loss for c in (1.05, 3.0)]
    assert not ours[0].equal(ours[1])


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("level", ["token", "sequence"])
def test_tis_equals_verls_weights_in_the_loss(level, seed):
    batch = full_batch(seed)
    mask = batch["mask"].float()
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    weights, _ = corrections.compute_rollout_correction_weights(log_ratio, mask, level, 1.5)
    loss, gradient = verl_loss(batch, "vanilla", "token-mean", weights, **clip(0.2, 0.28))
    out, our_gradient = run("dapo", batch, correction="tis", level=level, cap=1.5)
    torch.testing.assert_close(out.weights * mask, weights, **CLOSE)
    torch.testing.assert_close(out.loss, loss, **CLOSE)
    torch.testing.assert_close(our_gradient, gradient, **CLOSE)


@pytest.mark.parametrize("seed", range(3))
def test_icepop_equals_verls(seed):
    batch = full_batch(seed)
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    weights, _ = corrections.compute_rollout_correction_weights(
        log_ratio, batch["mask"].float(), "token", "0.8_1.2"
    )
    loss, gradient = verl_loss(batch, "vanilla", "seq-mean-token-mean", weights, **clip(0.2, 0.27))
    out, our_gradient = run("grpo", batch, correction="icepop", floor=0.8, cap=1.2)
    torch.testing.assert_close(out.loss, loss, **CLOSE)
    torch.testing.assert_close(our_gradient, gradient, **CLOSE)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(
    ("theirs", "ours"), [("token_k1", "token"), ("seq_sum_k1", "sequence"), ("seq_mean_k1", "geometric")]
)
def test_rejection_equals_verls_mask(theirs, ours, seed):
    batch = full_batch(seed)
    mask = batch["mask"].float()
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    kept, _ = corrections.compute_rollout_rejection_mask(log_ratio, mask, theirs, "0.9_1.1")
    sides = {k: batch[k] for k in ("old_logprobs", "rollout_logprobs", "mask")}
    # verl's k1 is -log w, so its bounds hold for 1 / w.
    got = correct("rejection", **sides, level=ours, cap=1 / 0.9, floor=1 / 1.1)
    assert (batch["mask"] & got.keep).equal(kept.bool())


def test_mismatch_metrics_equal_verls():
    batch = full_batch(1)
    sides = batch["old_logprobs"], batch["rollout_logprobs"]
    theirs = corrections.compute_offpolicy_metrics(*sides, batch["mask"].float())
    ours = mismatch_metrics(*sides, batch["mask"])
    assert {k: ours[f"rollout_corr/{k}"].item() for k in theirs} == pytest.approx(theirs, rel=1e-5, abs=1e-6)


def test_weight_metrics_equal_verls():
    batch = full_batch(1)
    mask = batch["mask"].float()
    log_ratio = batch["old_logprobs"] - batch["rollout_logprobs"]
    _, theirs = corrections.compute_rollout_correction_weights(log_ratio, mask, "token", 1.5)
    ours = run("grpo", batch, correction="tis", cap=1.5)[0].metrics
    for key in ("mean", "std", "min", "max", "eff_sample_size"):
        name = f"rollout_is_{key}"
        assert ours[f"rollout_corr/{name}"].item() == pytest.approx(theirs[name], rel=1e-5, abs=1e-6)


@pytest.mark.parametrize(("scale", "normalize"), [("std", True), ("none", False)])
def test_group_advantages_equal_verls(scale, normalize):
    rewards = torch.randn(12, generator=torch.Generator().manual_seed(0))
    index = torch.arange(12) % 3
    theirs, _ = algos.compute_grpo_outcome_advantage(
        rewards.unsqueeze(-1), torch.ones(12, 1), index.numpy(), norm_adv_by_std_in_grpo=normalize
    )
    ours = group_advantages(rewards, index, scale=scale)
    torch.testing.assert_close(ours.advantages, theirs[:, 0], **CLOSE)


@pytest.mark.parametrize(("kind", "theirs"), [("k1", "kl"), ("k2", "mse"), ("k3", "low_var_kl")])
def test_kl_estimates_equal_verls(kind, theirs):
    batch = full_batch(0)
    new, reference, mask = batch["logprobs"].detach(), batch["old_logprobs"], batch["mask"]
    got = kl_estimate(new, reference, mask, kind=kind)
    torch.testing.assert_close(got, algos.kl_penalty(new, reference, theirs) * mask, **CLOSE)
