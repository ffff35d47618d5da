"""On a GPU: 8-bit codes of both sides are multiplied as they are, the pair stays a pair, gradients are the values'."""

import pytest
import torch

from lowbitrl.quant import Recipe, linear, prepare
from tests.conftest import tiny_llama

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

IDS = torch.arange(3, 99).view(4, 24)


def prepared(rollout, side):
    model = tiny_llama().cuda()
    prepare(model, Recipe(rollout=rollout, learner="full"), side)
    return model


def learned(rollout):
    model = prepared(rollout, "learner")
    logits = model(IDS.cuda()).logits.float()
    logits.square().mean().backward()
    return logits.detach(), torch.cat([p.grad.float().flatten() for p in model.parameters()])


@pytest.mark.parametrize("rollout", ["fp8", "int8"])
def test_products_of_codes(rollout, monkeypatch):
    monkeypatch.setattr(linear, "CODES_CHECKED_ON", None)
    values, by_values = learned(rollout)
    monkeypatch.setattr(linear, "CODES_CHECKED_ON", "this one")
    codes, by_codes = learned(rollout)
    with torch.no_grad():
        assert torch.equal(prepared(rollout, "rollout")(IDS.cuda()).logits.float(), codes)
    # Decoded values are rounded to BF16 once more, which flips codes of later layers (on a CPU 3 to 10% in all).
    assert (codes - values).norm() <= 0.2 * values.norm()
    assert (by_codes - by_values).norm() <= 0.2 * by_values.norm()
    assert not torch.equal(codes, values)
