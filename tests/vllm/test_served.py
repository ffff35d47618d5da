"""One module served to vLLM equals the embedded engine's, bit for bit, at every precision. Needs no vLLM."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from lowbitrl.formats import get_format
from lowbitrl.quant import Recipe, attachment, prepare, resolve
from lowbitrl.quant.linear import RolloutLinear
from lowbitrl.rollout.vllm.experts import ServedExperts
from lowbitrl.rollout.vllm.planned import from_config, to_config, to_file
from lowbitrl.rollout.vllm.real_tokens import REAL_TOKENS, RealTokens, ServedSite
from lowbitrl.rollout.vllm.served import Member, Run, ServedLinear, Store, multiply
from lowbitrl.rollout.vllm.wearing import Wearing
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe

RECIPES = [
    Recipe(rollout=name, residual=residual)
    for name, residual in [
        ("bf16", 0), ("fp8", 0), ("int8", 0), ("int4", 0), ("int4-fp8", 0), ("nvfp4", 0), ("nvfp4", 0.5), ("nvfp4", 1),
        ("nvfp4-w4a16", 0), ("nvfp4-w16a4", 0.25), ("nvfp4-fp8", 0), ("mxfp4", 0.5), ("mxfp8", 0),
    ]
]  # fmt: skip


def site(row):
    cpu = torch.device("cpu")
    return ServedSite(row.activation, row.residual, "batch", cpu) if row.activation else None


def serve(plan, modules, prefix, names):
    rows = tuple(plan.by_name[name] for name in names)
    weight = torch.cat([modules[name].weight.data for name in names])
    encoded = get_format(rows[0].weight).quantize(weight) if rows[0].weight else None
    members = tuple(Member(row, (0, row.shape[0])) for row in rows)
    store = Store(nn.Module(), "", encoded, weight, True)
    return ServedLinear(prefix, (Run(members, store),), (0, weight.shape[1]), site(rows[0]), None)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.rollout}-{r.residual}")
def test_a_fused_linear_is_its_members(recipe):
    model = tiny_llama()
    names = [f"model.layers.0.self_attn.{leaf}_proj" for leaf in "qkv"]
    plan = resolve(recipe, model)
    served = serve(plan, dict(model.named_modules()), "qkv", names)
    prepare(model, recipe, "rollout")
    x = torch.randn(7, 64).bfloat16()
    REAL_TOKENS.set(7)
    modules = dict(model.named_modules())
    expected = torch.cat([modules[name](x) for name in names], -1)
    # One product of 128 rows or three: the sums' order in BF16 is torch's to choose.
    assert torch.allclose(multiply(served, x, None).float(), expected.float(), rtol=2**-7, atol=2**-7)
    if recipe.rollout != "bf16" and isinstance(modules[names[0]], RolloutLinear):
        held = torch.cat([modules[name].weight for name in names])
        assert torch.equal(served.runs[0].store.decoded, held)
        if served.site is not None:
            own = attachment(model).sites[names[0]]
            assert torch.equal(served.site(x), own(x))


def test_padding_and_dummy_rows_never_move_the_channels():
    """The same real rows, followed by rows of garbage: same outputs to the bit, whatever the garbage is."""
    model = tiny_llama()
    plan = resolve(Recipe(rollout="nvfp4", residual=0.25), model)
    served = serve(plan, dict(model.named_modules()), "o", ["model.layers.0.self_attn.o_proj"])
    x = torch.randn(5, 64).bfloat16()
    garbage = torch.full((11, 64), float("nan")).bfloat16()
    garbage[3:] = 1e4 * torch.randn(8, 64).bfloat16()
    served.site.tokens.real = None
    REAL_TOKENS.set(5)
    alone = served.site(x)
    assert torch.equal(served.site(torch.cat([x, garbage]))[:5], alone)
    REAL_TOKENS.set(16)
    counted = served.site(torch.cat([x, 1e4 * torch.randn(11, 64).bfloat16()]))[:5]
    assert not torch.equal(counted, alone), "the garbage would have moved the channels, had it counted"


def test_both_runners_of_one_name_tell_their_tokens():
    """vLLM has two classes GPUModelRunner, and imports the one even where the other runs."""
    tokens, batch = RealTokens(), SimpleNamespace(total_num_scheduled_tokens=7)
    count = tokens.count_on(torch.device("cpu"))
    runners = [type("GPUModelRunner", (), {"execute_model": lambda self, b: b}) for _ in range(2)]
    for version, runner in enumerate(runners):
        runner.__module__ = f"vllm.v{version}"
        tokens.watch(runner)
        tokens.watch(runner)
        count.zero_()
        assert runner().execute_model(batch) is batch
        assert count == 7
    assert len(tokens.watched) == 2


def test_a_row_that_no_module_wears_stops_the_start():
    model = tiny_llama()
    plan = resolve(Recipe(rollout="nvfp4-w4a16"), model)
    with pytest.raises(ValueError, match=r"q_proj is planned with nvfp4 weights .* the plugin is not active"):
        Wearing(model, plan)


def test_a_batch_wide_residual_needs_a_runner_that_tells_its_tokens(monkeypatch):
    model = nn.Module()
    model.o = nn.Module()
    plan = resolve(Recipe(rollout="nvfp4", residual=0.25), tiny_llama())
    name = "model.layers.0.self_attn.o_proj"
    worn = serve(plan, dict(tiny_llama().named_modules()), "o", [name])
    model.o.__dict__["lowbitrl"] = worn
    alone = dataclasses.replace(plan, layers=(plan.by_name[name],))
    monkeypatch.setattr(REAL_TOKENS, "watched", [])
    with pytest.raises(ValueError, match="residual_scope='token'"):
        Wearing(model, alone)
    monkeypatch.setattr(REAL_TOKENS, "watched", ["a runner"])
    assert Wearing(model, alone).report()["modules"] == {
        "o": ["nvfp4", "nvfp4-token", 0.25, "decoded, activations emulated"]
    }


@pytest.mark.parametrize("residual", [0.0, 0.5])
@pytest.mark.parametrize("rollout", ["bf16", "nvfp4", "nvfp4-w4a16", "fp8", "int4", "int4-fp8"])
def test_served_experts_are_the_learners(rollout, residual):
    if residual and rollout != "nvfp4":
        pytest.skip("a residual repairs FP4 activations")
    model = tiny_moe()
    plan = resolve(Recipe(rollout=rollout, residual=residual), model)
    owner = "model.layers.0.mlp.experts"
    rows = tuple(plan.by_name[f"{owner}.{leaf}"] for leaf in ("gate_up_proj", "down_proj"))
    module = model.get_submodule(owner)
    stores = tuple(_stack_store(row, module) for row in rows)
    served = ServedExperts(owner, rows, stores, (0, rows[1].shape[-1]), (site(rows[0]), site(rows[1])))
    prepare(model, plan, "rollout")
    x, ids = torch.randn(6, 64).bfloat16(), torch.tensor([[0, 1], [1, 3], [3, 0], [1, 0], [0, 3], [1, 3]])
    weights = torch.rand(6, 2).bfloat16()
    REAL_TOKENS.set(6)
    with torch.no_grad():
        expected = module(x, ids, weights)
        assert torch.equal(served.product(x, weights.float(), ids.int()), expected)


def _stack_store(row, module):
    from lowbitrl.quant.stacks import encode_stack

    weight = getattr(module, row.name.rpartition(".")[2]).data.clone()
    encoded = encode_stack(weight, get_format(row.weight), row.name) if row.weight else None
    return Store(nn.Module(), "w", encoded, weight, True)


@pytest.mark.parametrize("model", [tiny_llama, tiny_moe], ids=["dense", "moe"])
def test_a_plan_survives_vllms_config(model, tmp_path):
    plan = resolve(Recipe(rollout="nvfp4", residual=0.5, residual_sites={"w2": 0.25}), model())
    assert from_config(to_config(plan)) == plan
    assert from_config(to_file(plan, tmp_path / "plan.json")) == plan


def test_an_edited_or_partial_plan_is_refused():
    config = to_config(resolve(Recipe(rollout="nvfp4"), tiny_llama()))
    config["layers"][3]["weight"] = "mxfp4"
    with pytest.raises(ValueError, match="was edited"):
        from_config(config)
    with pytest.raises(ValueError, match="lacks layers"):
        from_config({k: v for k, v in config.items() if k != "layers"})
