"""Every variant of the CUDA products that is built, on the GPU; small shapes, so compute-sanitizer can run them too.

compute-sanitizer --tool memcheck pytest tests/kernels/test_products_cuda.py
"""

import itertools

import pytest
import torch

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.kernels import align_experts, grouped_w4a16_matmul, w4a16_matmul, why_unavailable
from lowbitrl.kernels.grouped_w4a16 import BLOCK_SIZES
from lowbitrl.kernels.w4a16_choice import OVERLAPS, TOKENS_A_TILE, Plan, Variant, built
from lowbitrl.kernels.w4a16_cuda import launch_w4a16
from lowbitrl.kernels.weights4 import describe

pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.skipif(why_unavailable("cuda") is not None, reason="needs the CUDA kernels"),
]


def stack(name: str, *shape: int) -> QuantizedTensor:
    fmt, values = get_format(name), torch.randn(*shape, device="cuda").bfloat16() * 0.02
    amax = values.abs().amax((-1, -2), keepdim=True) if len(shape) == 3 and fmt.per == "tensor" else None
    return fmt.quantize(values, amax=amax)


def close(got, wanted):
    """Both are BF16 of fp32 sums of the same terms: apart by one rounding where the orders of sums differ."""
    error = (got.float() - wanted.float()).abs()
    assert (error <= 2**-7 * wanted.float().abs() + 1e-5 * wanted.float().abs().amax()).all(), error.amax()


@pytest.mark.parametrize("name", ["nvfp4", "int4-g128", "int4-g32"])
@pytest.mark.parametrize("variant", built(), ids=str)
def test_a_variant_equals_the_reference(name, variant):
    for k in (96, 1152):
        if k % 128 and name == "int4-g128":
            continue
        weight = stack(name, variant.height + 8, k)
        x = torch.randn(variant.tiles * TOKENS_A_TILE + 3, k, device="cuda").bfloat16()
        wanted, w = w4a16_matmul(x, weight, backend="reference"), describe(weight)
        for splits, overlap in itertools.product((1, 3, 8) if k > 1000 else (1,), OVERLAPS):
            out, plan = torch.empty_like(wanted), Plan(variant, splits, overlap)
            launch_w4a16(x, w.codes, w.scale, w.global_scale, None, None, out, w.group, w.nvfp4, plan=plan)
            close(out, wanted)


@pytest.mark.parametrize("name", ["nvfp4", "int4-g128"])
@pytest.mark.parametrize("block", BLOCK_SIZES)
def test_every_block_of_experts(name, block):
    experts, choices = 6, 2
    tokens = block * experts // choices
    weight, x = stack(name, experts, 72, 256), torch.randn(tokens, 256, device="cuda").bfloat16()
    ids = torch.rand(tokens, experts, device="cuda").topk(choices, -1).indices
    blocks, plain = (align_experts(ids, weight, backend=backend) for backend in ("cuda", "reference"))
    assert blocks.block == block
    close(grouped_w4a16_matmul(x, weight, blocks), grouped_w4a16_matmul(x, weight, plain))


@pytest.mark.parametrize("tokens", [1, 63, 8191])
def test_the_largest_weight(tokens):
    """(8192, 16384): some outputs against fp64, within one BF16 rounding and K roundings in fp32."""
    n, k = 8192, 16384
    weight, x = stack("nvfp4", n, k), torch.randn(tokens, k, device="cuda").bfloat16()
    rows, columns = torch.randint(tokens, (40,)), torch.randint(n, (40,))
    values, seen = weight.dequantize()[columns].double(), x[rows].double()
    exact, magnitude = (seen * values).sum(-1), (seen * values).abs().sum(-1)
    for backend in ("cuda", "cublas"):
        got = w4a16_matmul(x, weight, backend=backend)[rows, columns].double()
        # cuBLAS multiplies weights rounded to BF16 once more.
        rounding = 2.0**-8 * exact.abs() + (2.0**-8 * magnitude if backend == "cublas" else 0)
        assert ((got - exact).abs() <= rounding + 2 * k * 2.0**-24 * magnitude).all()


@pytest.mark.parametrize("overlap", OVERLAPS)
@pytest.mark.parametrize("variant", [Variant(1, 2, 4, 2), Variant(8, 1, 12, 2, grouped=True)], ids=str)
def test_a_product_reads_what_the_one_before_wrote_at_the_same_address(variant, overlap):
    """Grids that overlap share caches: one of them must never hold for the next what was there before."""
    first, second = describe(stack("nvfp4", 4096, 256)), describe(stack("nvfp4", 512, 4096))
    inputs = [torch.randn(variant.tiles * TOKENS_A_TILE, 256, device="cuda").bfloat16() for _ in range(40)]
    hidden = torch.empty(len(inputs[0]), 4096, device="cuda", dtype=torch.bfloat16)

    def chain(overlap):
        results = [hidden.new_zeros(len(hidden), 512) for _ in inputs]
        plan = Plan(variant, 2, overlap)
        for x, out in zip(inputs, results, strict=True):
            for a, w, y in ((x, first, hidden), (hidden, second, out)):
                launch_w4a16(a, w.codes, w.scale, w.global_scale, None, None, y, w.group, w.nvfp4, plan=plan)
        return results

    for got, wanted in zip(chain(overlap), chain(0), strict=True):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("tokens", [1, 16, 64])
def test_a_captured_product_sees_new_bytes(tokens):
    """The graph holds pointers: weights written in place, by a kernel just before, are what a replay reads."""
    first, second = stack("nvfp4", 200, 512), stack("nvfp4", 200, 512)
    held = QuantizedTensor.from_tensors(
        {n: t.clone() for n, t in first.tensors().items()}, first.shape, "nvfp4"
    )
    x = torch.randn(tokens, 512, device="cuda").bfloat16()
    w4a16_matmul(x, held, backend="cuda")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = w4a16_matmul(x, held, backend="cuda")
    for weight in (first, second, first):
        for name, tensor in held.tensors().items():
            tensor.copy_(weight.tensors()[name])
        graph.replay()
        assert torch.equal(out, w4a16_matmul(x, weight, backend="cuda"))
