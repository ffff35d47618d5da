"""The optimizer that verl is given for hidden matrices."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lowbitrl.integrations.verl.muon import Muon, build_muon, newton_schulz
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe


@pytest.mark.parametrize("shape", [(48, 32), (32, 48), (16, 128)])
def test_updates_are_nearly_orthogonal(shape):
    singular = torch.linalg.svdvals(newton_schulz(torch.randn(shape)).float())
    assert singular.min() > 0.6
    assert singular.max() < 1.3


def test_a_stack_is_its_matrices_apart():
    stack = torch.randn(3, 24, 16)
    together = newton_schulz(stack)
    for one, whole in zip(stack, together, strict=True):
        torch.testing.assert_close(newton_schulz(one), whole, rtol=0, atol=0.02)


def test_the_first_steps_are_those_of_torchs_muon():
    ours, theirs = (torch.nn.Parameter(torch.arange(1536.0).view(48, 32).sin()) for _ in range(2))
    mine = Muon([ours], [torch.nn.Parameter(torch.zeros(1))], lr=1e-3, muon_lr=1e-2, weight_decay=0.1)
    other = torch.optim.Muon(
        [theirs], lr=1e-2, weight_decay=0.1, momentum=0.95, adjust_lr_fn="match_rms_adamw"
    )
    for step in range(3):
        for parameter in (ours, theirs):
            parameter.grad = torch.randn(48, 32, generator=torch.Generator().manual_seed(step))
        mine.step()
        other.step()
    torch.testing.assert_close(ours, theirs, rtol=0, atol=3e-3)


def test_a_loaded_state_goes_on_as_if_never_saved():
    def optimizer():
        torch.manual_seed(1)
        parameters = [torch.nn.Parameter(torch.randn(8, 4)), torch.nn.Parameter(torch.randn(4))]
        return parameters, Muon(parameters[:1], parameters[1:], lr=1e-2, muon_lr=1e-2)

    def step(parameters, built, seed):
        for parameter in parameters:
            parameter.grad = torch.randn(parameter.shape, generator=torch.Generator().manual_seed(seed))
        built.step()

    (ours, mine), (theirs, other) = optimizer(), optimizer()
    step(ours, mine, 0)
    step(theirs, other, 0)
    fresh, loaded = optimizer()
    with torch.no_grad():
        for target, source in zip(fresh, ours, strict=True):
            target.copy_(source)
    loaded.load_state_dict(mine.state_dict())
    step(fresh, loaded, 1)
    step(theirs, other, 1)
    assert all(a.equal(b) for a, b in zip(fresh, theirs, strict=True))


@pytest.mark.parametrize("make", [tiny_llama, tiny_moe])
def test_matrices_and_stacks_are_muons_the_rest_adamws(make):
    model = make()
    config = SimpleNamespace(
        lr=1e-3, betas=(0.9, 0.95), weight_decay=0.0, override_optimizer_config={"muon_lr": 1e-2, "eps": 1e-8}
    )
    *vectors, matrices = build_muon(model, config).param_groups
    ends = {id(model.get_input_embeddings().weight), id(model.get_output_embeddings().weight)}
    assert matrices["lr"] == 1e-2
    assert all(p.ndim > 1 and id(p) not in ends for p in matrices["params"])
    assert sum(len(g["params"]) for g in [*vectors, matrices]) == len(list(model.parameters()))
