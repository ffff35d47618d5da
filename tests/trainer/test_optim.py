import pytest
import torch
from torch import nn

from lowbitrl.trainer.optim import MasterOptimizer, OptimizerConfig
from tests.conftest import tiny_llama


def accumulate(model, gradients):
    for name, p in model.named_parameters():
        (p * gradients[name].to(p.dtype)).sum().backward()


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_masters_step_like_torch_on_fp32_weights(name):
    model = tiny_llama(torch.bfloat16)
    config = OptimizerConfig(name=name, learning_rate=1e-3, muon_learning_rate=1e-3, max_grad_norm=0)
    optimizer = MasterOptimizer(model, config)
    reference = {n: p.detach().float().clone().requires_grad_() for n, p in model.named_parameters()}
    hidden = {n for n in reference if "proj" in n} if name == "muon" else set()
    adamw = torch.optim.AdamW(
        [p for n, p in reference.items() if n not in hidden],
        1e-3,
        betas=config.betas,
        eps=config.eps,
        weight_decay=0,
    )
    others = [adamw]
    if hidden:
        muon = torch.optim.Muon(
            [p for n, p in reference.items() if n in hidden],
            lr=1e-3,
            weight_decay=0,
            adjust_lr_fn="match_rms_adamw",
        )
        others.append(muon)
    for _ in range(3):
        gradients = {n: torch.randn_like(p).bfloat16().float() for n, p in reference.items()}
        accumulate(model, gradients)
        optimizer.step(optimizer.gradient_norm())
        for n, p in reference.items():
            p.grad = gradients[n]
        for o in others:
            o.step()
    for n, p in model.named_parameters():
        torch.testing.assert_close(optimizer.masters[n], reference[n], rtol=0, atol=0)
        assert torch.equal(p, reference[n].bfloat16())


def test_steps_below_a_bf16_ulp_add_up_in_the_master():
    model = nn.Linear(4, 4, bias=False).bfloat16()
    with torch.no_grad():
        model.weight.fill_(1.0)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=1e-4, max_grad_norm=0))
    for _ in range(60):
        accumulate(model, {"weight": torch.ones(4, 4)})
        optimizer.step(optimizer.gradient_norm())
    assert float(optimizer.masters["weight"][0, 0]) == pytest.approx(1 - 60e-4, abs=1e-5)
    assert float(model.weight[0, 0]) == pytest.approx(1 - 60e-4, abs=4e-3)
    assert float(model.weight[0, 0]) < 1.0


def test_micro_batches_accumulate_in_fp32():
    model = nn.Linear(1, 1, bias=False).bfloat16()
    optimizer = MasterOptimizer(model, OptimizerConfig())
    for value in (256.0, 1.0, 1.0, 1.0):
        accumulate(model, {"weight": torch.full((1, 1), value)})
    assert model.weight.grad is None
    assert float(optimizer.masters["weight"].grad) == 259.0  # 256 + 1 is 256 in BF16
    assert float(optimizer.gradient_norm()) == 259.0


def test_clipping_scales_the_total_norm():
    model = nn.Linear(2, 2, bias=False)
    optimizer = MasterOptimizer(model, OptimizerConfig(max_grad_norm=1.0))
    accumulate(model, {"weight": torch.full((2, 2), 5.0)})
    norm = optimizer.gradient_norm()
    assert float(norm) == pytest.approx(10.0)
    seen = []
    optimizer.optimizers[0].register_step_pre_hook(lambda o, *_: seen.append(model.weight.grad.norm().item()))
    optimizer.step(norm)
    assert seen == pytest.approx([1.0], rel=1e-4)


def test_warm_up_reaches_the_learning_rate_and_stays():
    model = nn.Linear(2, 2, bias=False)
    optimizer = MasterOptimizer(model, OptimizerConfig(learning_rate=0.4, warmup_steps=4))
    rates = []
    for _ in range(6):
        accumulate(model, {"weight": torch.ones(2, 2)})
        optimizer.step(optimizer.gradient_norm())
        rates.append(optimizer.optimizers[0].param_groups[0]["lr"])
    assert rates == pytest.approx([0.1, 0.2, 0.3, 0.4, 0.4, 0.4])


def test_muon_takes_hidden_matrices_only():
    model = tiny_llama()
    optimizer = MasterOptimizer(model, OptimizerConfig(name="muon"))
    muon = {id(p) for g in optimizer.optimizers[1].param_groups for p in g["params"]}
    assert muon == {id(m) for n, m in optimizer.masters.items() if "proj" in n}


def test_a_write_back_moves_the_version_counter_so_that_bytes_are_encoded_anew():
    model = nn.Linear(2, 2, bias=False).bfloat16()
    optimizer = MasterOptimizer(model, OptimizerConfig())
    before = model.weight._version
    optimizer.write_back()
    assert model.weight._version > before
