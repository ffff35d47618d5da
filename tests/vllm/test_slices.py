"""Shards and fused matrices cut from bytes: what is served is what the whole decodes to there. Needs no vLLM."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from lowbitrl.formats import get_format
from lowbitrl.quant.groups import encode_group
from lowbitrl.quant.stacks import encode_stack
from lowbitrl.rollout.vllm.slices import column_span, cut_columns, cut_rows, join_rows, one_look, row_spans

FORMATS = ["nvfp4", "fp8-channel", "int8-channel", "int4-g128", "int4-g32", "mxfp4", "mxfp8", "fp8-block"]


def weight(*shape):
    return torch.randn(*shape).bfloat16()


@pytest.mark.parametrize("name", [*FORMATS, "int4-g128:w4a8", "fp8-tensor"])
def test_shards_decode_to_the_parts_of_the_whole(name):
    q = get_format(name).quantize(weight(256, 512))
    whole = q.dequantize()
    for rank in range(2):
        rows, columns = (rank * 128, (rank + 1) * 128), (rank * 256, (rank + 1) * 256)
        assert torch.equal(cut_rows(q, rows, "w").dequantize(), whole[slice(*rows)])
        assert torch.equal(cut_columns(q, columns, "w").dequantize(), whole[:, slice(*columns)])


@pytest.mark.parametrize("name", FORMATS)
def test_a_fused_matrix_decodes_to_its_members(name):
    members = encode_group({n: weight(128 * (i + 1), 128) for i, n in enumerate("qkv")}, get_format(name))
    joined = join_rows(list(members.values()), list(members))
    assert torch.equal(joined.dequantize(), torch.cat([m.dequantize() for m in members.values()]))


def test_a_stack_is_cut_like_its_matrices():
    q = encode_stack(weight(4, 64, 128), get_format("nvfp4"), "experts")
    half = join_rows([cut_rows(q, (0, 16), "w"), cut_rows(q, (32, 48), "w")], ["gate", "up"])
    assert torch.equal(half.dequantize(), torch.cat([q.dequantize()[:, :16], q.dequantize()[:, 32:48]], 1))
    assert torch.equal(cut_columns(q, (64, 128), "w").dequantize(), q.dequantize()[..., 64:])


def test_what_would_need_other_bytes_is_refused_with_its_name():
    q = get_format("nvfp4").quantize(weight(64, 64))
    with pytest.raises(ValueError, match=r"o_proj.*multiple of 16"):
        cut_columns(q, (0, 24), "o_proj")
    with pytest.raises(ValueError, match=r"o_proj.*cuts through blocks of 16"):
        cut_columns(q, (8, 40), "o_proj")
    with pytest.raises(ValueError, match=r"down.*cuts through blocks of 128"):
        cut_rows(get_format("fp8-block").quantize(weight(256, 128)), (0, 64), "down")
    other = get_format("nvfp4").quantize(3 * weight(64, 64))
    with pytest.raises(ValueError, match=r"k_proj and q_proj.*global_scale differs"):
        join_rows([q, other], ["q_proj", "k_proj"])
    with pytest.raises(ValueError, match="k_proj and q_proj are served as one matrix"), one_look():
        join_rows([q, q, other], ["q_proj", "v_proj", "k_proj"])
    tiled = [get_format("fp8-block").quantize(weight(n, 128)) for n in (192, 64)]
    with pytest.raises(ValueError, match=r"q_proj has 192 rows"):
        join_rows(tiled, ["q_proj", "k_proj"])


@pytest.mark.parametrize(
    ("size", "rank", "expected"),
    [
        (1, 0, [(0, 64), (0, 32), (0, 32)]),
        (2, 1, [(32, 64), (16, 32), (16, 32)]),
        # More ranks than key/value heads: pairs of ranks hold the same ones.
        (4, 3, [(48, 64), (16, 32), (16, 32)]),
    ],
)
def test_a_rank_holds_its_heads(size, rank, expected):
    heads, kv = 4 // size, max(1, 2 // size)
    layer = SimpleNamespace(
        tp_rank=rank, tp_size=size, num_heads=heads, num_kv_heads=kv, head_size=16,
        num_kv_head_replicas=max(1, size // 2), gather_output=False,
    )  # fmt: skip
    assert row_spans(layer) == expected


def test_a_rank_holds_its_rows_or_columns():
    merged = SimpleNamespace(tp_rank=1, tp_size=2, output_sizes=[96, 96], gather_output=False)
    assert row_spans(merged) == [(48, 96), (48, 96)]
    row = SimpleNamespace(tp_rank=1, tp_size=2, output_size=64, input_is_parallel=True)
    assert row_spans(row) == [(0, 64)]
    assert column_span(row, 48) == (48, 96)
    replicated = SimpleNamespace(tp_rank=1, tp_size=2, output_size=8)
    assert row_spans(replicated) == [(0, 8)]
    assert column_span(replicated, 64) == (0, 64)


def test_two_ranks_together_multiply_as_one():
    """Row-parallel partial sums, and column-parallel outputs side by side, are the unsharded product."""
    q, x = get_format("nvfp4").quantize(weight(64, 128)), torch.randn(5, 128, dtype=torch.float64)
    whole = x @ q.dequantize().double().T
    halves = [cut_columns(q, span, "w").dequantize().double() for span in ((0, 64), (64, 128))]
    assert torch.allclose(x[:, :64] @ halves[0].T + x[:, 64:] @ halves[1].T, whole)
    rows = [cut_rows(q, span, "w").dequantize().double() for span in ((0, 32), (32, 64))]
    assert torch.allclose(torch.cat([x @ r.T for r in rows], -1), whole)
