"""What every format promises: shapes, errors, gradients, and fake_quantize == dequantize(quantize)."""

from __future__ import annotations

import pytest
import torch

from lowbitrl.formats import QuantizedTensor, get_format, known_formats

DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def width(fmt) -> int:
    return 2 * (fmt.group or 16)


def rows(name: str) -> int:
    """Rows a small tensor needs: the W4A8 kernel's tiles want 128."""
    return 128 if name.endswith(":w4a8") else 4


def leads(name: str) -> list[tuple[int, ...]]:
    """Leading dimensions from a vector to 4-D and empty, as far as the format takes them."""
    if name.endswith(":w4a8"):
        return [(128,), (2, 128), (0,)]
    vector = [] if name.startswith("fp8-block") else [()]
    return [*vector, (1,), (7,), (2, 3), (2, 1, 3), (0,)]


@pytest.mark.parametrize("name", known_formats())
@pytest.mark.parametrize("dtype", DTYPES)
def test_fake_quantize_is_decode_of_encode(name, dtype):
    fmt = get_format(name)
    k = width(fmt)
    for lead in leads(name):
        x = torch.randn(*lead, k).to(dtype)
        if len(lead) > 0 and lead[0] > 0:
            x[0] = 0
        assert torch.equal(fmt.fake_quantize(x), fmt.quantize(x).dequantize(dtype)), lead


@pytest.mark.parametrize("name", known_formats())
def test_gradient_passes_straight_through(name):
    fmt = get_format(name)
    x = torch.randn(rows(name), width(fmt), requires_grad=True)
    upstream = torch.randn(rows(name), width(fmt))
    fmt.fake_quantize(x).backward(upstream)
    assert x.grad is not None
    assert torch.equal(x.grad, upstream)


@pytest.mark.parametrize("name", known_formats())
@pytest.mark.parametrize("poison", [float("nan"), float("inf"), -float("inf")])
def test_nan_and_inf_are_refused_by_name(name, poison):
    fmt = get_format(name)
    x = torch.randn(rows(name), width(fmt))
    x[1, 3] = poison
    with pytest.raises(ValueError, match=r"model\.q_proj.*NaN or Inf"):
        fmt.quantize(x, name="model.q_proj")
    with pytest.raises(ValueError, match=r"model\.q_proj.*NaN or Inf"):
        fmt.fake_quantize(x, name="model.q_proj")


@pytest.mark.parametrize("name", known_formats())
def test_bytes_survive_a_round_trip(name):
    fmt = get_format(name)
    x = torch.randn(rows(name), width(fmt))
    q = fmt.quantize(x)
    assert q.qdata.dtype == torch.uint8
    assert q.shape == x.shape
    assert q.format == name
    again = QuantizedTensor.from_tensors(q.tensors(), q.shape, q.format).to("cpu")
    assert torch.equal(again.dequantize(), q.dequantize())
    assert q.nbytes == sum(t.numel() * t.element_size() for t in q.tensors().values())


@pytest.mark.parametrize("name", known_formats())
def test_a_static_amax_saturates(name):
    fmt = get_format(name)
    x = torch.linspace(-8, 8, rows(name) * width(fmt)).view(rows(name), -1)
    out = fmt.fake_quantize(x, amax=torch.tensor(1.0))
    assert out.isfinite().all()


def test_unknown_name_lists_neighbours():
    with pytest.raises(ValueError, match="nvfp4-token"):
        get_format("nvfp4-tokens")


@pytest.mark.parametrize("name", [n for n in known_formats() if get_format(n).group])
def test_odd_width_says_what_to_do(name):
    fmt = get_format(name)
    assert fmt.group
    with pytest.raises(
        ValueError, match=rf"in_features={fmt.group + 1} is not a multiple of {fmt.group}.*BF16"
    ):
        fmt.check_shape((4, fmt.group + 1))


def test_refuses_what_is_not_a_float_vector():
    with pytest.raises(ValueError, match="int64"):
        get_format("nvfp4").quantize(torch.arange(16))
    with pytest.raises(ValueError, match="0-dimensional"):
        get_format("fp8-token").quantize(torch.tensor(1.0))
