"""The choice of rollout products: stated, refused where it can't be had, and the learner's bits by default."""

import pytest
import torch

from lowbitrl.config import ConfigError
from lowbitrl.kernels.w4a16_choice import measured_on
from lowbitrl.loop import train
from lowbitrl.quant import Recipe, attachment, describe_products, prepare, resolve
from lowbitrl.quant.products import why_experts_wait, why_not_low_bit, worn_experts
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe
from tests.tiny_run import config

CUDA, CPU = torch.device("cuda"), torch.device("cpu")


def reason(rollout, device=CUDA, dtype=torch.bfloat16):
    return why_not_low_bit(resolve(Recipe(rollout=rollout), tiny_moe()), device, dtype)


@pytest.mark.parametrize("rollout", ["nvfp4", "nvfp4-w4a16", "nvfp4-fp8", "int4", "int4-fp8"])
def test_low_bit_products_need_cuda_bf16_and_four_bit_weights(rollout):
    assert measured_on()
    assert reason(rollout) is None
    assert "the model is on cpu" in reason(rollout, CPU)
    assert "computes in torch.float32" in reason(rollout, dtype=torch.float32)


@pytest.mark.parametrize("rollout", ["bf16", "nvfp4-w16a4", "mxfp4", "mxfp8"])
def test_a_recipe_without_bytes_that_a_kernel_reads_is_refused(rollout):
    assert reason(rollout) == f"rollout={rollout!r} has no weights that they read"


def test_what_cannot_run_is_refused_before_the_model_is_touched():
    model = tiny_moe()
    with pytest.raises(
        ValueError, match=r"kernels='low-bit' can't run here.*CUDA.*rollout.kernels='learner'"
    ):
        prepare(model, Recipe(rollout="nvfp4"), "rollout", kernels="low-bit")
    assert not hasattr(model, "lowbitrl")
    with pytest.raises(ValueError, match="the learner multiplies decoded weights"):
        prepare(model, Recipe(rollout="nvfp4"), "learner", kernels="low-bit")


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        (Recipe(rollout="nvfp4", residual=0.5), None),
        (Recipe(rollout="nvfp4", residual_sites={"w2": 0.5}), "W2's residual is chosen expert by expert"),
        (Recipe(rollout="mxfp4"), "mxfp4"),
    ],
)
def test_experts_that_read_bytes_wait_for_no_host(recipe, reason):
    model = tiny_moe()
    prepare(model, recipe, "rollout")
    assert why_experts_wait(model) == "rollout.kernels = 'learner'"
    for experts in worn_experts(model):
        experts.low_bit = True
    found = why_experts_wait(model)
    assert found is None if reason is None else reason in found
    assert why_experts_wait(tiny_llama()) is None


def test_the_statement_counts_what_reads_bytes():
    model = tiny_moe()
    prepare(model, Recipe(rollout="nvfp4"), "rollout")
    assert "the learner's, by decoded weights" in describe_products(model)
    # As on CUDA, where prepare takes it: eight attention projections, two layers of experts.
    attachment(model).kernels = "low-bit"
    assert "8 of 8 linears" in describe_products(model)
    assert "experts of 2 of 2 layers" in describe_products(model)
    by_expert = tiny_moe()
    prepare(by_expert, Recipe(rollout="nvfp4", residual_sites={"w2": 0.5}), "rollout")
    attachment(by_expert).kernels = "low-bit"
    assert "0 of 2 layers (not the others: W2's residual is chosen" in describe_products(by_expert)
    dense = tiny_llama()
    prepare(dense, Recipe(rollout="fp8"), "rollout")
    attachment(dense).kernels = "low-bit"
    assert "0 of " in describe_products(dense)
    assert "experts" not in describe_products(dense)


def test_a_run_says_once_which_products_its_rollout_runs(tmp_path):
    said = []
    train(config(tmp_path, trainer={"steps": 1}), say=said.append)
    assert len([line for line in said if line.startswith("rollout products: the learner's")]) == 1


def test_a_run_that_asks_for_kernels_it_cannot_have_stops(tmp_path):
    with pytest.raises(ValueError, match="kernels='low-bit' can't run here"):
        train(config(tmp_path, rollout={"kernels": "low-bit"}))


@pytest.mark.parametrize(
    ("setting", "message"),
    [
        ({"keep_decoded_experts": True}, "set one of them"),
        ({"engine": "vllm"}, "vLLM has kernels of its own"),
    ],
)
def test_choices_that_contradict_each_other_are_refused(tmp_path, setting, message):
    with pytest.raises(ConfigError, match=message):
        config(tmp_path, rollout={"kernels": "low-bit"} | setting)
