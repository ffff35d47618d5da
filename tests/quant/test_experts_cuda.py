"""Experts on a GPU: the two sides equal to the bit, every dispatch near the others, and no BF16 copy of all."""

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from tests.moe_models import KINDS, tiny_moe

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

DISPATCHES = ("eager", "grouped_mm", "batched_mm")
# grouped_mm's CUDA kernel wants rows of 16 bytes: wider experts than the CPU tests have.
WIDE = {"hidden_size": 64}


def worn(kind, dispatch, recipe, side, dtype=torch.bfloat16):
    model = tiny_moe(kind, dtype, dispatch, **WIDE).cuda()
    prepare(model, recipe, side)
    return model


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("residual", [0.0, 0.5])
def test_learner_and_rollout_return_the_same_bits_on_the_same_bytes(kind, dispatch, residual):
    recipe = Recipe(rollout="nvfp4", residual=residual, learner="full")
    ids = torch.arange(3, 31, device="cuda").view(2, 14)
    learner, rollout = (worn(kind, dispatch, recipe, side) for side in ("learner", "rollout"))
    with torch.no_grad():
        assert torch.equal(learner(ids).logits, rollout(ids).logits)


@pytest.mark.parametrize("kind", KINDS)
def test_dispatches_agree(kind):
    ids = torch.arange(3, 31, device="cuda").view(2, 14)
    recipe = Recipe(rollout="nvfp4-w4a16")
    with torch.no_grad():
        eager, *others = (worn(kind, d, recipe, "rollout")(ids).logits.float() for d in DISPATCHES)
    for other in others:
        assert (other - eager).norm() <= 0.02 * eager.norm()
