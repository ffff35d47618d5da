"""The papers' ordering on a real model: naive > weights > weights + residual, a few hundred tokens."""

import pytest
import torch

from lowbitrl.diagnose import compare
from lowbitrl.diagnose.mismatch import score
from lowbitrl.models import load_model
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine

pytestmark = [pytest.mark.demo, pytest.mark.slow]
QUESTIONS = (
    "What is 7 + 5?",
    "Name three rivers in Europe.",
    "Write a sentence about the sea.",
    "What is a prime number?",
)


def loaded(recipe, side):
    model, tokenizer = load_model("demo", torch.bfloat16, "cpu")
    if recipe is not None:
        prepare(model, recipe, side)
    return model, tokenizer


@pytest.fixture(scope="module")
def scored():
    """Log-probabilities of the same sampled tokens under three learners and two rollouts."""
    engine_model, tokenizer = loaded(Recipe(rollout="nvfp4"), "rollout")
    prompts = [
        tokenizer.apply_chat_template(
            [{"role": "user", "content": q}], add_generation_prompt=True, return_dict=True
        )["input_ids"]
        for q in QUESTIONS
    ]
    completions = EmbeddedEngine(engine_model).generate(
        prompts, 4, Sampling(max_tokens=24), seeds=[0, 1, 2, 3]
    )
    residual, _ = loaded(Recipe(rollout="nvfp4", residual=0.5), "rollout")
    full, _ = loaded(Recipe(rollout="nvfp4", residual=1.0), "rollout")
    weights, _ = loaded(Recipe(rollout="nvfp4", learner="weights"), "learner")
    bf16, _ = loaded(None, "learner")
    models = {
        "w4a4": engine_model,
        "residual 0.5": residual,
        "residual 1": full,
        "weights": weights,
        "bf16": bf16,
    }
    return {name: score(model, prompts, completions) for name, model in models.items()}


def test_each_half_of_quads_closes_its_share(scored):
    naive = compare(scored["bf16"], scored["w4a4"])
    weights = compare(scored["weights"], scored["w4a4"])
    quads = compare(scored["weights"], scored["residual 0.5"])
    repaired = compare(scored["weights"], scored["residual 1"])
    assert naive.tokens > 200
    assert naive.mean > 1.25 * weights.mean
    assert weights.mean > 1.4 * quads.mean
    assert quads.mean > 1.5 * repaired.mean
    assert naive.mean > 2.2 * quads.mean
