"""Routes: recorded as chosen, replayed as given, per layer, whatever a router's arithmetic is."""

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from lowbitrl.quant import Recipe, agreement, prepare, routing
from tests.conftest import tiny_llama
from tests.moe_models import KINDS, tiny_moe

IDS = torch.arange(3, 31).view(2, 14)


def prepared(kind="qwen3_moe", dtype=torch.float32, **overrides):
    model = tiny_moe(kind, dtype, **overrides)
    prepare(model, Recipe())
    return model


def watch(model):
    """What the experts modules really get, in layer order."""
    seen = []
    experts = [m for m in model.modules() if type(m).__name__.endswith("Experts")]
    for module in experts:
        module.register_forward_pre_hook(lambda m, args: seen.append(args[1:]))
    return seen


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_recorded_is_what_the_experts_get(kind):
    model = prepared(kind)
    seen = watch(model)
    with torch.no_grad():
        plain = model(IDS).logits
        seen.clear()
        with routing(model) as routes:
            assert torch.equal(model(IDS).logits, plain)
            recorded = routes.recorded()
    assert recorded.shape == (28, 2, 2)
    assert recorded.dtype == torch.int16
    assert all(torch.equal(recorded[:, layer], index) for layer, (index, _) in enumerate(seen))


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_of_ones_own_routes_changes_no_bit(kind):
    model = prepared(kind)
    with torch.no_grad():
        plain = model(IDS).logits
        with routing(model) as routes:
            model(IDS)
            own = routes.recorded()
        with routing(model, own):
            assert torch.equal(model(IDS).logits, plain)


@pytest.mark.parametrize("kind", KINDS)
def test_a_replay_is_obeyed_token_by_token_and_layer_by_layer(kind):
    model = prepared(kind)
    seen = watch(model)
    given = torch.stack([torch.randperm(4)[:2] for _ in range(56)]).view(28, 2, 2).to(torch.int16)
    given[5], given[9, 1] = -1, -1
    with torch.no_grad(), routing(model, given) as routes:
        model(IDS)
        own = routes.recorded()
    for layer, (index, weights) in enumerate(seen):
        expected = torch.where(given[:, layer] < 0, own[:, layer], given[:, layer])
        assert torch.equal(index, expected.long())
        assert torch.isfinite(weights).all()
    assert not torch.equal(own, given)


def test_weights_of_replayed_experts_come_from_the_routers_own_logits():
    model = prepared("mixtral")
    router = model.model.layers[0].mlp.gate
    x = torch.randn(5, 64)
    given = torch.tensor([[0, 3]]).expand(5, 2)[:, None]
    with routing(model, given):
        _, weights, index = router(x)
    probabilities = (x @ router.weight.T).softmax(-1)
    expected = probabilities[:, [0, 3]] / probabilities[:, [0, 3]].sum(-1, keepdim=True)
    assert torch.equal(index, given[:, 0])
    torch.testing.assert_close(weights, expected)
    weights[:, 0].sum().backward()
    assert router.weight.grad.abs().sum() > 0


def test_dense_first_layers_take_no_number():
    model = prepared(mlp_only_layers=[0], num_hidden_layers=3)
    with torch.no_grad(), routing(model) as routes:
        model(IDS)
        assert routes.recorded().shape == (28, 2, 2)
    assert routes.names == ("model.layers.1.mlp.gate", "model.layers.2.mlp.gate")


def test_grouped_topk_of_another_family_is_told_from_the_choice():
    options = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 64,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 4,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "n_group": 4,
        "topk_group": 2,
        "n_shared_experts": 1,
        "first_k_dense_replace": 1,
        "q_lora_rank": None,
        "kv_lora_rank": 16,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 8,
        "v_head_dim": 16,
    }
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model("deepseek_v3", **options), dtype=torch.float32
    ).eval()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, 0, 0.1)
    prepare(model, Recipe(rollout="nvfp4-w4a16"))
    if not model.lowbitrl.routing.names:
        pytest.skip("in transformers 5.5 this family's router does not choose by itself")
    seen = watch(model)
    given = torch.stack([torch.randperm(8)[:2] for _ in range(28)])[:, None]
    with torch.no_grad(), routing(model, given):
        model(IDS)
    assert torch.equal(seen[0][0], given[:, 0])


def test_state_ends_with_the_block_even_after_an_error():
    model = prepared()
    with pytest.raises(RuntimeError), routing(model, torch.zeros(28, 2, 2)):
        raise RuntimeError
    assert model.lowbitrl.routing.given is None
    assert model.lowbitrl.routing.chosen is None


def test_routes_of_other_tokens_are_refused():
    model = prepared()
    message = r"routes \(28, 2\) \(tokens, k\), the replay holds \(27, 2\)"
    with pytest.raises(ValueError, match=message), torch.no_grad(), routing(model, torch.zeros(27, 2, 2)):
        model(IDS)


def test_a_dense_model_has_nothing_to_record():
    model = tiny_llama()
    prepare(model, Recipe())
    with pytest.raises(ValueError, match="no routers to record"), routing(model):
        pass


def test_agreement_counts_sets_over_recorded_tokens():
    own = torch.tensor([[[0, 1]], [[2, 3]], [[0, 1]]])
    given = torch.tensor([[[1, 0]], [[3, 1]], [[-1, -1]]])
    assert agreement(own, given).tolist() == [0.75]
