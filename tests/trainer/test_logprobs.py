"""Chunked log-probabilities: right values, right gradients, and never a full vocabulary matrix."""

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.trainer.batch import arrange, micro_batches
from lowbitrl.trainer.logprobs import check_head, chunked_logprobs, response_logprobs
from tests.conftest import tiny_llama

PROMPTS = [[5, 6, 7], [8], [9, 10, 11, 12]]
RESPONSES = [[20, 21], [22, 23, 24, 25], [26, 27, 28]]


def exact(model, temperature):
    rows = []
    for p, r in zip(PROMPTS, RESPONSES, strict=True):
        logits = model(input_ids=torch.tensor([[*p, *r]])).logits.float() / temperature
        rows.append(
            logits.log_softmax(-1)[0, len(p) - 1 : -1].gather(-1, torch.tensor(r)[:, None]).squeeze(-1)
        )
    return rows


@pytest.mark.parametrize("layout", ["padded", "packed"])
@pytest.mark.parametrize("chunk", [1, 3, 1000])
@pytest.mark.parametrize("learner", ["bf16", "weights"])
def test_values_and_gradients_equal_the_full_softmax(layout, chunk, learner):
    model, plain = tiny_llama(torch.float32), tiny_llama(torch.float32)
    for m in (model, plain):
        prepare(m, Recipe(rollout="nvfp4-w4a16", learner=learner), "learner")
    got, entropy = response_logprobs(model, PROMPTS, RESPONSES, temperature=0.7, layout=layout, chunk=chunk)
    want = exact(plain, 0.7)
    assert got.shape == (3, 4)
    weight = torch.randn(3, 4)
    (got * weight).sum().backward()
    sum((row * weight[i, : len(row)]).sum() for i, row in enumerate(want)).backward()
    for i, row in enumerate(want):
        torch.testing.assert_close(got[i, : len(row)], row, atol=2e-5, rtol=1e-5)
        assert not got[i, len(row) :].any()
    assert (entropy > 0)[got != 0].all()
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, atol=3e-4, rtol=1e-3, msg=name)


def test_entropy_of_a_known_distribution():
    head = torch.nn.Linear(2, 4, bias=False)
    with torch.no_grad():
        head.weight.zero_()
    logprobs, entropy = chunked_logprobs(torch.ones(3, 2), head, torch.tensor([0, 1, 2]), 1.0, 2)
    torch.testing.assert_close(entropy, torch.full((3,), 4.0).log())
    torch.testing.assert_close(logprobs, -torch.full((3,), 4.0).log())


@pytest.mark.parametrize("chunk", [1, 3, 1000])
def test_entropies_carry_the_full_matrix_s_gradient_where_asked(chunk):
    states = torch.randn(7, 8, requires_grad=True)
    head = torch.nn.Linear(8, 11)
    targets, weight = torch.arange(7), torch.randn(2, 7)
    logprobs, entropy = chunked_logprobs(states, head, targets, 0.7, chunk, entropy_gradient=True)
    got = torch.autograd.grad(
        (weight[0] * logprobs + weight[1] * entropy).sum(), [states, *head.parameters()]
    )
    full = (head(states) / 0.7).log_softmax(-1)
    exact = -(full.exp() * full).sum(-1)
    chosen = full.gather(-1, targets[:, None]).squeeze(-1)
    want = torch.autograd.grad((weight[0] * chosen + weight[1] * exact).sum(), [states, *head.parameters()])
    torch.testing.assert_close(entropy, exact)
    for ours, theirs in zip(got, want, strict=True):
        torch.testing.assert_close(ours, theirs, atol=1e-5, rtol=1e-4)
    assert not chunked_logprobs(states, head, targets, 0.7, chunk)[1].requires_grad


def test_entropy_gradients_keep_no_vocabulary_matrix():
    """Between forward and backward nothing of (tokens x vocabulary) size is alive."""
    states, head = torch.randn(64, 8, requires_grad=True), torch.nn.Linear(8, 4096)
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.numel()) or t, lambda t: t):
        chunked_logprobs(states, head, torch.zeros(64, dtype=torch.long), 1.0, 16, entropy_gradient=True)
    assert max(kept, default=0) <= head.weight.numel() < 64 * 4096


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_layout_points_at_the_states_that_predict(layout):
    batch = arrange(PROMPTS, RESPONSES, layout, torch.device("cpu"))
    assert batch.targets.tolist() == [20, 21, 22, 23, 24, 25, 26, 27, 28]
    ids, positions = batch.ids.flatten(), batch.positions.flatten()
    # The token one step after each predicting state is its target.
    assert ids[batch.predicts + 1].tolist() == batch.targets.tolist()
    assert positions[batch.predicts].tolist() == [2, 3, 0, 1, 2, 3, 3, 4, 5]
    assert int(batch.real.sum()) == 17
    assert (batch.attention_mask is None) == (layout == "packed")


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_micro_batches_cover_rows_once_within_the_limit(layout):
    lengths = [7, 3, 9, 3, 1, 8, 10]
    groups = micro_batches(lengths, 20, layout)
    assert sorted(i for g in groups for i in g) == list(range(7))
    for group in groups:
        size = (
            sum(lengths[i] for i in group)
            if layout == "packed"
            else len(group) * max(lengths[i] for i in group)
        )
        assert size <= 20
    with pytest.raises(ValueError, match=r"row 6 has 10 tokens, over trainer\.micro_batch_tokens=9"):
        micro_batches(lengths, 9, layout)


def test_no_chunk_keeps_its_logits():
    """What autograd saves for a long batch is states and scalars, never tokens x vocabulary."""
    head = torch.nn.Linear(16, 5000, bias=False)
    saved = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: saved.append(t.numel()) or t, lambda t: t):
        chunked_logprobs(
            torch.randn(512, 16, requires_grad=True), head, torch.zeros(512, dtype=torch.long), 1.0, 64
        )
    assert max(saved, default=0) <= head.weight.numel()
    assert sum(n for n in saved if n != head.weight.numel()) < 512 * 64


def test_heads_that_change_logits_are_refused():
    model = tiny_llama()
    model.config.final_logit_softcapping = 30.0
    with pytest.raises(ValueError, match=r"final_logit_softcapping=30\.0"):
        check_head(model)
