"""Upcycling: the dense function at the start, seeded noise after, a checkpoint that the loader takes."""

import json

import pytest
import torch
from transformers import Qwen3Config, Qwen3ForCausalLM
from typer.testing import CliRunner

from lowbitrl.cli import app
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare, routing
from lowbitrl.upcycle import upcycle
from tests import tiny_run
from tests.conftest import tiny_llama

IDS = torch.arange(3, 31).view(2, 14)


def tiny_qwen3():
    torch.manual_seed(7)
    config = Qwen3Config(
        vocab_size=128,
        hidden_size=64,
        intermediate_size=96,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        initializer_range=0.15,
    )
    return Qwen3ForCausalLM(config).eval()


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("make", [lambda: tiny_llama(torch.float32), tiny_qwen3], ids=["llama", "qwen3"])
def test_the_mixture_computes_the_dense_function(make, top_k):
    dense = make()
    moe = upcycle(dense, 4, top_k)
    assert type(moe).__name__ in ("MixtralForCausalLM", "Qwen3MoeForCausalLM")
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-5, atol=1e-5)
    with torch.no_grad():
        next(p for n, p in moe.named_parameters() if n.endswith("experts.down_proj")).mul_(2)
        assert not torch.allclose(logits(moe), logits(dense), atol=1e-2)


def test_tokens_spread_over_experts():
    moe = upcycle(tiny_llama(), 4, 2)
    prepare(moe, Recipe())
    with torch.no_grad(), routing(moe) as routes:
        moe(IDS)
        counts = torch.bincount(routes.recorded().flatten().long(), minlength=4)
    assert (counts > 0).all()


def test_noise_is_seeded_relative_and_makes_experts_differ():
    dense = tiny_llama(torch.float32)
    one, same, other = (upcycle(dense, 4, 2, noise=0.1, seed=s) for s in (1, 1, 2))
    name = "model.layers.0.mlp.experts.down_proj"
    stacks = [dict(m.named_parameters())[name] for m in (one, same, other)]
    assert torch.equal(stacks[0], stacks[1])
    assert not torch.equal(stacks[0], stacks[2])
    weight = dict(dense.named_parameters())["model.layers.0.mlp.down_proj.weight"]
    error = (stacks[0] - weight).flatten(1).std(dim=1)
    torch.testing.assert_close(error, (0.1 * weight.std()).expand(4), rtol=0.05, atol=0)
    assert len({float(e) for e in error}) == 4


def test_the_mixtures_weights_are_its_own():
    dense = tiny_llama()
    before = logits(dense)
    with torch.no_grad():
        for parameter in upcycle(dense, 2, 1).parameters():
            parameter.zero_()
    assert torch.equal(logits(dense), before)


def test_the_command_writes_a_checkpoint_that_loads_and_computes_the_same(tmp_path):
    source = tiny_run.checkpoint(tmp_path / "dense")
    arguments = ["upcycle", str(source), "--experts", "4", "--top-k", "2", "--out", str(tmp_path / "moe")]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0, result.output
    moe, tokenizer = load_model(tmp_path / "moe", "float32")
    dense, _ = load_model(source, "float32")
    torch.testing.assert_close(logits(moe), logits(dense), rtol=1e-5, atol=1e-5)
    assert tokenizer.encode("w5 w6") == [5, 6]
    assert json.loads((tmp_path / "moe" / "upcycle.json").read_text())["experts"] == 4
    again = CliRunner().invoke(app, arguments)
    assert isinstance(again.exception, FileExistsError)


def test_refusals():
    with pytest.raises(ValueError, match="top_k=5: give at least 1 expert, and top_k from 1 to experts"):
        upcycle(tiny_llama(), 4, 5)
    with pytest.raises(ValueError, match="noise=-1 is a standard deviation"):
        upcycle(tiny_llama(), 4, 2, noise=-1)
    with pytest.raises(ValueError, match="mlp_bias=true: mixtral has no such bias"):
        upcycle(tiny_llama(mlp_bias=True), 4, 2)
    with pytest.raises(ValueError, match="mixtral has no mixture of its shape here"):
        upcycle(upcycle(tiny_llama(), 2, 1), 2, 1)
