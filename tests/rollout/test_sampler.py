import pytest
import torch

from lowbitrl.rollout.embedded.sampler import sample, uniforms


def test_a_stream_depends_on_seed_and_sample_alone():
    assert torch.equal(uniforms(3, 1, 8), uniforms(3, 1, 8))
    assert torch.equal(uniforms(3, 1, 4), uniforms(3, 1, 8)[:4])
    assert not torch.equal(uniforms(3, 1, 8), uniforms(3, 2, 8))
    assert not torch.equal(uniforms(4, 1, 8), uniforms(3, 1, 8))


def test_streams_are_uniform():
    values = torch.cat([uniforms(seed, 0, 500) for seed in range(40)])
    assert values.min() >= 0
    assert values.max() < 1
    assert float(values.mean()) == pytest.approx(0.5, abs=0.01)


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seeds_outside_the_range_are_refused(seed):
    with pytest.raises(ValueError, match="2\\^63"):
        uniforms(seed, 0, 1)


def test_tokens_follow_the_tempered_distribution():
    logits = torch.tensor([0.0, 1.0, 2.0, -torch.inf])
    expected = (logits / 0.7).softmax(-1)
    count = 20_000
    tokens, logprobs, _ = sample(logits.repeat(count, 1), 0.7, torch.linspace(0, 1, count + 1)[:-1])
    shares = torch.bincount(tokens, minlength=4) / count
    torch.testing.assert_close(shares, expected, atol=2e-3, rtol=0)
    torch.testing.assert_close(logprobs, expected.log()[tokens], atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("uniform", [0.0, 0.5, 1 - 2**-24])
def test_impossible_tokens_are_never_drawn(uniform):
    logits = torch.tensor([[-torch.inf, 0.0, -torch.inf, 0.0, -torch.inf]])
    tokens, logprobs, _ = sample(logits, 1.0, torch.tensor([uniform]))
    assert tokens.item() in (1, 3)
    assert logprobs.item() == pytest.approx(-0.6931472)


def test_bf16_logits_are_scored_in_fp32():
    logits = torch.randn(4, 1000, dtype=torch.bfloat16)
    tokens, logprobs, _ = sample(logits, 1.0, torch.rand(4))
    exact = logits.double().log_softmax(-1).gather(-1, tokens[:, None]).squeeze(-1)
    torch.testing.assert_close(logprobs.double(), exact, atol=1e-6, rtol=1e-6)


def test_temperature_zero_takes_the_most_likely_token_with_certainty():
    tokens, logprobs, _ = sample(torch.tensor([[0.0, 3.0, 1.0]]), 0.0, torch.tensor([0.99]))
    assert tokens.tolist() == [1]
    assert logprobs.tolist() == [0.0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("broken", [torch.nan, torch.inf])
def test_broken_logits_are_told_by_their_total_and_touch_no_other_row(temperature, broken):
    logits, uniform = torch.randn(3, 5), torch.rand(3)
    sound = sample(logits, temperature, uniform)
    logits[1, 2] = broken
    found = sample(logits, temperature, uniform)
    assert torch.isfinite(found[2]).tolist() == [True, False, True]
    assert all(torch.equal(a[[0, 2]], b[[0, 2]]) for a, b in zip(found, sound, strict=True))
