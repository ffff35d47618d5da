"""QUADS eq. 20-24 against a transcription that loops over tokens and channels."""

import pytest
import torch

from lowbitrl.formats import get_format
from lowbitrl.quant.residual import channel_count, channel_scores, compensate, select_channels

FP4 = get_format("nvfp4-token")


def by_hand(x, fraction, real):
    exact = x.float()
    first = FP4.quantize(exact).dequantize(torch.float32)
    error = first - exact
    second = FP4.quantize(error).dequantize(torch.float32)
    scores = [sum(float(error[t, j]) ** 2 for t in range(len(x)) if real[t]) for j in range(x.shape[1])]
    chosen = sorted(range(x.shape[1]), key=lambda j: -scores[j])[: round(fraction * x.shape[1])]
    out = first.clone()
    out[:, chosen] -= second[:, chosen]
    return out.to(x.dtype)


@pytest.mark.parametrize("fraction", [0.125, 0.5, 1.0])
def test_matches_the_equations(fraction):
    x = torch.randn(6, 64).bfloat16()
    real = torch.tensor([True, True, False, True, True, False])
    assert torch.equal(compensate(x, FP4, fraction, "batch", real), by_hand(x, fraction, real))


def test_no_residual_is_the_plain_quantizer():
    x = torch.randn(5, 32).bfloat16()
    assert torch.equal(compensate(x, FP4, 0.0), FP4.fake_quantize(x))


def test_more_channels_leave_less_error():
    x = torch.randn(64, 128)
    errors = [float((compensate(x, FP4, f) - x).norm()) for f in (0, 0.125, 0.25, 0.5, 0.75, 1)]
    assert errors == sorted(errors, reverse=True)
    assert errors[-1] < 0.2 * errors[0]


def test_padding_never_moves_the_channels():
    x = torch.randn(4, 64)
    padded = torch.cat([x, torch.full((3, 64), 1e6) * torch.randn(3, 64), torch.full((1, 64), torch.nan)])
    real = torch.tensor([True] * 4 + [False] * 4)
    assert torch.equal(compensate(padded, FP4, 0.25, "batch", real)[:4], compensate(x, FP4, 0.25))
    assert not torch.equal(compensate(padded[:7], FP4, 0.25)[:4], compensate(x, FP4, 0.25))


def test_token_scope_does_not_depend_on_the_batch_and_batch_scope_does():
    x = torch.randn(8, 64)
    alone = torch.cat([compensate(row[None], FP4, 0.25, "token") for row in x])
    assert torch.equal(compensate(x, FP4, 0.25, "token"), alone)
    assert not torch.equal(compensate(x, FP4, 0.25, "batch"), alone)


def test_scores_are_column_norms_over_real_tokens():
    error = torch.tensor([[3.0, 1.0], [4.0, 0.0], [9.0, 9.0]])
    assert torch.equal(channel_scores(error, None), torch.tensor([106.0, 82.0]).sqrt())
    assert torch.equal(channel_scores(error, torch.tensor([True, True, False])), torch.tensor([5.0, 1.0]))


def test_ties_go_to_the_lower_channel():
    assert select_channels(torch.tensor([2.0, 5.0, 2.0, 2.0]), 2).tolist() == [True, True, False, False]


def test_nan_is_more_than_any_score_and_ties_with_itself():
    scores = torch.tensor([1.0, float("nan"), 2.0, -float("nan"), float("inf")])
    assert select_channels(scores, 1).tolist() == [False, True, False, False, False]
    assert select_channels(scores, 3).tolist() == [False, True, False, True, True]


@pytest.mark.parametrize("shape", [(16,), (40, 16), (3, 5, 64)])
def test_selection_is_that_of_a_stable_descending_sort(shape):
    torch.manual_seed(0)
    # Few distinct values, so most thresholds are tied.
    scores = torch.randint(0, 5, shape).float()
    for count in (1, 3, shape[-1] // 2, shape[-1]):
        order = scores.argsort(dim=-1, descending=True, stable=True)[..., :count]
        expected = torch.zeros(shape, dtype=torch.bool).scatter_(-1, order, True)
        assert torch.equal(select_channels(scores, count), expected)


@pytest.mark.parametrize(
    ("width", "fraction", "count"), [(576, 0.5, 288), (10, 0.3, 3), (16, 0.01, 1), (16, 1.0, 16)]
)
def test_channel_counts(width, fraction, count):
    assert channel_count(width, fraction) == count


def test_no_real_token_gives_finite_values():
    x = torch.randn(3, 32)
    assert torch.isfinite(compensate(x, FP4, 0.5, "batch", torch.zeros(3, dtype=torch.bool))).all()
