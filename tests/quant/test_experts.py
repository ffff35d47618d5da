"""Experts: every layout and dispatch against a dense dequantized model, bytes, names, memory, gradients."""

import copy
import re
import weakref

import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.quant import Recipe, attachment, export, prepare, real_tokens, resolve
from lowbitrl.quant.experts import PREFIX, Groups, quantize_rows
from lowbitrl.quant.residual import channel_scores, compensate, select_channels
from lowbitrl.quant.sites import ActivationSite, TokenContext
from lowbitrl.quant.stacks import encode_stack, present, select, to_canonical
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.trainer import _enable_checkpointing as enable_checkpointing
from tests.moe_models import KINDS, tiny_moe

W4A16, W4A4 = Recipe(rollout="nvfp4-w4a16"), Recipe(rollout="nvfp4", residual=0.5)
DISPATCHES = ("eager", "grouped_mm", "batched_mm")
IDS = torch.arange(3, 31).view(2, 14)


def pair(kind, recipe, dispatch="grouped_mm", dtype=torch.bfloat16, **overrides):
    sides = [tiny_moe(kind, dtype, dispatch, **overrides) for _ in range(2)]
    for model, side in zip(sides, ("learner", "rollout"), strict=True):
        prepare(model, recipe, side)
    return sides


def dequantized(kind, recipe, dtype=torch.float32, dispatch="eager", **overrides):
    """A plain transformers model whose weights are the decoded bytes."""
    model = tiny_moe(kind, dtype, dispatch, **overrides)
    rollout = tiny_moe(kind, dtype, **overrides)
    prepare(rollout, recipe, "rollout")
    parameters = dict(model.named_parameters())
    layers = attachment(rollout).plan.by_name
    with torch.no_grad():
        for name, encoded in EmbeddedEngine(rollout).encoded().items():
            layout, values = layers[name].layout, encoded.dequantize(dtype)
            if layout is not None:
                values = present(values, layout)
                values = values.transpose(-1, -2) if layout.transposed else values
            parameters[layers[name].parameter].copy_(values)
    return model


@pytest.mark.parametrize("kind", KINDS)
def test_every_stack_is_in_the_plan_and_every_router_is_left_alone(kind):
    plan = resolve(W4A4, tiny_moe(kind))
    stacks = [layer for layer in plan.layers if layer.layout is not None]
    assert len(stacks) == 4
    assert all(layer.weight == "nvfp4" and layer.activation == "nvfp4-token" for layer in stacks)
    assert {layer.shape for layer in stacks} == {(4, 64, 64), (4, 64, 32)}
    routers = [layer for layer in plan.layers if layer.reason == "router"]
    assert {layer.name.rpartition(".")[2] for layer in routers} >= {"router" if kind == "gpt_oss" else "gate"}
    assert len(routers) == (4 if kind == "qwen2_moe" else 2)


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_learner_and_rollout_return_the_same_bits_on_the_same_bytes(kind, dispatch):
    learner, rollout = pair(kind, Recipe(rollout="nvfp4", residual=0.5, learner="full"), dispatch)
    with torch.no_grad():
        assert torch.equal(learner(IDS).logits, rollout(IDS).logits)
    assert learner.config._experts_implementation == PREFIX + dispatch


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_logits_are_those_of_a_dense_dequantized_model(kind, dispatch, top_k):
    reference = dequantized(kind, W4A16, num_experts_per_tok=top_k)
    for model in pair(kind, W4A16, dispatch, torch.float32, num_experts_per_tok=top_k):
        with torch.no_grad():
            ours, theirs = model(IDS).logits, reference(IDS).logits
        assert (ours - theirs).norm() <= 1e-6 * theirs.norm()


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize("kind", KINDS)
def test_gradients_are_the_dequantized_models_and_reach_every_routed_expert(kind, dispatch):
    learner, _ = pair(kind, W4A16, dispatch, torch.float32)
    reference = dequantized(kind, W4A16)
    for model in (learner, reference):
        model(IDS).logits.square().mean().backward()
    for (name, ours), theirs in zip(learner.named_parameters(), reference.parameters(), strict=True):
        assert (ours.grad - theirs.grad).norm() <= 2e-5 * theirs.grad.norm() + 1e-12, name
    stacks = [p for n, p in learner.named_parameters() if n.endswith("_proj") and p.ndim == 3]
    assert len(stacks) == 4
    assert all(stack.grad.flatten(1).norm(dim=1).min() > 0 for stack in stacks)


def block(top_k_index, dispatch, recipe=W4A16, kind="qwen3_moe"):
    """The first experts module of both sides on 6 tokens, with routes given by hand."""
    outputs = []
    for model in pair(kind, recipe, dispatch, torch.float32):
        experts = next(m for m in model.modules() if type(m).__name__.endswith("Experts"))
        torch.manual_seed(3)
        x = torch.randn(len(top_k_index), 64)
        weights = torch.rand(top_k_index.shape)
        outputs.append((experts, x, weights, experts(x, top_k_index, weights)))
    return outputs


@pytest.mark.parametrize("dispatch", DISPATCHES)
@pytest.mark.parametrize(
    "routes",
    [
        [[0], [0], [0], [0], [0], [0]],
        [[1], [3], [3], [3], [3], [3]],
        [[3, 1], [0, 3], [3, 1], [1, 0], [0, 3], [3, 0]],
        [[3, 1, 0, 2], [0, 1, 2, 3], [2, 1, 3, 0], [1, 0, 2, 3], [0, 3, 1, 2], [3, 0, 2, 1]],
    ],
    ids=["all tokens on one expert", "one expert has one token", "an expert has none", "top-k of E"],
)
def test_uneven_routing(routes, dispatch):
    index = torch.tensor(routes)
    (_, _, _, learner), (experts, x, weights, rollout) = block(index, dispatch)
    assert torch.equal(learner, rollout)
    stacks = [experts.lowbitrl_experts.w13.weights, experts.lowbitrl_experts.w2.weights]
    w13, w2 = (next(iter(stack.encoded().values())).dequantize() for stack in stacks)
    expected = torch.zeros_like(x)
    for token, chosen in enumerate(routes):
        for choice, e in enumerate(chosen):
            gate, up = (w13[e] @ x[token]).chunk(2)
            expected[token] += weights[token, choice] * (w2[e] @ (nn.functional.silu(gate) * up))
    assert torch.allclose(rollout, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dispatch", DISPATCHES)
def test_no_tokens_at_all(dispatch):
    (_, _, _, out), _ = block(torch.zeros(0, 2, dtype=torch.long), dispatch)
    assert out.shape == (0, 64)


def test_eager_and_grouped_agree_to_the_bit_on_a_cpu():
    index = torch.tensor([[0, 2], [2, 1], [1, 0], [2, 0]])
    outputs = [block(index, dispatch, Recipe(rollout="nvfp4"))[1][3] for dispatch in ("eager", "grouped_mm")]
    assert torch.equal(*outputs)


@pytest.mark.parametrize("name", ["nvfp4", "fp8-channel", "int8-channel", "int4-g32", "mxfp4", "fp8-tensor"])
def test_an_expert_in_a_stack_has_the_bytes_it_would_have_alone(name):
    fmt = get_format(name)
    weights = torch.randn(4, 48, 64) * torch.tensor([1e-3, 1.0, 30.0, 0.0])[:, None, None]
    stack = encode_stack(weights, fmt, "w")
    for expert, alone in enumerate(weights):
        ours, theirs = select(stack, expert).tensors(), fmt.quantize(alone).tensors()
        assert all(torch.equal(ours[k].reshape(theirs[k].shape), theirs[k]) for k in theirs)
    assert stack.dequantize()[3].abs().max() == 0


def test_gate_and_up_of_one_expert_share_a_global_scale_and_experts_do_not():
    model = tiny_moe()
    with torch.no_grad():
        stack = model.model.layers[0].mlp.experts.gate_up_proj
        stack[1] *= 8
        stack[2, 32:] *= 4
    exported = dict(export(model.named_parameters(), resolve(W4A16, model)))
    scale = lambda e, p: exported[f"model.layers.0.mlp.experts.{e}.{p}.global_scale"]  # noqa: E731
    assert all(torch.equal(scale(e, "gate_proj"), scale(e, "up_proj")) for e in range(4))
    assert len({float(scale(e, "up_proj")) for e in range(4)}) == 4


@pytest.mark.parametrize("kind", ["qwen3_moe", "mixtral", "olmoe", "qwen2_moe"])
def test_exported_names_are_those_of_the_checkpoint_on_disk(kind, tmp_path):
    model = tiny_moe(kind)
    model.save_pretrained(tmp_path)
    exported = dict(export(model.named_parameters(), resolve(W4A16, model)))
    ours = {re.sub(r"\.(qdata|scale|global_scale)$", ".weight", name) for name in exported}
    assert ours == set(load_file(tmp_path / "model.safetensors"))
    bf16 = dict(export(model.named_parameters(), resolve(Recipe(), model)))
    saved = load_file(tmp_path / "model.safetensors")
    assert bf16.keys() == saved.keys()
    assert all(torch.equal(bf16[name], saved[name]) for name in saved)


@pytest.mark.parametrize("kind", KINDS)
def test_exported_bytes_are_those_published_and_those_of_a_stream_already_apart(kind):
    model = tiny_moe(kind)
    plan = resolve(W4A16, model)
    exported = dict(export(model.named_parameters(), plan))
    apart = {}
    for name, tensor in model.named_parameters():
        layer = plan.by_name.get(name)
        if layer is None or layer.layout is None:
            apart[name] = tensor
            continue
        owner, leaf = name.rpartition(".")[0], name.rpartition(".")[2]
        sides = ("gate_proj", "up_proj") if leaf == "gate_up_proj" else (leaf,)
        for expert, whole in enumerate(to_canonical(tensor, layer.layout)):
            for side, part in zip(sides, whole.chunk(len(sides)), strict=True):
                apart[f"{owner}.{expert}.{side}.weight"] = part
    again = dict(export(reversed(apart.items()), plan))
    weights = {name for name in exported if name.endswith(("qdata", "scale"))}
    assert weights
    assert all(torch.equal(again[name], exported[name]) for name in weights)
    prepare(model, W4A16)
    published = publish(model, 0).tensors
    first = plan.by_name[next(n for n in plan.by_name if n.endswith("experts.gate_up_proj"))]
    stack = QuantizedTensor.from_tensors(
        {p: published[f"{first.name}.{p}"] for p in ("qdata", "scale", "global_scale")}, first.shape, "nvfp4"
    )
    up = exported[first.layout.names[1].format(2) + ".qdata"]
    assert torch.equal(stack.qdata[2, 32:], up)


def test_biases_of_a_stack_come_apart_with_it():
    model = tiny_moe("gpt_oss")
    exported = dict(export(model.named_parameters(), resolve(W4A16, model)))
    bias = model.model.layers[1].mlp.experts.gate_up_proj_bias
    assert torch.equal(exported["model.layers.1.mlp.experts.3.gate_proj.bias"], bias[3, ::2])
    assert torch.equal(exported["model.layers.1.mlp.experts.3.up_proj.bias"], bias[3, 1::2])
    assert not [name for name in exported if "gate_up" in name]


def test_a_stream_under_unknown_expert_names_is_refused():
    model = tiny_moe()
    stream = [("model.layers.0.mlp.experts.0.w1.weight", torch.zeros(32, 64))]
    with pytest.raises(
        ValueError, match=r"experts\.0\.w1\.weight belongs to experts that the plan quantizes"
    ):
        list(export(stream, resolve(W4A16, model)))


def test_unquantized_experts_are_refused_by_name_unless_kept_by_name():
    class Experts(nn.Module):
        def __init__(self):
            super().__init__()
            self.w1 = nn.Parameter(torch.zeros(4 * 32, 16))

    model = nn.ModuleDict({"experts": Experts(), "head": nn.Linear(16, 16)})
    with pytest.raises(ValueError, match=r"experts\.w1 has shape \(128, 16\)"):
        resolve(W4A16, model)
    assert resolve(Recipe(rollout="nvfp4-w4a16", keep=("experts.w1",)), model).by_name["head"].weight


def test_stacks_under_any_name_are_refused_by_it():
    class Bank(nn.Module):
        def __init__(self):
            super().__init__()
            self.matrices = nn.Parameter(torch.zeros(4, 32, 16))

    model = tiny_moe("mixtral")
    model.model.layers[1].bank = Bank()
    with pytest.raises(ValueError, match=r"model\.layers\.1\.bank\.matrices has shape \(4, 32, 16\)"):
        resolve(W4A16, model)


def test_a_shared_expert_and_the_routed_ones_repair_the_same_channels_of_one_input():
    _, rollout = pair("qwen2_moe", W4A4, dtype=torch.float32)
    block = rollout.model.layers[0].mlp
    x, mask = torch.randn(1, 6, 64), torch.tensor([[True, True, False, True, True, True]])
    with real_tokens(rollout, mask):
        routed = block.experts.lowbitrl_experts.w13.site(x[0])
        shared = [getattr(block.shared_expert, name).site(x)[0] for name in ("gate_proj", "up_proj")]
    assert not torch.equal(routed, get_format("nvfp4-token").fake_quantize(x[0]))
    assert all(torch.equal(repaired, routed) for repaired in shared)


def test_a_kept_stack_stays_as_it_is_on_both_sides():
    recipe = Recipe(rollout="nvfp4", keep=("lm_head", "*.gate", "*experts.down_proj"))
    with pytest.raises(ValueError, match=r"'\*.gate' matches no linear module"):
        resolve(recipe, tiny_moe())
    recipe = Recipe(rollout="nvfp4", learner="full", keep=("lm_head", "*experts.down_proj"))
    learner, rollout = pair("qwen3_moe", recipe)
    with torch.no_grad():
        assert torch.equal(learner(IDS).logits, rollout(IDS).logits)
    stack = rollout.model.layers[0].mlp.experts.down_proj
    assert torch.equal(stack, tiny_moe().model.layers[0].mlp.experts.down_proj)
    published = publish(learner, 1)
    engine = EmbeddedEngine(rollout)
    engine.update(published.stream(), published.manifest)
    assert "model.layers.0.mlp.experts.down_proj" in published.tensors


def test_a_tile_that_would_cover_gate_and_up_is_refused():
    wide = {"hidden_size": 128, "moe_intermediate_size": 128, "intermediate_size": 128, "head_dim": 32}
    resolve(Recipe(rollout="fp8-block"), tiny_moe(**wide))
    with pytest.raises(ValueError, match="gate and up have 32 rows each"):
        resolve(Recipe(rollout="fp8-block"), tiny_moe(hidden_size=128, head_dim=32))


def test_the_learners_next_bytes_arrive_and_change_what_is_served():
    learner, rollout = pair("mixtral", Recipe(rollout="nvfp4", learner="full"))
    engine = EmbeddedEngine(rollout)
    with torch.no_grad():
        before = rollout(IDS).logits
        for stack in (p for p in learner.parameters() if p.ndim == 3):
            stack.mul_(1.1).add_(0.01)
    published = publish(learner, 1)
    assert published.tensors["model.layers.0.mlp.experts.gate_up_proj.qdata"].shape == (4, 64, 32)
    engine.update(published.stream(), published.manifest)
    with torch.no_grad():
        assert torch.equal(learner(IDS).logits, rollout(IDS).logits)
    assert not torch.equal(before, rollout(IDS).logits)
    served = engine.encoded()["model.layers.1.mlp.experts.down_proj"]
    assert served.qdata is published.tensors["model.layers.1.mlp.experts.down_proj.qdata"]


def test_residual_stands_at_w13_by_default_and_where_it_is_sent():
    def fractions(recipe, kind="qwen2_moe"):
        plan = resolve(recipe, tiny_moe(kind))
        return {layer.name.removeprefix("model.layers.0."): layer.residual for layer in plan.quantized}

    default = fractions(W4A4)
    assert {name for name, f in default.items() if f == 0.5 and "layers" not in name} == {
        "mlp.experts.gate_up_proj",
        "mlp.shared_expert.gate_proj",
        "mlp.shared_expert.up_proj",
    }
    sent = fractions(
        Recipe(rollout="nvfp4", residual=0.5, residual_sites={"w2": 0.25, "attention": 1.0, "w13": 0.0})
    )
    assert sent["mlp.experts.gate_up_proj"] == 0
    assert sent["mlp.experts.down_proj"] == 0.25
    assert sent["mlp.shared_expert.down_proj"] == 0.25
    assert sent["self_attn.o_proj"] == 1.0
    with pytest.raises(ValueError, match="residual_sites='w1' is unknown"):
        Recipe(rollout="nvfp4", residual_sites={"w1": 0.5})
    with pytest.raises(ValueError, match=r"residual=0\.5 repairs FP4 activations"):
        Recipe(rollout="int4", residual_sites={"w13": 0.5})


def test_w13_channels_are_chosen_once_before_routing_over_real_tokens():
    _, rollout = pair("qwen3_moe", W4A4, dtype=torch.float32)
    experts = rollout.model.layers[0].mlp.experts
    worn = experts.lowbitrl_experts
    seen = {}
    worn.w13.__dict__["site"], original = lambda x: seen.setdefault("x^", original(x)), worn.w13.site
    x, mask = torch.randn(6, 64), torch.tensor([[True, True, False, True, True, True]])
    x[2] = 1e4 * torch.randn(64)
    index = torch.tensor([[0, 1], [0, 1], [2, 3], [1, 0], [0, 1], [1, 0]])
    with real_tokens(rollout, mask):
        experts(x, index, torch.rand(6, 2))
    error = get_format("nvfp4-token").fake_quantize(x) - x
    chosen = select_channels(channel_scores(error, mask.flatten()), 32)
    repaired = (seen["x^"] - x).abs()[mask[0]]
    plain = error.abs()[mask[0]]
    assert torch.equal(repaired[:, ~chosen], plain[:, ~chosen])
    assert repaired[:, chosen].sum() < 0.2 * plain[:, chosen].sum()


def test_w2_residual_chooses_channels_expert_by_expert():
    site = ActivationSite("nvfp4-token", 0.5, "batch", TokenContext())
    h = torch.randn(6, 32) * torch.linspace(0.1, 4, 32)
    h[3:] = h[3:].flip(-1)
    together = quantize_rows(site, h, None, Groups.of(torch.tensor([[0], [0], [0], [1], [1], [1]]), "eager"))
    apart = [compensate(rows, site.format, 0.5, "batch") for rows in (h[:3], h[3:])]
    assert torch.equal(together, torch.cat(apart))
    assert not torch.equal(together, compensate(h, site.format, 0.5, "batch"))
    padded = quantize_rows(
        site,
        h,
        torch.tensor([1, 1, 1, 1, 0, 1]).bool(),
        Groups.of(torch.tensor([[0], [0], [0], [1], [1], [1]]), "eager"),
    )
    assert torch.equal(padded[:3], together[:3])
    real = compensate(h[3:], site.format, 0.5, "batch", torch.tensor([True, False, True]))
    assert torch.equal(padded[3:], real)


@pytest.mark.parametrize("alignment", ["bf16", "weights", "full"])
def test_router_and_its_bias_are_untouched_on_both_sides(alignment):
    for model in pair("gpt_oss", Recipe(rollout="nvfp4", learner=alignment)):
        router = model.model.layers[0].mlp.router
        fresh = tiny_moe("gpt_oss").model.layers[0].mlp.router
        x = torch.randn(5, 64, dtype=torch.bfloat16)
        assert all(torch.equal(a, b) for a, b in zip(router(x), fresh(x), strict=True))


class Allocations(TorchDispatchMode):
    """Most bytes of floating-point results alive at once, and the largest one."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = self.largest = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, list | tuple) else (out,):
            if isinstance(tensor, torch.Tensor) and tensor.is_floating_point() and not tensor._is_view():
                size = tensor.numel() * tensor.element_size()
                self.alive += size
                self.peak, self.largest = max(self.peak, self.alive), max(self.largest, size)
                weakref.finalize(tensor, self._gone, size)
        return out

    def _gone(self, size):
        self.alive -= size


def experts_bytes(model):
    return sum(t.numel() * t.element_size() for n, t in model.named_parameters() if "experts." in n)


def test_a_rollout_holds_no_bf16_copy_of_its_experts_and_decodes_one_at_a_time():
    big = {"num_experts": 16, "moe_intermediate_size": 128}
    model = tiny_moe("qwen3_moe", dispatch="eager", **big)
    whole = experts_bytes(model)
    prepare(model, W4A16, "rollout")
    assert experts_bytes(model) == 0
    encoded = EmbeddedEngine(model).encoded()
    assert sum(q.nbytes for n, q in encoded.items() if "experts" in n) < 0.3 * whole
    peaks = {}
    for dispatch in ("eager", "grouped_mm"):
        model.config._experts_implementation = PREFIX + dispatch
        with torch.no_grad(), Allocations() as seen:
            model(IDS)
        peaks[dispatch] = seen
    one_expert_fp32 = 2 * 128 * 64 * 4
    assert peaks["eager"].largest <= one_expert_fp32
    assert peaks["eager"].peak < whole / 2
    # grouped_mm: at most one layer's stack at a time, of the two of each of the two layers.
    stack_fp32 = 16 * 2 * 128 * 64 * 4
    assert peaks["grouped_mm"].largest <= stack_fp32
    assert peaks["eager"].peak < peaks["grouped_mm"].peak


def test_a_decoded_copy_is_kept_only_when_asked_for():
    model, plain = tiny_moe(), tiny_moe()
    prepare(model, W4A16, "rollout", keep_decoded_experts=True)
    prepare(plain, W4A16, "rollout")
    kept = attachment(model).stacks["model.layers.0.mlp.experts.down_proj"]
    assert kept._decoded is not None
    assert kept._decoded.shape == (4, 64, 32)
    assert attachment(plain).stacks["model.layers.0.mlp.experts.down_proj"]._decoded is None
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)


def test_backward_keeps_bytes_and_not_decoded_stacks():
    learner, _ = pair("qwen3_moe", W4A16)
    stack = learner.model.layers[0].mlp.experts.gate_up_proj
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: (saved.append(t), t)[1], lambda t: t):
        learner(IDS).logits.sum().backward()
    parameters = {p.data_ptr() for p in learner.parameters()}
    shapes = [t.shape for t in saved if t.data_ptr() not in parameters]
    assert not [s for s in shapes if s.numel() >= stack.numel()]


def test_a_copy_of_a_prepared_model_has_experts_of_its_own():
    learner, _ = pair("qwen3_moe", W4A16)
    twin = copy.deepcopy(learner)
    with torch.no_grad():
        learner.model.layers[0].mlp.experts.gate_up_proj.mul_(2)
        before = twin(IDS).logits
        assert torch.equal(before, pair("qwen3_moe", W4A16)[1](IDS).logits)
        twin.model.layers[0].mlp.experts.gate_up_proj.mul_(2)
        assert torch.equal(twin(IDS).logits, learner(IDS).logits)


def test_an_unworn_model_under_our_name_runs_transformers_own_experts():
    pair("qwen3_moe", W4A16)
    for dispatch in DISPATCHES:
        plain, named = (tiny_moe(dispatch=dispatch) for _ in range(2))
        named.config._experts_implementation = PREFIX + dispatch
        with torch.no_grad():
            assert torch.equal(plain(IDS).logits, named(IDS).logits)


def test_a_kernel_that_takes_no_low_bit_weights_is_refused():
    model = tiny_moe()
    model.config._experts_implementation = "deepgemm"
    with pytest.raises(ValueError, match="experts_implementation='deepgemm'"):
        prepare(model, W4A16)


def test_gradient_checkpointing_gives_the_same_gradients():
    plain, _ = pair("qwen3_moe", W4A16, dtype=torch.float32)
    checkpointed = copy.deepcopy(plain)
    checkpointed.train()
    enable_checkpointing(checkpointed)
    for model in (plain, checkpointed):
        model(IDS, use_cache=False).logits.square().mean().backward()
    for (name, a), b in zip(plain.named_parameters(), checkpointed.parameters(), strict=True):
        assert torch.equal(a.grad, b.grad), name


@pytest.mark.parametrize("rollout", ["nvfp4-w4a16", "nvfp4", "int4", "fp8", "int8"])
@pytest.mark.parametrize("kind", KINDS)
def test_products_of_the_bytes_are_those_of_the_decoded_stacks(kind, rollout):
    """The path a GPU decodes on, by the reference's definition of its products."""
    model = pair(kind, Recipe(rollout=rollout))[1]
    owner = next(m for m in model.modules() if "lowbitrl_experts" in m.__dict__)
    worn = owner.__dict__["lowbitrl_experts"]
    if worn.w13.why_not_bytes() or worn.w2.why_not_bytes():
        assert worn.w13.weights.layout.interleaved
        return
    hidden, ids = torch.randn(9, 64).bfloat16(), torch.stack([torch.randperm(4)[:2] for _ in range(9)])
    weights = torch.rand(9, 2).bfloat16()
    with torch.no_grad():
        got = worn.forward_bytes(owner, hidden, ids, weights)
        wanted = worn.forward(owner, hidden, ids, weights, "eager")
    assert got.dtype == wanted.dtype
    # Apart by roundings of BF16; quantized activations of W2 pass a flipped code on.
    bound = 2**-7 if rollout in ("nvfp4-w4a16", "int4") else 0.1 if rollout == "nvfp4" else 2**-5
    assert (got - wanted).float().norm() < bound * wanted.float().norm()
