"""A learner under another recipe for a few passes: that recipe's bits, and its own again afterwards."""

from __future__ import annotations

import copy

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.quant.wearing import compute_in, wearing
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe

IDS = torch.tensor([[3, 5, 8, 13, 21], [34, 55, 89, 14, 23]])
RECIPES = [
    (Recipe(rollout="nvfp4", learner="bf16"), "learner"),
    (Recipe(rollout="nvfp4", learner="weights"), "learner"),
    (Recipe(rollout="nvfp4", learner="full"), "learner"),
    (Recipe(rollout="nvfp4", residual=0.5, residual_scope="token"), "rollout"),
    (Recipe(rollout="int8"), "rollout"),
]


def logits(model):
    with torch.no_grad():
        return model(input_ids=IDS).logits


@pytest.mark.parametrize("make", [tiny_llama, tiny_moe])
@pytest.mark.parametrize("own", ["bf16", "weights", "full"])
@pytest.mark.parametrize(
    ("other", "side"), RECIPES, ids=lambda v: v if isinstance(v, str) else f"{v.rollout}-{v.learner}"
)
def test_passes_inside_are_the_other_recipes(make, own, other, side):
    model, reference = make(), make()
    prepare(model, Recipe(rollout="nvfp4", learner=own), "learner")
    prepare(reference, other, side)
    before, state = logits(model), {n: type(m) for n, m in model.named_modules()}
    with wearing(model, other, side):
        assert logits(model).equal(logits(reference))
    assert logits(model).equal(before)
    assert {n: type(m) for n, m in model.named_modules()} == state


def test_one_of_a_modules_stacks_may_be_kept():
    keep = ("lm_head", "*.down_proj")
    model, reference = tiny_moe(), tiny_moe()
    prepare(model, Recipe(rollout="nvfp4", learner="bf16"), "learner")
    prepare(reference, Recipe(rollout="nvfp4", keep=keep), "rollout")
    with wearing(model, Recipe(rollout="nvfp4", keep=keep), "rollout"):
        assert logits(model).equal(logits(reference))


def test_what_was_worn_comes_back_after_an_error():
    model = tiny_moe()
    prepare(model, Recipe(rollout="nvfp4", learner="bf16"), "learner")
    before = logits(model)
    with pytest.raises(KeyError), wearing(model, Recipe(rollout="nvfp4"), "rollout"):
        raise KeyError("inside")
    assert logits(model).equal(before)


def test_new_weights_are_encoded_anew():
    model = tiny_llama()
    prepare(model, Recipe(rollout="nvfp4", learner="bf16"), "learner")
    other = Recipe(rollout="nvfp4", learner="weights")
    with wearing(model, other, "learner"):
        first = logits(model)
    with torch.no_grad():
        model.model.layers[0].mlp.up_proj.weight.mul_(2)
    with wearing(model, other, "learner"):
        assert not logits(model).equal(first)


@pytest.mark.parametrize("make", [tiny_llama, tiny_moe])
def test_a_learner_prepared_in_fp32_computes_in_bf16_when_told(make):
    ready, late = make(), make()
    prepare(ready, Recipe(rollout="nvfp4-w4a16"), "learner")
    late = copy.deepcopy(late).float()
    prepare(late, Recipe(rollout="nvfp4-w4a16"), "learner")
    for parameter in late.parameters():  # as FSDP does; buffers stay
        parameter.data = parameter.data.bfloat16()
    compute_in(late, torch.bfloat16)
    assert logits(late).equal(logits(ready))


def test_static_scales_are_refused():
    model = tiny_llama()
    prepare(model, Recipe(rollout="nvfp4", learner="weights"), "learner")
    with (
        pytest.raises(ValueError, match="static"),
        wearing(model, Recipe(rollout="nvfp4", activation_scale="static"), "rollout"),
    ):
        pass
