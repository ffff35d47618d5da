"""The table of measured quantizers, and what reads it."""

import json

import pytest
import torch
from kernel_cases import awkward

from lowbitrl.formats import get_format
from lowbitrl.kernels import quantizer_choice, residual_cuda
from lowbitrl.kernels.quantizer_choice import best_first, preferred, table
from lowbitrl.kernels.residual import residual_backend, table_name


@pytest.mark.parametrize("row", table(), ids=lambda r: f"{r['op']} {r['rows']}x{r['width']}")
def test_each_row_names_the_faster(row):
    took = {name: row[name] for name in ("cuda", "triton") if row[name] is not None}
    assert row["backend"] == min(took, key=took.get)
    assert preferred(row["op"], row["rows"], row["width"]) == row["backend"]


def forget():
    """What has been read of the table."""
    table.cache_clear()
    preferred.cache_clear()


def test_nearest_shape_decides_and_what_nobody_measured_is_triton(tmp_path, monkeypatch):
    file = tmp_path / "table.json"
    rows = [
        {"op": "residual token", "rows": 64, "width": 2048, "backend": "cuda"},
        {"op": "residual token", "rows": 64, "width": 8192, "backend": "triton"},
    ]
    file.write_text(json.dumps({"gpu": "none", "rows": rows}))
    monkeypatch.setattr(quantizer_choice, "TABLE", file)
    forget()
    try:
        assert preferred("residual token", 100, 2048) == "cuda"
        assert preferred("residual token", 64, 5000) == "triton"
        assert preferred("residual token", 0, 2048) == "cuda"
        assert preferred("residual long", 4096, 2048) == "triton"
    finally:
        forget()


def test_ops_are_named_by_the_kernels_that_run():
    most = residual_cuda.DECODE_TOKENS
    assert table_name(most, 64, 0.5, "batch") == "residual batch"
    assert table_name(most + 1, 64, 0.5, "batch") == "residual long"
    assert table_name(most + 1, 64, 0.5, "token") == "residual token"
    assert table_name(most + 1, 64, 1.0, "batch") == "residual all"


def test_first_comes_first_and_none_is_lost():
    candidates = {"cuda": "no nvcc", "triton": None, "reference": None}
    assert list(best_first("triton", candidates)) == ["triton", "cuda", "reference"]
    assert best_first("triton", candidates) == candidates


def test_without_a_gpu_the_reference_runs():
    x = awkward(4, 64)
    if not torch.cuda.is_available():
        assert residual_backend(x, 0.5, format=get_format("nvfp4-token")) == "reference"
