"""The launches around expert products: the CUDA source, emulated, against torch's ops."""

import pytest
import torch
from emulated_cuda import emulated, emulated_library  # noqa: F401

from lowbitrl.kernels import between_experts, why_unavailable
from lowbitrl.kernels.between_experts import gate_rows, weighted_sum


@pytest.fixture
def by_source(emulated_library, monkeypatch):  # noqa: F811
    """The op's CUDA branch reaches the emulated kernels."""
    monkeypatch.setattr(between_experts, "library", lambda: emulated_library)
    monkeypatch.setattr(between_experts, "stream", lambda device: None)


@pytest.mark.parametrize(("rows", "width"), [(1, 8), (7, 40), (0, 8)])
def test_a_gate_has_torchs_roundings(rows, width, by_source, poisoned):
    up = torch.randn(rows, 2 * width).bfloat16() * 8
    got = torch.ops.lowbitrl.gate_rows(up, "cuda").float()
    wanted = gate_rows(up, backend="reference").float()
    # exp is the C library's here: one rounding of the sigmoid may fall the other way.
    assert ((got - wanted).abs() <= 2**-7 * wanted.abs() + 1e-30).all()


def test_sums_are_of_rounded_products_in_order(by_source, poisoned):
    y, weights = torch.randn(5 * 8, 24).bfloat16(), torch.rand(5, 8).bfloat16()
    got = torch.ops.lowbitrl.weighted_sum(y, weights, "cuda")
    products = (y * weights.reshape(-1, 1)).view(5, 8, 24).float()
    wanted = torch.zeros(5, 24)
    for choice in range(8):
        wanted += products[:, choice]
    assert torch.equal(got, wanted.bfloat16())
    assert torch.allclose(got.float(), weighted_sum(y, weights, backend="reference").float(), rtol=2**-7)


@pytest.mark.skipif(why_unavailable("cuda") is not None, reason="needs the CUDA kernels")
def test_on_a_gpu_bits_are_torchs():
    up = torch.randn(100, 96, device="cuda").bfloat16() * 8
    assert torch.equal(gate_rows(up, backend="cuda"), gate_rows(up, backend="reference"))
    y, weights = torch.randn(40, 24, device="cuda").bfloat16(), torch.rand(5, 8, device="cuda").bfloat16()
    got, wanted = (weighted_sum(y, weights, backend=name).float() for name in ("cuda", "reference"))
    assert ((got - wanted).abs() <= 2**-7 * wanted.abs() + 1e-5).all()


def test_refusals():
    with pytest.raises(ValueError, match="can't run here"):
        gate_rows(torch.randn(2, 16), backend="cuda")
    assert "multiple of 8" in str(between_experts._why_not(torch.randn(2, 12).bfloat16(), 12))
