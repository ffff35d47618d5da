import pytest
import torch
from torch import nn

from lowbitrl.quant import Recipe, prepare, resolve
from lowbitrl.quant.topology import fused_groups, match_all
from lowbitrl.sync.publisher import publish
from tests.conftest import tiny_llama

NVFP4 = Recipe(rollout="nvfp4", learner="weights", residual=0.5)


def test_every_parameter_is_in_the_plan_with_a_format_or_a_reason(tiny):
    plan = resolve(NVFP4, tiny)
    owners = {name.rpartition(".")[0] for name, _ in tiny.named_parameters(remove_duplicate=False)}
    assert set(plan.by_name) == owners
    assert all(layer.quantized != bool(layer.reason) for layer in plan.layers)


def test_head_embeddings_and_norms_stay_and_every_projection_is_quantized(tiny):
    plan = resolve(NVFP4, tiny)
    assert {layer.name for layer in plan.quantized} == {
        f"model.layers.{i}.{module}"
        for i in range(2)
        for module in (
            *(f"self_attn.{p}_proj" for p in "qkvo"),
            *(f"mlp.{p}_proj" for p in ("gate", "up", "down")),
        )
    }
    assert plan.by_name["lm_head"].reason == "output head, tied to the embedding"


def test_siblings_share_a_group_in_model_order():
    names = [
        "l.0.q_proj",
        "l.0.k_proj",
        "l.0.v_proj",
        "l.0.o_proj",
        "l.0.gate_proj",
        "l.0.up_proj",
        "l.1.q_proj",
    ]
    assert fused_groups(names) == [
        ("l.0.q_proj", "l.0.k_proj", "l.0.v_proj"),
        ("l.0.o_proj",),
        ("l.0.gate_proj", "l.0.up_proj"),
        ("l.1.q_proj",),
    ]


def test_a_kept_sibling_leaves_its_group():
    assert fused_groups(["a.q_proj", "a.v_proj"]) == [("a.q_proj", "a.v_proj")]


def test_patterns_match_whole_names_and_nothing_by_accident():
    names = ["model.layers.0.mlp.gate", "model.layers.0.mlp.gate_proj", "model.layers.0.mlp.gate_up_proj"]
    assert set(match_all(["*.mlp.gate"], names)) == {"model.layers.0.mlp.gate"}
    # The dot of a pattern is a dot: "mlp.gate." must not reach gate_proj as a regex would.
    with pytest.raises(ValueError, match="matches no linear module"):
        match_all(["mlp.gate."], names)


def test_a_pattern_that_matches_nothing_is_an_error(tiny):
    with pytest.raises(ValueError, match=r"keep pattern 'model.layers.9.\*' matches no linear module"):
        resolve(Recipe(rollout="nvfp4", keep=("model.layers.9.*",)), tiny)


def test_an_explicit_list_replaces_the_default_and_an_empty_one_keeps_nothing():
    untied = tiny_llama(tie_word_embeddings=False)
    assert resolve(Recipe(rollout="nvfp4", keep=()), untied).by_name["lm_head"].weight == "nvfp4"
    kept = resolve(Recipe(rollout="nvfp4", keep=("*.down_proj",)), untied)
    assert kept.by_name["model.layers.1.mlp.down_proj"].reason == "kept by '*.down_proj'"
    assert kept.by_name["lm_head"].weight == "nvfp4"


def test_a_tied_head_cannot_be_quantized_apart_from_its_embedding(tiny):
    with pytest.raises(ValueError, match="lm_head shares its weight with the input embedding"):
        resolve(Recipe(rollout="nvfp4", keep=()), tiny)


def test_width_that_no_block_divides_names_module_rule_and_remedy():
    odd = tiny_llama(intermediate_size=100)
    with pytest.raises(ValueError, match=r"down_proj.*in_features=100 is not a multiple of 16.*excluding it"):
        resolve(NVFP4, odd)
    resolve(Recipe(rollout="nvfp4", keep=("lm_head", "*.down_proj")), odd)


def test_keeping_everything_is_refused(tiny):
    with pytest.raises(ValueError, match="quantizes no module"):
        resolve(Recipe(rollout="nvfp4", keep=("*",)), tiny)


@pytest.mark.parametrize("dtype", [torch.float16, torch.float64])
def test_other_dtypes_are_refused(dtype):
    with pytest.raises(ValueError, match=r"load the model with dtype=torch\.bfloat16"):
        resolve(NVFP4, tiny_llama(dtype))


def test_expert_stacks_are_refused_by_name():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.gate_up_proj = nn.Parameter(torch.zeros(4, 32, 16))
            self.head = nn.Linear(16, 16)

    with pytest.raises(ValueError, match=r"gate_up_proj has shape \(4, 32, 16\)"):
        resolve(NVFP4, Experts())


def test_plans_agree_by_digest_and_disagree_in_two_lines(tiny):
    plan = resolve(NVFP4, tiny)
    assert plan.digest == resolve(NVFP4, tiny_llama()).digest
    assert plan.diff(plan) == ""
    other = resolve(Recipe(rollout="nvfp4", residual=0.5, keep=("lm_head", "*.1.mlp.down_proj")), tiny)
    mine, theirs = plan.diff(other).splitlines()
    assert mine.startswith("- model.layers.1.mlp.down_proj")
    assert "nvfp4-token" in mine
    assert theirs.startswith("+ model.layers.1.mlp.down_proj")
    assert "kept by" in theirs


def test_scope_is_part_of_the_digest(tiny):
    batch, token = (
        resolve(Recipe(rollout="nvfp4", residual=0.5, residual_scope=scope), tiny)
        for scope in ("batch", "token")
    )
    assert batch.digest != token.digest
    assert "residual scope" in batch.diff(token)


def test_plan_resolves_without_weights():
    with torch.device("meta"):
        skeleton = tiny_llama()
    assert resolve(NVFP4, skeleton).digest == resolve(NVFP4, tiny_llama()).digest


def test_table_shows_every_module_and_the_share_of_weights(tiny):
    table = resolve(NVFP4, tiny).table()
    assert all(name in table for name in resolve(NVFP4, tiny).by_name)
    quantized = sum(p.numel() for n, p in tiny.named_parameters() if "proj" in n)
    assert f"{quantized / sum(p.numel() for p in tiny.parameters()):.1%}" in table


def test_int4_takes_the_largest_group_that_fits_the_width():
    plan = resolve(Recipe(rollout="int4"), tiny_llama(intermediate_size=96))
    assert plan.by_name["model.layers.0.mlp.down_proj"].weight == "int4-g32"
    assert plan.by_name["model.layers.0.mlp.up_proj"].weight == "int4-g64"


def test_a_fused_group_has_one_format_though_k_and_v_are_too_narrow_for_w4a8():
    """q has 128 rows and k, v 64: the w4a8 re-encoding needs multiples of 128 in all of them."""
    wide = {"hidden_size": 128, "intermediate_size": 128, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = tiny_llama(torch.bfloat16, **wide, head_dim=64)
    plan = prepare(model, Recipe(rollout="int4-fp8"), "learner")
    formats = {layer.name.rpartition(".")[2]: layer.weight for layer in plan.quantized}
    assert {formats[f"{n}_proj"] for n in "qkv"} == {"int4-g128"}
    assert {formats["gate_proj"], formats["up_proj"], formats["o_proj"]} == {"int4-g128:w4a8"}
    served = publish(model, 1).tensors
    assert served["model.layers.0.self_attn.k_proj.qdata"].shape == (64, 64)
