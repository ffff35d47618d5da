"""Decoding by a captured CUDA graph, on a GPU: what it samples, and what an update does to it."""

import pytest
import torch

from lowbitrl.formats import QuantizedTensor
from lowbitrl.quant import Recipe, prepare
from lowbitrl.quant.linear import RolloutLinear
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from tests.conftest import tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [3], [20, 21, 22]]
SAMPLING = Sampling(max_tokens=20, stop_token_ids=(1, 2, 3))
SEEDS = [1, 2, 3, 4]


def engine_of(scheduler, rollout="nvfp4", dtype=torch.float32):
    model = tiny_llama(dtype).cuda()
    prepare(model, Recipe(rollout=rollout, residual=0.5 if rollout == "nvfp4" else 0.0), "rollout")
    return EmbeddedEngine(model, scheduler)


def sampled(engine):
    return [c.token_ids for c in engine.generate(PROMPTS, 16, SAMPLING, SEEDS)]


@pytest.mark.parametrize("rollout", ["bf16", "nvfp4-w4a16"])
def test_a_graph_samples_what_the_batch_scheduler_does(rollout):
    fixed = engine_of("graph", rollout).generate(PROMPTS, 16, SAMPLING, SEEDS)
    grown = engine_of("batch", rollout).generate(PROMPTS, 16, SAMPLING, SEEDS)
    for a, b in zip(fixed, grown, strict=True):
        assert a.token_ids == b.token_ids
        assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-4)


@pytest.mark.parametrize(("rollout", "dtype"), [("nvfp4", torch.float32), ("nvfp4-w4a16", torch.bfloat16)])
def test_a_captured_graph_follows_identity_updates_and_a_changed_scale_alone(rollout, dtype):
    """Pointers stay valid: the graph captured before the updates serves what came with each.

    In BF16 the graph reads the published bytes themselves, in fp32 what was decoded from them.
    """
    engine = engine_of("graph", rollout, dtype)
    first = sampled(engine)
    linears = [m for m in engine.model.modules() if isinstance(m, RolloutLinear) and m.encoded is not None]
    for _ in range(2):
        for linear in linears:
            linear.adopt(linear.encoded)
        assert sampled(engine) == first
    for linear in linears:
        q = linear.encoded
        linear.adopt(QuantizedTensor(q.qdata, q.scale, q.global_scale * 1.5, q.shape, q.format))
    assert len(engine._graphs._steps) == 1
    changed = sampled(engine)
    assert changed != first
    fresh = EmbeddedEngine(engine.model, "graph")
    assert sampled(fresh) == changed
