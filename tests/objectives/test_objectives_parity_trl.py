"""Against TRL's own loss, run on a stand-in for its trainer: same numbers, same gradients, to 1e-6.

TRL's loss is a method of its trainer, so the stand-in carries the few attributes that the method reads.
Skipped where TRL is not installed; written against TRL 1.16.
"""

from collections import defaultdict
from types import SimpleNamespace

import pytest
import torch
from objective_cases import random_batch, run

trainers = pytest.importorskip(
    "trl.trainer.grpo_trainer", reason="needs the extra `trl`", exc_type=ImportError
)


class Accelerator:
    """One process: gathering and reducing change nothing."""

    num_processes = 1
    sync_gradients = True

    def gather(self, tensor):
        return tensor

    def reduce(self, tensor, reduction):
        return tensor


def trl_loss(batch, *, loss_type, level="token", correction=None, beta=0.0, reference=None, **settings):
    """(loss, gradient) of TRL's `_compute_loss` with per-token log-probabilities handed to it."""
    logprobs = batch["logprobs"].detach().clone().requires_grad_()
    mask = batch["mask"].long()
    arguments = SimpleNamespace(
        delta=settings.get("delta"),
        sapo_temperature_pos=1.0,
        sapo_temperature_neg=1.05,
        use_bias_correction_kl=False,
        steps_per_generation=1,
    )
    trainer = SimpleNamespace(
        _get_per_token_logps_and_entropies=lambda *_, **__: (logprobs, torch.zeros_like(logprobs), None),
        args=arguments,
        accelerator=Accelerator(),
        model=SimpleNamespace(training=True),
        loss_type=loss_type,
        importance_sampling_level=level,
        epsilon_low=settings.get("epsilon_low", 0.2),
        epsilon_high=settings.get("epsilon_high", 0.28),
        beta=beta,
        max_completion_length=settings.get("max_completion_length"),
        use_vllm=correction is not None,
        vllm_importance_sampling_correction=correction is not None,
        current_gradient_accumulation_steps=1,
        top_entropy_quantile=1.0,
        off_policy_mask_threshold=None,
        aux_loss_enabled=False,
        _entropy_bonus_enabled=False,
        _metrics={"train": defaultdict(list)},
    )
    ids = torch.zeros_like(mask)
    inputs = {
        "prompt_ids": ids,
        "prompt_mask": torch.ones_like(ids),
        "completion_ids": ids,
        "completion_mask": mask,
        "advantages": batch["advantages"],
        "old_per_token_logps": batch["old_logprobs"],
        "ref_per_token_logps": reference,
        "importance_sampling_ratio": correction,
        "num_items_in_batch": mask.sum(),
    }
    loss = trainers.GRPOTrainer._compute_loss(trainer, None, inputs)
    return loss.detach(), torch.autograd.grad(loss, logprobs)[0]


def full_batch(seed):
    """TRL counts an empty response in its mean over responses and we do not, so none is empty here."""
    batch = random_batch(seed, num_responses=6, num_tokens=9, dtype=torch.float32)
    batch["mask"][:, 0] = True
    return batch


CASES = {
    "grpo": ({"loss_type": "grpo", "epsilon_high": 0.27}, {}),
    "grpo with dual clip": ({"loss_type": "grpo", "epsilon_high": 0.27, "delta": 1.4}, {"dual_clip": 1.4}),
    "dapo": ({"loss_type": "dapo"}, {}),
    "dr_grpo": (
        {"loss_type": "dr_grpo", "epsilon_high": 0.2, "max_completion_length": 9},
        {"aggregate": "seq-mean-token-sum-norm", "max_tokens": 9},
    ),
    "gspo": ({"loss_type": "grpo", "level": "sequence", "epsilon_low": 3e-4, "epsilon_high": 4e-4}, {}),
    "gspo wide": (
        {"loss_type": "grpo", "level": "sequence", "epsilon_low": 0.1, "epsilon_high": 0.2},
        {"clip_low": 0.1, "clip_high": 0.2},
    ),
    "sapo": ({"loss_type": "sapo"}, {}),
    # TRL's epsilon_high is the cap itself here.
    "cispo": ({"loss_type": "cispo", "epsilon_high": 5.0}, {}),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("seed", range(3))
def test_surrogates_equal_trls(case, seed):
    theirs, ours = CASES[case]
    batch = full_batch(seed)
    loss, gradient = trl_loss(batch, **theirs)
    out, our_gradient = run(case.split()[0], batch, **ours)
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("level", ["token", "sequence"])
@pytest.mark.parametrize("seed", range(3))
def test_tis_and_mis_equal_trls_truncation_and_masking(level, seed):
    batch = full_batch(seed)
    mask = batch["mask"]
    log_ratio = (batch["old_logprobs"] - batch["rollout_logprobs"]) * mask
    ratio = (log_ratio if level == "token" else log_ratio.sum(-1, keepdim=True)).exp()
    for correction, weight in (("tis", ratio.clamp(max=1.5)), ("mis", ratio.masked_fill(ratio > 1.5, 0))):
        loss, gradient = trl_loss(batch, loss_type="grpo", epsilon_high=0.27, correction=weight)
        out, our_gradient = run("grpo", batch, correction=correction, level=level, cap=1.5)
        torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(our_gradient, gradient, rtol=1e-6, atol=1e-6)


def test_the_kl_term_equals_trls():
    batch = full_batch(0)
    reference = batch["rollout_logprobs"]
    loss, gradient = trl_loss(batch, loss_type="grpo", epsilon_high=0.27, beta=0.05, reference=reference)
    out, our_gradient = run("grpo", batch | {"ref_logprobs": reference}, kl_coef=0.05, kl_kind="k3")
    torch.testing.assert_close(out.loss, loss, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(our_gradient, gradient, rtol=1e-6, atol=1e-6)
