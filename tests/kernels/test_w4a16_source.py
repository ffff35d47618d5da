"""The CUDA source of the 4-bit products, run on the CPU by an emulation of what it uses of CUDA.

Everything but the launch and the PTX is the shipped code: indices, layouts, decoding, the cluster's reduction.
"""

import pytest
import torch
from emulated_cuda import emulated, emulated_library  # noqa: F401

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import grouped_w4a16, w4a16, w4a16_choice, w4a16_cuda
from lowbitrl.kernels.weights4 import describe

pytestmark = pytest.mark.usefixtures("emulated", "poisoned")

FORMATS = ["nvfp4", "int4-g128", "int4-g64", "int4-g32"]


NARROW = w4a16_choice.Variant(1, 1, 4, 2)


@pytest.fixture
def planned(monkeypatch):
    """A function that makes every product take one variant and number of shares."""
    return lambda variant, splits: monkeypatch.setattr(
        w4a16_cuda, "plan_for", lambda *args: w4a16_choice.Plan(variant, splits, 0)
    )


def product(x, weight, bias=None, token_scale=None):
    w = describe(weight)
    return torch.ops.lowbitrl.w4a16_matmul(
        x, w.codes, w.scale, w.global_scale, token_scale, bias, w.group, w.nvfp4, "cuda"
    )


def close(got, wanted):
    """Both are BF16 of fp32 sums of the same terms: apart by one rounding where the orders of sums differ."""
    assert got.dtype == torch.bfloat16
    error = (got.float() - wanted.float()).abs()
    assert (error <= 2**-7 * wanted.float().abs() + 1e-5 * wanted.float().abs().amax()).all(), error.amax()


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "n", "k"), [(1, 64, 128), (3, 200, 640), (17, 130, 512), (33, 72, 256), (70, 40, 128)]
)
def test_equals_the_reference_up_to_the_order_of_sums(name, m, n, k):
    x, bias, token_scale = torch.randn(m, k).bfloat16(), torch.randn(n).bfloat16(), torch.rand(m)
    weight = get_format(name).quantize(torch.randn(n, k).bfloat16() * 0.02)
    close(product(x, weight), w4a16.reference(x, weight, None, None))
    close(product(x, weight, bias, token_scale), w4a16.reference(x, weight, bias, token_scale))


@pytest.mark.parametrize("k", [32, 96, 160, 672])
def test_a_last_chunk_that_is_not_whole(k):
    weight = get_format("nvfp4").quantize(torch.randn(70, k).bfloat16())
    x = torch.randn(5, k).bfloat16()
    close(product(x, weight), w4a16.reference(x, weight, None, None))


def test_every_code_under_every_scale():
    codes = torch.arange(16, dtype=torch.uint8).repeat_interleave(16)
    packed = (codes | codes << 4)[::2].expand(127, -1).contiguous()
    scale = (
        torch.arange(127, dtype=torch.uint8)[:, None].expand(-1, 16).contiguous().view(torch.float8_e4m3fn)
    )
    weight = QuantizedTensor(packed, scale, torch.ones(()), torch.Size([127, 256]), "nvfp4")
    picks = torch.eye(256)[::8].bfloat16()
    got = product(picks, weight)
    assert torch.equal(got.float(), weight.dequantize().T[::8])


def test_rows_of_a_wider_tensor_and_tokens_whose_number_is_odd():
    weight = get_format("nvfp4").quantize(torch.randn(64, 128).bfloat16())
    wide = torch.randn(9, 384).bfloat16()
    for x in (wide[:, 128:256], wide[:, 4:132], wide.T.contiguous().T[:, :128]):
        close(product(x, weight), w4a16.reference(x, weight, None, None))
    assert product(wide[:0, :128], weight).shape == (0, 64)


def test_bytes_that_start_anywhere():
    weight = get_format("nvfp4").quantize(torch.randn(64, 128).bfloat16())
    shifted = torch.empty(weight.qdata.numel() + 3, dtype=torch.uint8)[3:].view(64, 64)
    shifted.copy_(weight.qdata)
    moved = QuantizedTensor(shifted, weight.scale, weight.global_scale, weight.shape, weight.format)
    x = torch.randn(3, 128).bfloat16()
    assert torch.equal(product(x, moved), product(x, weight))


@pytest.mark.parametrize("variant", w4a16_choice.built(), ids=str)
def test_every_variant_that_is_built(variant, planned):
    planned(variant, 2)
    x = torch.randn(variant.tiles * 8 - 3, 416).bfloat16()
    weight = get_format("nvfp4").quantize(torch.randn(variant.height + 5, 416).bfloat16())
    close(product(x, weight), w4a16.reference(x, weight, None, None))


def test_splitting_k_over_a_cluster_changes_only_the_order_of_sums(planned):
    weight = get_format("nvfp4").quantize(torch.randn(100, 1024).bfloat16())
    x = torch.randn(6, 1024).bfloat16()
    wanted = w4a16.reference(x, weight, None, None)
    for splits in (1, 2, 4, 8):
        planned(NARROW, splits)
        once, again = product(x, weight), product(x, weight)
        close(once, wanted)
        assert torch.equal(once, again)


@pytest.mark.parametrize("variant", [NARROW, w4a16_choice.Variant(2, 1, 8, 2, shares=4)], ids=str)
def test_activations_staged_in_phases_give_the_same_bits(variant, planned, monkeypatch):
    weight = get_format("nvfp4").quantize(torch.randn(64, 1536).bfloat16())
    x = torch.randn(6, 1536).bfloat16()
    planned(variant, 1)
    whole = product(x, weight)
    monkeypatch.setattr(w4a16_cuda, "ACTIVATION_BYTES", 10 << 10)
    assert torch.equal(product(x, weight), whole)


@pytest.mark.parametrize(("tokens", "experts"), [(1, 5), (11, 5), (30, 5), (70, 8), (20, 256)])
def test_routed_rows(tokens, experts):
    choices = 2
    weight = get_format("nvfp4").quantize(
        torch.randn(experts, 72, 128).bfloat16(), amax=torch.rand(experts, 1, 1) + 3
    )
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)])
    bias = torch.randn(experts, 72).bfloat16()
    flat, block = ids.reshape(-1).int(), grouped_w4a16.block_size(ids.numel(), experts)
    slots, owners = torch.ops.lowbitrl.align_experts(flat, experts, block, True)
    blocks = grouped_w4a16.ExpertBlocks(slots, owners, flat, block, "cuda")
    for x in (torch.randn(tokens, 128).bfloat16(), torch.randn(tokens * choices, 128).bfloat16()):
        got = grouped_w4a16.grouped_w4a16_matmul(x, weight, blocks, bias=bias)
        close(got, grouped_w4a16.reference(x, weight, flat, bias, None))


@pytest.mark.parametrize(
    ("rows", "experts", "block"), [(1, 1, 8), (50, 16, 8), (64, 3, 16), (7, 128, 8), (600, 256, 8), (0, 8, 8)]
)
def test_blocks_hold_every_row_once_and_one_expert_each(rows, experts, block):
    ids = torch.randint(0, experts, (rows,), dtype=torch.int32)
    slots, owners = torch.ops.lowbitrl.align_experts(ids, experts, block, True)
    by_sorting = grouped_w4a16.align_by_sorting(ids, experts, block, len(owners))
    assert torch.equal(owners, by_sorting[1])
    for found in (slots, by_sorting[0]):
        of_blocks = found.view(-1, block)
        real = of_blocks < rows
        assert of_blocks[real].sort().values.tolist() == list(range(rows))
        assert (ids[of_blocks[real].long()] == owners[:, None].expand_as(of_blocks)[real]).all()
