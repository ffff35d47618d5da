"""Low-bit products: every backend against the reference, on CUDA where there is one, else through the interpreter."""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file

from lowbitrl.formats import QuantizedTensor, get_format
from lowbitrl.formats.packing import unswizzle_128x4
from lowbitrl.kernels import (
    grouped_w8a8_matmul,
    w4a4,
    w4a4_matmul,
    w4a8_matmul,
    w4a16_matmul,
    w8a8_matmul,
    why_unavailable,
)
from lowbitrl.kernels.grouped_w4a16 import align_experts, grouped_w4a16_matmul
from lowbitrl.kernels.w4a4 import block_values, native_operands
from lowbitrl.kernels.weights4 import describe, factors

pytest.importorskip("triton")
pytestmark = [
    pytest.mark.usefixtures("poisoned"),
    pytest.mark.filterwarnings("ignore::RuntimeWarning"),  # numpy, under the interpreter, on overflow
]

WEIGHTS = ["nvfp4", "int4-g128", "int4-g64", "int4-g32", "int4-g16"]
ORACLE = Path(__file__).parents[1] / "oracle"
SHAPES = [(1, 24, 128), (5, 70, 256), (17, 33, 640), (0, 16, 128), (1, 16, 16), (3, 8, 32)]
FINEST, SUBNORMAL = 2.0**-24, 2.0**-133
# Columns an FP8 tensor core sums at a time, and bits it keeps below the leading one of the largest addend.
FP8_STEP, FP8_BITS = 32, 13


def backends(device, *names):
    return [name for name in names if why_unavailable(name, device) is None]


def runs(op, backend, *args, **kwargs):
    """The op's result, or None where this backend has a reason not to take this call."""
    try:
        return op(*args, backend=backend, **kwargs)
    except ValueError as refusal:
        if "can't run here" not in str(refusal):
            raise
        return None


def fp8_slack(a, b):
    """Most that FP8 tensor cores may lose of sums of fp64 (M, K) by (N, K), per output.

    sm90 sums 32 products and what it holds at a time, aligned to the largest of these addends and cut 13 bits below
    its leading one: each addend loses less than 2^-13 of the largest.
    """
    held, lost = torch.zeros(len(a), len(b), dtype=torch.float64, device=a.device), 0.0
    for start in range(0, a.shape[1], FP8_STEP):
        products = a[:, None, start : start + FP8_STEP] * b[None, :, start : start + FP8_STEP]
        largest = torch.maximum(products.abs().amax(-1), held.abs() + lost)
        lost = lost + (FP8_STEP + 1) * 2.0**-FP8_BITS * largest
        held += products.sum(-1)
    return lost


def within_bound(got, terms_a, terms_b, scale, bias=None, lost=0.0):
    """|got - exact| <= one BF16 rounding of the exact value + K roundings in fp32 of sums of |terms| + lost.

    terms: fp64 (M, K) and (N, K), the very values whose products are summed. scale: (M, N) or scalar. lost: of sums.
    """
    exact = (terms_a @ terms_b.T) * scale + (0 if bias is None else bias)
    magnitude = (terms_a.abs() @ terms_b.abs().T) * abs(scale) + (0 if bias is None else bias.abs())
    slack = 2.0**-8 * exact.abs() + 2 * (terms_a.shape[1] + 2) * FINEST * magnitude + SUBNORMAL + lost
    worst = ((got.double() - exact).abs() - slack).amax() if got.numel() else torch.tensor(-1.0)
    assert worst <= 0, f"{float(worst)} beyond the bound"


@pytest.mark.parametrize("name", WEIGHTS)
@pytest.mark.parametrize(("m", "n", "k"), SHAPES)
def test_w4a16(name, m, n, k, device):
    if k % (get_format(name).group or 1):
        pytest.skip(f"{name} has no groups in K = {k}")
    x, bias = torch.randn(m, k, device=device).bfloat16(), torch.randn(n, device=device).bfloat16()
    token_scale = torch.rand(m, device=device)
    weight = get_format(name).quantize(torch.randn(n, k, device=device).bfloat16() * 0.02)
    values, scale = factors(weight)
    for backend in ("auto", "reference", *backends(device, "triton", "cuda")):
        got = runs(w4a16_matmul, backend, x, weight, bias=bias, token_scale=token_scale)
        if got is not None:
            alpha = scale.double() * token_scale.double()[:, None]
            within_bound(got, x.double(), values.double(), alpha, bias.double())


def test_w4a16_extremes_and_strides(device):
    wide = torch.randn(6, 768, device=device).bfloat16()
    wide[0], wide[1], wide[2] = 0.0, 3e38, 1e-38
    weight = get_format("nvfp4").quantize(torch.randn(40, 256, device=device) * 1e-3)
    values, scale = factors(weight)
    for backend in ("reference", *backends(device, "triton", "cuda")):
        for x in (wide[:, 256:512], wide[:, 3:259], wide.view(2, 3, 768)[..., :256]):
            got = w4a16_matmul(x, weight, backend=backend)
            flat = x.reshape(-1, 256)
            rows = [0, 2, 3, 4, 5]
            within_bound(got.view(6, 40)[rows], flat[rows].double(), values.double(), scale.double())


def test_operands_that_are_not_contiguous(device):
    weight = get_format("nvfp4").quantize(torch.randn(32, 128, device=device))
    sparse = {n: torch.stack([t, t], 1)[:, 0] for n, t in weight.tensors().items() if t.dim() == 2}
    views = QuantizedTensor(sparse["qdata"], sparse["scale"], weight.global_scale, weight.shape, "nvfp4")
    x = torch.randn(4, 128, device=device).bfloat16()
    one_for_all = torch.full((1,), 0.5, device=device)
    for backend in ("reference", *backends(device, "triton", "cuda")):
        wanted = w4a16_matmul(x, weight, token_scale=one_for_all.repeat(4), backend=backend)
        got = w4a16_matmul(x, views, token_scale=one_for_all.expand(4), backend=backend)
        assert torch.equal(got, wanted)


def test_ops_trace(device):
    """Schema and fake of the custom ops agree with what they do."""
    weight = get_format("nvfp4").quantize(torch.randn(32, 64, device=device))
    x = torch.randn(4, 64, device=device).bfloat16()
    w = describe(weight)
    # opcheck compares arguments before and after, which torch cannot do in float8.
    args = (x, w.codes, w.scale.view(torch.uint8), w.global_scale, None, None, w.group, w.nvfp4, "triton")
    checks = ("test_schema", "test_faketensor")
    torch.library.opcheck(torch.ops.lowbitrl.w4a16_matmul.default, args, test_utils=checks)
    codes = get_format("int8-token").quantize(x).qdata
    ones = torch.ones(4, device=device)
    torch.library.opcheck(
        torch.ops.lowbitrl.w8a8_matmul.default,
        (codes, codes, ones, ones, None, "int8", "triton"),
        test_utils=checks,
    )
    ids = torch.randint(0, 8, (12,), dtype=torch.int32, device=device)
    torch.library.opcheck(torch.ops.lowbitrl.align_experts.default, (ids, 8, 16, False), test_utils=checks)


def test_refusals_name_the_remedy(device):
    weight = get_format("nvfp4").quantize(torch.randn(16, 64, device=device))
    with pytest.raises(ValueError, match="takes bfloat16"):
        w4a16_matmul(torch.randn(2, 64, device=device), weight)
    with pytest.raises(ValueError, match="K=32"):
        w4a16_matmul(torch.randn(2, 32, device=device).bfloat16(), weight)
    with pytest.raises(ValueError, match="neither NVFP4 nor INT4"):
        w4a16_matmul(
            torch.randn(2, 64, device=device).bfloat16(),
            get_format("mxfp4").quantize(torch.randn(16, 64, device=device)),
        )


@pytest.mark.parametrize("backend", ["reference", "triton", "cuda"])
@pytest.mark.parametrize("tokens", [0, 1, 13])
def test_grouped(tokens, backend, device):
    if why_unavailable(backend, device):
        pytest.skip(why_unavailable(backend, device))
    experts, choices, n, k = 6, 2, 40, 64
    stack = torch.randn(experts, n, k, device=device).bfloat16()
    weight = get_format("nvfp4").quantize(stack, amax=stack.float().abs().amax((1, 2), keepdim=True))
    ids = torch.rand(tokens, experts, device=device).topk(choices, -1).indices
    bias = torch.randn(experts, n, device=device).bfloat16()
    blocks = align_experts(ids, weight, backend=backend)
    for rows in (tokens, tokens * choices):
        x, token_scale = torch.randn(rows, k, device=device).bfloat16(), torch.rand(rows, device=device)
        got = grouped_w4a16_matmul(x, weight, blocks, bias=bias, token_scale=token_scale)
        for s in range(tokens * choices):
            source, expert = s * rows // (tokens * choices), int(ids.reshape(-1)[s])
            values, scale = factors(weight)
            alpha = scale[expert].double() * token_scale[source].double()
            row = x[source][None].double()
            within_bound(got[s][None], row, values[expert].double(), alpha, bias[expert].double())


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_grouped_w8a8_is_each_experts_product(kind, device):
    experts, tokens, choices = 5, 11, 2
    weight = get_format(f"{kind}-channel").quantize(torch.randn(experts, 40, 64, device=device))
    ids = torch.stack([torch.randperm(experts)[:choices] for _ in range(tokens)]).to(device)
    bias = torch.randn(experts, 40, device=device).bfloat16()
    for rows in (tokens, tokens * choices):
        x = get_format(f"{kind}-token").quantize(torch.randn(rows, 64, device=device))
        loses = kind == "fp8" and device == "cuda"
        for backend in ("reference", *backends(device, "triton")):
            got = grouped_w8a8_matmul(x, weight, align_experts(ids, weight, backend=backend), bias=bias)
            for s in range(tokens * choices):
                source, e = s * rows // (tokens * choices), int(ids.reshape(-1)[s])
                row, values = x.dequantize()[source][None].double(), weight.dequantize()[e].double()
                lost = fp8_slack(row, values) if loses else 0.0
                within_bound(got[s][None], row, values, 1.0, bias[e].double(), lost)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
@pytest.mark.parametrize(("m", "n", "k"), [(1, 16, 64), (33, 48, 96), (5, 37, 40), (0, 16, 32)])
def test_w8a8(kind, m, n, k, device):
    x = get_format(f"{kind}-token").quantize(torch.randn(m, k, device=device))
    weight = get_format(f"{kind}-channel").quantize(torch.randn(n, k, device=device))
    bias = torch.randn(n, device=device).bfloat16()
    wanted = w8a8_matmul(x, weight, bias=bias, backend="reference")
    a, b = x.dequantize().double(), weight.dequantize().double()
    within_bound(wanted, a, b, 1.0, bias.double())
    for backend in backends(device, "triton", "torch"):
        got = runs(w8a8_matmul, backend, x, weight, bias=bias)
        if got is not None and kind == "int8":
            assert torch.equal(got, wanted)
        elif got is not None:
            within_bound(got, a, b, 1.0, bias.double(), lost=fp8_slack(a, b) if device == "cuda" else 0.0)


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_w8a8_codes_that_are_not_contiguous(kind, device):
    x = get_format(f"{kind}-token").quantize(torch.randn(33, 96, device=device))
    weight = get_format(f"{kind}-channel").quantize(torch.randn(48, 96, device=device))
    weight.qdata.view(torch.int8)[:, 0] = 126 if kind == "fp8" else -128  # the largest codes there are
    stack = QuantizedTensor(
        weight.qdata[None], weight.scale[None], None, torch.Size([1, 48, 96]), weight.format
    )
    ids = torch.zeros(33, 1, dtype=torch.int64, device=device)

    def apart(q):
        codes = torch.stack([q.qdata, q.qdata], 1)[:, 0]
        assert not codes.is_contiguous()
        return QuantizedTensor(codes, q.scale, None, q.shape, q.format)

    for backend in ("reference", *backends(device, "triton", "torch")):
        wanted = runs(w8a8_matmul, backend, x, weight)
        if wanted is not None:
            assert torch.equal(w8a8_matmul(apart(x), apart(weight), backend=backend), wanted)
    for backend in ("reference", *backends(device, "triton")):
        blocks = align_experts(ids, stack, backend=backend)
        wanted = grouped_w8a8_matmul(x, stack, blocks)
        assert torch.equal(grouped_w8a8_matmul(apart(x), stack, blocks), wanted)


def test_w8a8_takes_one_kind_with_a_scale_a_row(device):
    x, w = torch.randn(4, 256, device=device), torch.randn(128, 256, device=device)
    int8, fp8 = get_format("int8-token").quantize(x), get_format("fp8-channel").quantize(w)
    with pytest.raises(ValueError, match="one kind"):
        w8a8_matmul(int8, fp8)
    with pytest.raises(ValueError, match="a scale a row"):
        w8a8_matmul(get_format("fp8-token").quantize(x), get_format("fp8-block").quantize(w))


@pytest.mark.parametrize("name", ["nvfp4", "int4-g32"])
def test_w4a8_is_the_product_of_the_codes(name, device):
    x = get_format("fp8-token").quantize(torch.randn(5, 128, device=device))
    weight = get_format(name).quantize(torch.randn(30, 128, device=device))
    values, scale = factors(weight)
    for backend in ("reference", *backends(device, "triton", "cuda")):
        got = w4a8_matmul(x, weight, backend=backend)
        alpha = x.scale.double().view(-1, 1) * scale.double()
        within_bound(got, x.qdata.view(torch.float8_e4m3fn).double(), values.double(), alpha)
    with pytest.raises(ValueError, match="a scale a token"):
        w4a8_matmul(get_format("fp8-1x128").quantize(torch.randn(5, 256, device=device)), weight)


def nvfp4_pair(device, m=6, n=40, k=512):
    x, w = torch.randn(m, k, device=device), torch.randn(n, k, device=device) * 0.02
    x[:, ::97] *= 30
    return get_format("nvfp4-token").quantize(x), get_format("nvfp4").quantize(w)


def exact_w4a4(x, weight):
    """BF16 of fp32(exact sum) * fp32 scale: what every order of exact sums must give."""
    sums = factors(x)[0].double() @ factors(weight)[0].double().T
    assert torch.equal(sums.float().double(), sums), "the data must keep fp32 sums exact"
    return (sums.float() * (weight.global_scale * x.global_scale.view(-1))[:, None]).bfloat16()


def test_w4a4_is_exact_whatever_the_order_of_sums(device):
    x, weight = nvfp4_pair(device)
    wanted = exact_w4a4(x, weight)
    assert torch.equal(w4a4_matmul(x, weight), wanted)
    for backend in ("reference", *backends(device, "triton", "cuda")):
        got = w4a16_matmul(block_values(x), weight, token_scale=x.global_scale, backend=backend)
        assert torch.equal(got, wanted), backend


def test_w4a4_against_the_recorded_exact_product(device):
    """Codes, scales and fp64 sums of tests/oracle: bits of the sums, then one fp32 scale and one rounding."""
    record = {name: t.to(device) for name, t in load_file(ORACLE / "nvfp4_gemm_exact.safetensors").items()}
    one = torch.ones((), device=device)

    def operand(name, scale):
        bytes_ = record[f"{name}.packed"], record[f"{name}.scale"].view(torch.float8_e4m3fn), scale
        return QuantizedTensor(*bytes_, record[name].shape, "nvfp4")

    x, weight, sums = operand("x", one), operand("w", one), record["acc_fp64"]
    assert torch.equal(block_values(x).double() @ block_values(weight).double().T, sums)
    wanted = (sums.float() * record["alpha_fp32"]).bfloat16()
    scaled = operand("w", record["alpha_fp32"])
    for backend in ("reference", *backends(device, "triton", "cuda")):
        assert torch.equal(w4a16_matmul(block_values(x), scaled, backend=backend), wanted), backend


def test_w4a4_with_a_residual_is_near_the_reconstruction(device):
    x = torch.randn(6, 128, device=device)
    weight = get_format("nvfp4").quantize(torch.randn(32, 128, device=device))
    token = get_format("nvfp4-token")
    first = token.quantize(x)
    second = token.quantize(first.dequantize() - x)
    rebuilt = (first.dequantize() - second.dequantize()).bfloat16()
    one, two = w4a4_matmul(first, weight, residual=second), w4a16_matmul(rebuilt, weight, backend="reference")
    values = weight.dequantize().double()
    # One BF16 rounding of every reconstructed value, one of either result.
    slack = 2.0**-8 * (rebuilt.double().abs() @ values.abs().T) + 2.0**-7 * one.double().abs()
    assert ((one.double() - two.double()).abs() <= slack).all()


def test_native_operands_hold_the_same_product():
    """What sm100's tensor cores are given, read back from the swizzled layout by its published formula."""
    x, weight = nvfp4_pair("cpu", m=130, n=32, k=96)
    for q in (x, weight):
        codes, scales = native_operands(q)
        rows, groups = q.shape[0], q.shape[1] // 16
        r, c = torch.meshgrid(torch.arange(rows), torch.arange(groups), indexing="ij")
        at = ((r // 128) * (-(-groups // 4)) + c // 4) * 512 + (r % 32) * 16 + ((r // 32) % 4) * 4 + c % 4
        read = scales.view(torch.uint8)[at].view(torch.float8_e4m3fn)
        again = QuantizedTensor(codes.view(torch.uint8), read, torch.ones(()), q.shape, "nvfp4")
        assert torch.equal(again.dequantize(), factors(q)[0])


def tensor_cores_of_sm100(a, b, *, scale_a, scale_b, output_dtype, **layout):
    """torch's scaled_mm on NVFP4, emulated: what is asked of it, and fp32 of the exact sums of what it is given."""
    assert output_dtype == torch.float32
    for side in "ab":
        assert layout[f"scale_recipe_{side}"] == F.ScalingType.BlockWise1x16
        assert layout[f"swizzle_{side}"] == F.SwizzleType.SWIZZLE_32_4_4

    def values(codes, scales):
        rows, width = codes.shape[0], 2 * codes.shape[1]
        plain = unswizzle_128x4(scales, rows, width // 16)
        bytes_ = codes.view(torch.uint8), plain, torch.ones(())
        return QuantizedTensor(*bytes_, torch.Size([rows, width]), "nvfp4").dequantize().double()

    return (values(a, scale_a) @ values(b.T, scale_b).T).float()


@pytest.mark.parametrize("residual", [False, True])
@pytest.mark.parametrize("m", [1, 130])
def test_native_products_are_the_emulated_ones(m, residual, monkeypatch):
    """One product, or the residual's two over the whole K with codes of channels that were not chosen zero."""
    x, weight = nvfp4_pair("cpu", m=m, n=64, k=256)
    bias, second = torch.randn(64).bfloat16(), None
    if residual:
        left = x.dequantize() - torch.randn(m, 256)
        left[:, torch.randperm(256)[:128]] = 0
        second = get_format("nvfp4-token").quantize(left)
    wanted = w4a4_matmul(x, weight, residual=second, bias=bias, backend="emulated")
    monkeypatch.setattr(w4a4, "choose", lambda op, backend, *rest: backend)
    monkeypatch.setattr(F, "scaled_mm", tensor_cores_of_sm100)
    got = w4a4_matmul(x, weight, residual=second, bias=bias, backend="native")
    assert torch.equal(got, wanted)


def test_native_needs_its_hardware(device):
    x, weight = nvfp4_pair(device, n=32)
    if why_unavailable("native", device):
        with pytest.raises(ValueError, match="NVFP4 tensor cores"):
            w4a4_matmul(x, weight, backend="native")
    else:
        assert torch.equal(w4a4_matmul(x, weight, backend="native"), exact_w4a4(x, weight))
