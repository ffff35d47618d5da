"""The table of choices: every row can run, and every shape finds one."""

import pytest

from lowbitrl.kernels.grouped_w4a16 import BLOCK_SIZES
from lowbitrl.kernels.w4a16_choice import (
    built,
    choice_for,
    prefers_cublas,
    rows_for,
    splits_that_fit,
    table,
    tokens_by_bytes,
)
from lowbitrl.kernels.w4a16_cuda import WITHOUT_GROUPS


def test_every_variant_of_the_table_is_built():
    for row in table():
        assert row.variant in built()
        assert row.backend in {"cuda", "cublas"}
        assert 1 <= row.splits <= 8


@pytest.mark.parametrize("nvfp4", [True, False])
@pytest.mark.parametrize("shape", [(12288, 4096), (576, 576), (64, 32), (150000, 2048)])
def test_every_shape_finds_a_row(nvfp4, shape):
    for tokens in (1, 8, 9, 64, 65, 10**6):
        row = choice_for(nvfp4, tokens, *shape)
        assert row.tokens >= tokens or row.tokens == max(r.tokens for r in table() if not r.grouped)
        splits = splits_that_fit(row, shape[1])
        assert splits == 1 or -(-shape[1] // 128) // splits >= row.variant.stages
    assert prefers_cublas(nvfp4, 10**6, *shape)
    for block in BLOCK_SIZES:
        assert choice_for(nvfp4, block, *shape, grouped=True).variant.tiles * 8 == block


def test_a_share_of_k_is_never_shorter_than_what_is_in_flight():
    row = max((r for r in table() if r.splits > 1), key=lambda r: r.splits)
    assert splits_that_fit(row, 128) == 1


def test_what_multiplies_in_groups_has_a_replacement_that_does_not():
    for row in table():
        if row.variant.grouped:
            other = WITHOUT_GROUPS[row.variant.tiles]
            assert other in built()
            assert not other.grouped
            assert other.tiles == row.variant.tiles or not row.grouped


def test_bytes_are_read_for_as_many_tokens_as_every_row_says():
    for n, k in ((12288, 4096), (2048, 2048), (576, 576)):
        most = tokens_by_bytes(True, n, k)
        assert all(row.beats_bf16 for row in rows_for(True, n, k) if row.tokens <= most)
        after = [row for row in rows_for(True, n, k) if row.tokens > most]
        assert not after or not after[0].beats_bf16
