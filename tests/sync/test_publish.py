"""Bytes across the border: published == exported == loaded, whole or not at all."""

import dataclasses

import pytest
import torch

from lowbitrl.quant import Recipe, attachment, export, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.manifest import Manifest, checksum
from lowbitrl.sync.publisher import changed_codes, publish
from tests.conftest import tiny_llama

RECIPES = [
    Recipe(rollout=rollout, learner=learner)
    for rollout in ("bf16", "nvfp4", "nvfp4-w16a4", "fp8", "int4-fp8")
    for learner in ("bf16", "weights", "full")
]


def sides(recipe, dtype=torch.bfloat16):
    learner, rollout = tiny_llama(dtype), tiny_llama(dtype)
    prepare(learner, recipe, "learner")
    prepare(rollout, recipe, "rollout")
    return learner, EmbeddedEngine(rollout)


def same(a, b):
    return torch.equal(a.detach().reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))


def nudge(model, scale=0.05):
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn_like(p) * scale)


@pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: f"{r.rollout}-{r.learner}")
def test_published_is_what_export_makes_and_what_the_engine_serves(recipe):
    learner, engine = sides(recipe)
    nudge(learner)
    published = publish(learner, 3)
    exported = dict(export(learner.named_parameters(), attachment(learner).plan))
    assert exported.keys() == published.tensors.keys()
    for name, tensor in exported.items():
        assert same(tensor, published.tensors[name]), name
    addresses = {n: p.data_ptr() for n, p in engine.model.named_parameters()}
    engine.update(published.stream(), published.manifest)
    assert engine.version == 3
    served = {name: tensor for name, tensor in engine.served().items() if name in published.tensors}
    assert served.keys() == published.tensors.keys()
    for name, tensor in served.items():
        assert same(tensor, published.tensors[name]), name
        # Bytes by reference; what stays in BF16 keeps the address that CUDA graphs hold.
        shared = tensor.data_ptr() == published.tensors[name].data_ptr()
        assert shared == (name not in addresses), name
    assert addresses == {n: p.data_ptr() for n, p in engine.model.named_parameters()}


def test_the_learners_forward_uses_the_published_bytes():
    learner, _ = sides(Recipe(rollout="nvfp4"))
    nudge(learner)
    published = publish(learner, 1)
    linear = learner.model.layers[1].mlp.down_proj
    assert linear.group.encoded()[linear.plan.name].qdata is published.tensors[f"{linear.plan.name}.qdata"]


def test_export_takes_group_members_in_any_order_and_misses_none():
    learner, _ = sides(Recipe(rollout="nvfp4"))
    plan = attachment(learner).plan
    forward = dict(export(learner.named_parameters(), plan))
    backward = dict(export(reversed(list(learner.named_parameters())), plan))
    assert all(same(forward[n], backward[n]) for n in forward)
    lacking = [(n, p) for n, p in learner.named_parameters() if n != "model.layers.1.self_attn.k_proj.weight"]
    with pytest.raises(ValueError, match=r"model\.layers\.1\.self_attn\.k_proj\.weight never came"):
        dict(export(lacking, plan))


def test_bytes_come_from_the_compute_dtype_not_the_master():
    """Field experience: quantizing the fp32 master on one side only multiplied the KL by 25."""
    torch.manual_seed(1)
    learner, _ = sides(Recipe(rollout="nvfp4"))
    name = "model.layers.0.mlp.down_proj"
    weight = learner.get_submodule(name).weight
    master = weight.detach().float() * (1 + 1e-3 * torch.randn_like(weight.detach().float()))
    with torch.no_grad():
        weight.copy_(master)
    fmt = learner.get_submodule(name).group.format
    published = publish(learner, 1).tensors[f"{name}.qdata"]
    assert torch.equal(published, fmt.quantize(master.bfloat16()).qdata)


def corrupt(tensors, kind):
    name = "model.layers.0.mlp.up_proj.qdata"
    if kind == "missing":
        del tensors[name]
    elif kind == "extra":
        tensors["model.layers.9.weight"] = torch.zeros(2)
    elif kind == "flipped":
        tensors[name] = tensors[name].clone()
        tensors[name][3, 5] ^= 1
    elif kind == "shape":
        tensors[name] = tensors[name][:-1]
    elif kind == "dtype":
        tensors[name] = tensors[name].to(torch.int32)
    elif kind == "scale":
        scale = "model.layers.0.mlp.up_proj.global_scale"
        tensors[scale] = tensors[scale] * 2


@pytest.mark.parametrize("kind", ["missing", "extra", "flipped", "shape", "dtype", "scale"])
def test_a_damaged_version_leaves_the_old_one_served(kind):
    learner, engine = sides(Recipe(rollout="nvfp4"))
    first = publish(learner, 0)
    engine.update(first.stream(), first.manifest)
    before = engine.generate([[5, 6]], 4, Sampling(max_tokens=4))
    nudge(learner)
    second = publish(learner, 1)
    tensors = dict(second.tensors)
    corrupt(tensors, kind)
    with pytest.raises(ValueError, match=r"model\.layers\.(0\.mlp\.up_proj|9)"):
        engine.update(iter(tensors.items()), second.manifest)
    assert engine.version == 0
    assert engine.generate([[5, 6]], 4, Sampling(max_tokens=4)) == before
    engine.update(second.stream(), second.manifest)
    assert engine.version == 1
    assert engine.generate([[5, 6]], 4, Sampling(max_tokens=4)) != before


def test_another_plans_version_is_refused():
    learner, _ = sides(Recipe(rollout="nvfp4"))
    _, other = sides(Recipe(rollout="nvfp4", keep=("lm_head", "*.o_proj")))
    published = publish(learner, 0)
    with pytest.raises(ValueError, match="the engine wears"):
        other.update(published.stream(), published.manifest)
    forged = dataclasses.replace(published.manifest, plan_digest=other.plan.digest)
    with pytest.raises(ValueError, match="o_proj"):
        other.update(published.stream(), forged)


def test_later_steps_do_not_write_into_a_published_version():
    learner, engine = sides(Recipe(rollout="nvfp4"))
    published = publish(learner, 0)
    engine.update(published.stream(), published.manifest)
    nudge(learner)
    learner(torch.tensor([[4, 5, 6]]))
    published.manifest.verify(published.tensors)


def test_nan_is_never_published():
    for name in ("model.norm.weight", "model.layers.0.mlp.down_proj.weight"):
        learner, _ = sides(Recipe(rollout="nvfp4"))
        with torch.no_grad():
            learner.get_parameter(name).view(-1)[3] = torch.nan
        with pytest.raises(ValueError, match=name.removesuffix(".weight")):
            publish(learner, 0)


def test_changed_codes_counts_bytes_that_differ():
    learner, _ = sides(Recipe(rollout="nvfp4"))
    first = publish(learner, 0)
    assert changed_codes(None, first) == 0.0
    assert changed_codes(first, publish(learner, 1)) == 0.0
    weight = learner.model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight.neg_()
    second = publish(learner, 2)
    codes = sum(t.numel() for n, t in first.tensors.items() if n.endswith(".qdata"))
    changed = int(
        (
            first.tensors["model.layers.0.mlp.down_proj.qdata"]
            != second.tensors["model.layers.0.mlp.down_proj.qdata"]
        ).sum()
    )
    assert changed > 0.9 * weight.numel() / 2
    assert changed_codes(first, second) == changed / codes


@pytest.mark.parametrize("shape", [(0,), (1,), (7,), (8,), (3, 5), (64, 33)])
def test_checksum_sees_every_byte_and_order(shape):
    tensor = torch.randint(1, 255, shape, dtype=torch.uint8)
    reference = checksum(tensor)
    assert checksum(tensor.clone()) == reference
    for i in range(tensor.numel()):
        moved = tensor.clone()
        moved.view(-1)[i] ^= 0x10
        assert checksum(moved) != reference
    if tensor.numel() > 1 and tensor.view(-1)[0] != tensor.view(-1)[-1]:
        swapped = tensor.clone()
        swapped.view(-1)[0], swapped.view(-1)[-1] = tensor.view(-1)[-1], tensor.view(-1)[0]
        assert checksum(swapped) != reference


def test_manifest_describes_what_it_saw():
    tensors = {"a": torch.ones(2, 3, dtype=torch.bfloat16)}
    manifest = Manifest.of(4, "abc", tensors)
    assert (manifest.entries["a"].shape, manifest.entries["a"].dtype) == ((2, 3), "bfloat16")
    manifest.verify(tensors)
