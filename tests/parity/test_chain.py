"""The chain from the learner's log-probability to the engine's, link by link.

1. fake_quantize == quantize().dequantize()          tests/formats, every format
2. learner linear == rollout linear, same bytes      tests/quant/test_linear.py
3. published == loaded                               tests/sync/test_publish.py
4. engine prefill == learner forward                 here
5. decode == prefill                                 here
6. batch of one == row of a batch                    here

Links 4 to 6 are tight in fp32 where activations are not quantized. Where they are, rounding
differences of 1e-7 flip codes and layers carry the flip on (amplification), so a whole model can
only be compared statistically: here on a tiny model, on SmolLM2 in test_smollm2.py.
"""

import pytest
import torch

from lowbitrl.diagnose import compare
from lowbitrl.diagnose.mismatch import score
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.sync.publisher import publish
from tests.conftest import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [3], [20, 21, 22], [30, 31]]
TIGHT = 3e-5
WEIGHT_ONLY = ["bf16", "nvfp4-w4a16", "int4"]
QUANTIZED_ACTIVATIONS = ["nvfp4", "fp8", "int8"]


def sides(recipe):
    learner, rollout = tiny_llama(torch.float32), tiny_llama(torch.float32)
    prepare(learner, recipe, "learner")
    prepare(rollout, recipe, "rollout")
    engine = EmbeddedEngine(rollout)
    published = publish(learner, 0)
    engine.update(published.stream(), published.manifest)
    return learner, engine


def rollout_logprobs(completions):
    return [torch.tensor(c.rollout_logprobs) for c in completions]


@pytest.mark.parametrize("rollout", WEIGHT_ONLY)
def test_decode_is_prefill_is_the_learners_forward(rollout):
    learner, engine = sides(Recipe(rollout=rollout, learner="full"))
    completions = engine.generate(PROMPTS, 4, Sampling(max_tokens=8))
    sampled = rollout_logprobs(completions)
    prefill = engine.score([[*PROMPTS[c.prompt_index], *c.token_ids] for c in completions])
    prefill = [row[-len(c.token_ids) :] for row, c in zip(prefill, completions, strict=True)]
    ours = score(learner, PROMPTS, completions)
    for a, b, c in zip(sampled, prefill, ours, strict=True):
        torch.testing.assert_close(a, b, atol=TIGHT, rtol=0)
        torch.testing.assert_close(b, c, atol=TIGHT, rtol=0)


@pytest.mark.parametrize("rollout", WEIGHT_ONLY)
def test_a_batch_of_one_is_a_row_of_a_batch(rollout):
    _, engine = sides(Recipe(rollout=rollout))
    together = engine.generate(PROMPTS, 3, Sampling(max_tokens=8), seeds=[1, 2, 3, 4, 5])
    for index, prompt in enumerate(PROMPTS):
        alone = engine.generate([prompt], 3, Sampling(max_tokens=8), seeds=[index + 1])
        for a, b in zip(alone, together[3 * index : 3 * index + 3], strict=True):
            assert a.token_ids == b.token_ids
            assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=TIGHT)


@pytest.mark.parametrize("rollout", QUANTIZED_ACTIVATIONS)
def test_with_quantized_activations_full_alignment_is_close_on_most_tokens(rollout):
    """Most tokens agree tightly; the rest are where a code flipped. The mean stays far under the naive one."""
    recipes = {side: Recipe(rollout=rollout, learner=side) for side in ("bf16", "full")}
    means, shares = {}, {}
    for name, recipe in recipes.items():
        learner, engine = sides(recipe)
        completions = engine.generate(PROMPTS, 16, Sampling(max_tokens=8), seeds=[7] * 5)
        ours, theirs = score(learner, PROMPTS, completions), rollout_logprobs(completions)
        means[name] = compare(ours, theirs).mean
        shares[name] = float((torch.cat(ours) - torch.cat(theirs)).abs().lt(1e-3).float().mean())
    assert means["full"] < 0.5 * means["bf16"]
    assert shares["full"] > 0.5 > shares["bf16"]


def test_one_layer_is_tight_even_with_quantized_activations():
    learner, engine = sides(Recipe(rollout="nvfp4", learner="full", residual=0.5))
    x = torch.randn(3, 4, 64)
    for name in ("self_attn.q_proj", "mlp.gate_proj"):
        ours = learner.model.layers[1].get_submodule(name)
        theirs = engine.model.model.layers[1].get_submodule(name)
        assert torch.equal(ours(x), theirs(x))
        assert torch.equal(ours(x)[1:2, 2:3], ours(x[1:2, 2:3])) or torch.allclose(
            ours(x)[1:2, 2:3], ours(x[1:2, 2:3]), atol=1e-5
        )
