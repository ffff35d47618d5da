"""The two linears: same bytes, same bits; straight-through gradients by hand and by finite differences."""

import copy
import io

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from lowbitrl.formats import get_format
from lowbitrl.kernels.quantize import evidence_of
from lowbitrl.quant import LayerPlan, Recipe, attachment, linear, prepare, real_tokens
from lowbitrl.quant import groups as groups_of_weights
from lowbitrl.quant.groups import WeightGroup, refresh
from lowbitrl.quant.linear import LearnerLinear, RolloutLinear

PRECISIONS = [
    "nvfp4",
    "nvfp4-w4a16",
    "nvfp4-w16a4",
    "fp8",
    "nvfp4-fp8",
    "int8",
    "int4",
    "int4-fp8",
    "mxfp4",
    "mxfp8",
]


class Block(nn.Module):
    """A module with q/k/v siblings and a lone projection, with bias."""

    def __init__(self, dtype=torch.bfloat16):
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, n, dtype=dtype) for n in (64, 16, 16))
        self.o_proj = nn.Linear(64, 64, bias=False, dtype=dtype)
        with torch.no_grad():
            self.k_proj.weight.mul_(5)

    def forward(self, x):
        return self.o_proj(self.q_proj(x)), self.k_proj(x), self.v_proj(x)


@pytest.mark.parametrize("rollout", PRECISIONS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_full_learner_equals_rollout_bit_for_bit(rollout, dtype):
    learner = Block(dtype)
    engine = copy.deepcopy(learner)
    residual = 0.5 if rollout in ("nvfp4", "nvfp4-w16a4", "mxfp4") else 0.0
    recipe = Recipe(rollout=rollout, learner="full", residual=residual)
    prepare(learner, recipe, "learner")
    prepare(engine, recipe, "rollout")
    x = torch.randn(3, 5, 64, dtype=dtype)
    for ours, theirs in zip(learner(x), engine(x), strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.parametrize("rollout", ["nvfp4", "nvfp4-w4a16", "fp8", "int4"])
def test_weights_learner_is_the_plain_linear_on_decoded_bytes(rollout):
    block = Block()
    plain = copy.deepcopy(block)
    prepare(block, Recipe(rollout=rollout, learner="weights"), "learner")
    # Only a format with a scale per tensor has one to share with its siblings.
    joint = plain.k_proj.weight.detach().float().abs().max() if rollout.startswith("nvfp4") else None
    weight = get_format(block.v_proj.plan.weight).fake_quantize(plain.v_proj.weight, amax=joint)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(block(x)[2], F.linear(x, weight, plain.v_proj.bias))


def test_fused_siblings_share_one_global_scale_and_the_lone_one_does_not():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "learner")
    encoded = {n: q for g in attachment(block).groups for n, q in g.encoded().items()}
    scales = {name: float(q.global_scale) for name, q in encoded.items()}
    assert scales["q_proj"] == scales["k_proj"] == scales["v_proj"] != scales["o_proj"]
    assert scales["q_proj"] == pytest.approx(float(block.k_proj.weight.detach().abs().max()) / 2688, rel=1e-6)


def test_naive_learner_is_untouched():
    block = Block()
    plain = copy.deepcopy(block)
    prepare(block, Recipe(rollout="nvfp4", learner="bf16"), "learner")
    assert type(block.q_proj) is nn.Linear
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert all(torch.equal(a, b) for a, b in zip(block(x), plain(x), strict=True))


def test_names_ties_and_state_dict_survive_the_swap(tiny):
    before = list(tiny.state_dict())
    prepare(tiny, Recipe(rollout="nvfp4", learner="full"), "learner")
    assert list(tiny.state_dict()) == before
    assert tiny.lm_head.weight is tiny.model.embed_tokens.weight
    assert isinstance(tiny.model.layers[0].self_attn.q_proj, LearnerLinear)


def test_straight_through_gradients_by_hand():
    block = Block(torch.float32)
    prepare(block, Recipe(rollout="nvfp4", learner="full"), "learner")
    x = torch.randn(7, 64, requires_grad=True)
    upstream = torch.randn(7, 16)
    block.v_proj(x).backward(upstream)
    weight = block.v_proj.group.encoded()["v_proj"].dequantize(torch.float32)
    x_hat = get_format("nvfp4-token").fake_quantize(x.detach())
    torch.testing.assert_close(x.grad, upstream @ weight, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(block.v_proj.weight.grad, upstream.T @ x_hat, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(block.v_proj.bias.grad, upstream.sum(0), rtol=1e-6, atol=1e-6)


def test_straight_through_gradient_is_the_slope_of_the_decoded_layer():
    """Finite differences in fp64 on the surrogate: the same layer with the decoded weight as its parameter."""
    block = Block(torch.float32)
    prepare(block, Recipe(rollout="nvfp4-w4a16", learner="weights"), "learner")
    x, upstream = torch.randn(3, 64), torch.randn(3, 16)
    block.v_proj(x).backward(upstream)
    decoded = block.v_proj.group.encoded()["v_proj"].dequantize(torch.float32).double()
    step = 1e-6
    for i, j in [(0, 0), (3, 17), (15, 63)]:
        moved = decoded.clone()
        moved[i, j] += step
        slope = ((x.double() @ (moved - decoded).T) * upstream.double()).sum() / step
        assert float(block.v_proj.weight.grad[i, j]) == pytest.approx(float(slope), rel=1e-5, abs=1e-6)


def test_backward_keeps_no_weight_sized_copy():
    block = Block(torch.float32)
    prepare(block, Recipe(rollout="nvfp4"), "learner")
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t) or t, lambda t: t):
        block.q_proj(torch.randn(2, 64))
    assert all(t.numel() * t.element_size() <= 64 * 64 * 4 / 6 for t in saved if t.shape != (2, 64))


def test_bytes_are_encoded_once_per_weight_version_and_never_stale(monkeypatch):
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "learner")
    group = next(g for g in attachment(block).groups if "o_proj" in g.names)
    first = group.encoded()["o_proj"]
    for _ in range(3):
        block(torch.randn(2, 64, dtype=torch.bfloat16))
        assert group.encoded()["o_proj"] is first
    with torch.no_grad():
        block.o_proj.weight.mul_(-1)
    second = group.encoded()["o_proj"]
    assert second is not first
    assert torch.equal(second.dequantize(torch.float32), -first.dequantize(torch.float32))


@pytest.mark.parametrize("format", ["nvfp4", "fp8-channel", "mxfp8"])
def test_many_groups_are_looked_at_once(format, monkeypatch):
    """Encoding leaves the look for NaN to one host read of all groups; the bad weight is named all the same."""
    blocks = [Block() for _ in range(3)]
    groups = [
        WeightGroup([LayerPlan(f"{i}.o_proj", (64, 64), format)], [block.o_proj])
        for i, block in enumerate(blocks)
    ]
    monkeypatch.setattr(groups_of_weights, "encode_unchecked", _left_to_look_at)
    refresh(groups)
    wanted = get_format(format).quantize(blocks[1].o_proj.weight)
    assert torch.equal(groups[1].encoded()["1.o_proj"].qdata, wanted.qdata)
    with torch.no_grad():
        blocks[2].o_proj.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"2\.o_proj"):
        refresh(groups)


def _left_to_look_at(x, fmt, *, amax=None, name=None):
    encoded = fmt.quantize(x, amax=amax, check=False)
    return encoded, evidence_of(x, encoded, amax)


def test_writes_past_the_version_counter_need_invalidate():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "learner")
    group = next(g for g in attachment(block).groups if "o_proj" in g.names)
    first = group.encoded()["o_proj"]
    block.o_proj.weight.data.zero_()
    group.invalidate()
    assert not group.encoded()["o_proj"].qdata.any()
    assert first.qdata.any()


def test_nan_weight_is_named():
    block = Block()
    with torch.no_grad():
        block.k_proj.weight[3, 5] = torch.nan
    with pytest.raises(ValueError, match=r"k_proj\.weight"):
        prepare(block, Recipe(rollout="nvfp4"), "rollout")


def test_siblings_quantize_their_shared_input_once(monkeypatch):
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "rollout")
    calls = []
    original = type(block.q_proj.site.format).fake_quantize
    monkeypatch.setattr(
        type(block.q_proj.site.format),
        "fake_quantize",
        lambda self, x, **k: calls.append(1) or original(self, x, **k),
    )
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        block(x)
    assert len(calls) == 2  # one for q/k/v, one for o
    assert block.q_proj.site._memo is None  # nothing is held once the last sibling has read it


def test_a_changed_input_is_quantized_again():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "rollout")
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    with torch.no_grad():
        block.q_proj(x)
        x.mul_(3)
        site_free = copy.deepcopy(block)
        assert torch.equal(block.k_proj(x), site_free.k_proj(x.clone()))


def test_mask_of_another_shape_is_refused():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4", residual=0.5), "rollout")
    with (
        real_tokens(block, torch.ones(3, dtype=torch.bool)),
        pytest.raises(ValueError, match="does not cover an input"),
    ):
        block(torch.randn(2, 64, dtype=torch.bfloat16))


def test_prepared_models_copy_pickle_and_stay_apart():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4", learner="full", residual=0.5), "learner")
    twin = copy.deepcopy(block)
    x = torch.randn(2, 64, dtype=torch.bfloat16)
    assert torch.equal(twin(x)[0], block(x)[0])
    with torch.no_grad():
        block.o_proj.weight.zero_()
    assert twin.o_proj.group is not block.o_proj.group
    assert twin(x)[0].abs().sum() > 0
    buffer = io.BytesIO()
    torch.save(twin, buffer)
    buffer.seek(0)
    assert torch.equal(torch.load(buffer, weights_only=False)(x)[0], twin(x)[0])


def test_preparing_twice_or_for_an_unknown_side_is_refused():
    block = Block()
    with pytest.raises(ValueError, match="choose 'learner' or 'rollout'"):
        prepare(block, Recipe(rollout="nvfp4"), "both")
    prepare(block, Recipe(rollout="nvfp4"), "learner")
    with pytest.raises(ValueError, match="prepared already"):
        prepare(block, Recipe(rollout="nvfp4"), "learner")


def test_rollout_side_is_frozen_and_holds_bytes():
    block = Block()
    prepare(block, Recipe(rollout="nvfp4"), "rollout")
    assert isinstance(block.q_proj, RolloutLinear)
    assert not any(p.requires_grad for p in block.parameters())
    assert torch.equal(block.q_proj.weight, block.q_proj.encoded.dequantize(torch.bfloat16))


def test_group_needs_no_prepared_model():
    linear = nn.Linear(32, 8)
    row = LayerPlan("w", (8, 32), weight="nvfp4")
    assert WeightGroup([row], [linear]).encoded()["w"].shape == (8, 32)


@pytest.mark.parametrize("rollout", ["fp8", "int8"])
def test_products_of_eight_bit_codes(rollout, monkeypatch):
    """The path a GPU takes, by the reference product: the pair stays a pair, gradients are those of the values."""
    block, x = Block(), torch.randn(3, 5, 64).bfloat16()

    def learned(block):
        prepare(block, Recipe(rollout=rollout, learner="full"), "learner")
        inputs = x.clone().requires_grad_()
        outputs = block(inputs)
        sum(y.float().square().sum() for y in outputs).backward()
        return outputs, [inputs.grad, *(p.grad for p in block.parameters())]

    _, wanted = learned(copy.deepcopy(block))
    monkeypatch.setattr(
        linear, "multiplies_codes", lambda x, site, bytes_: site is not None and bytes_ is not None
    )
    engine = copy.deepcopy(block)
    prepare(engine, Recipe(rollout=rollout, learner="full"), "rollout")
    outputs, gradients = learned(block)
    for ours, theirs in zip(outputs, engine(x), strict=True):
        assert torch.equal(ours, theirs)
    for got, value in zip(gradients, wanted, strict=True):
        assert got.dtype == value.dtype
        assert (got - value).float().norm() < 0.02 * value.float().norm()
