"""Muon is torch's on a matrix, to the bit; on a stack it is itself expert by expert; shards are as if whole."""

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

from lowbitrl.trainer.muon import Muon, newton_schulz
from lowbitrl.trainer.optim import MasterOptimizer, OptimizerConfig
from tests.distributed.processes import run_ranks
from tests.moe_models import tiny_moe

SHAPES = [(48, 32), (32, 48), (5, 64), (3, 24, 16), (7, 16, 24), (64, 8)]


def parameters():
    torch.manual_seed(3)
    return [torch.randn(shape) for shape in SHAPES]


def gradients(step):
    draw = torch.Generator().manual_seed(step)
    return [torch.randn(shape, generator=draw) for shape in SHAPES]


def stepped(place=lambda tensor: tensor, steps=3):
    """The parameters after some steps, `place` deciding where each lives."""
    ours = [place(p).requires_grad_() for p in parameters()]
    muon = Muon(ours, lr=1e-2, momentum=0.95, weight_decay=0.1)
    for step in range(steps):
        for parameter, gradient in zip(ours, gradients(step), strict=True):
            parameter.grad = place(gradient)
        muon.step()
    return [p.detach() for p in ours]


def of_ranks(size):
    mesh = init_device_mesh("cpu", (size,))
    ended = stepped(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]))
    return [p.full_tensor() for p in ended]


def test_matrices_step_as_torchs_do():
    theirs = [p.requires_grad_() for p in parameters()]
    flat = [p for p in theirs if p.ndim == 2]
    other = torch.optim.Muon(flat, lr=1e-2, momentum=0.95, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")
    for step in range(3):
        for parameter, gradient in zip(theirs, gradients(step), strict=True):
            parameter.grad = gradient
        other.step()
    for ours, parameter in zip(stepped(), theirs, strict=True):
        assert ours.ndim == 3 or torch.equal(ours, parameter)


def test_a_stack_is_its_matrices_apart():
    stack = torch.randn(3, 24, 16)
    for one, together in zip(stack, newton_schulz(stack), strict=True):
        torch.testing.assert_close(newton_schulz(one), together, rtol=0, atol=0.02)
        singular = torch.linalg.svdvals(together.float())
        assert 0.6 < float(singular.min()) <= float(singular.max()) < 1.3


@pytest.mark.parametrize("size", [1, 2, 3])
def test_shards_step_as_the_whole_does(tmp_path, size):
    """To the bit where a matrix is gathered; a rank multiplies other numbers of experts at once."""
    whole = stepped()
    for rank in run_ranks(size, tmp_path, of_ranks, size):
        for ours, theirs in zip(rank, whole, strict=True):
            if ours.ndim == 2:
                assert torch.equal(ours, theirs)
            torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-3)


def moved_in_one_step(size):
    """Elements that this rank got of others' and its own shards, and the shapes it orthogonalized."""
    from lowbitrl.trainer import muon

    real, orthogonalized, gathered = muon.newton_schulz, [], []
    exchange = muon.dist.all_to_all_single

    def counting(output, given, *arguments, **options):
        gathered.append(output.numel())
        return exchange(output, given, *arguments, **options)

    muon.newton_schulz = lambda matrix: (orthogonalized.append(tuple(matrix.shape)), real(matrix))[1]
    muon.dist.all_to_all_single = counting
    mesh = init_device_mesh("cpu", (size,))
    stepped(lambda tensor: distribute_tensor(tensor, mesh, [Shard(0)]), steps=1)
    return gathered, orthogonalized


def test_each_matrix_is_gathered_once_and_a_stack_is_one_batch(tmp_path):
    """Every second exchange sends rows back; experts stay where they lie."""
    ranks = run_ranks(2, tmp_path, moved_in_one_step, 2)
    matrices = [shape for shape in SHAPES if len(shape) == 2]
    assert sum(sum(gathered[::2]) for gathered, _ in ranks) == sum(n * k for n, k in matrices)
    assert sorted(shape for _, done in ranks for shape in done if len(shape) == 2) == sorted(matrices)
    assert [shape for shape in ranks[0][1] if len(shape) == 3] == [(2, 24, 16), (4, 16, 24)]
    assert [shape for shape in ranks[1][1] if len(shape) == 3] == [(1, 24, 16), (3, 16, 24)]


@pytest.mark.parametrize("kind", ["qwen3_moe", "gpt_oss"])
def test_stacks_are_muons_and_their_biases_are_not(kind):
    optimizer = MasterOptimizer(tiny_moe(kind), OptimizerConfig(name="muon"))
    names = {id(m): n for n, m in optimizer.masters.items()}
    taken = {names[id(p)] for g in optimizer.optimizers[1].param_groups for p in g["params"]}
    assert sum(optimizer.masters[n].ndim == 3 for n in taken) == 4
    assert not any(n.endswith("bias") or "embed" in n or "lm_head" in n for n in taken)
