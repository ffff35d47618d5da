"""Benchmarks write what they measured, and claim only what the numbers say."""

import csv
import json

import pytest
import torch

from lowbitrl.bench import ceilings, command, products
from lowbitrl.bench.record import Bench, current_commit
from lowbitrl.bench.timing import Timing, cold_sets, time_calls


@pytest.fixture(autouse=True)
def _known_ceilings(monkeypatch):
    """A device of 1 GB/s and 1 Gop/s."""
    for name in ("copy_bandwidth", "matmul_rate"):
        monkeypatch.setattr(ceilings, name, lambda device: 1e9)


def test_a_row_holds_limit_ratio_and_provenance(tmp_path):
    bench = Bench("kernels", "lowbitrl bench kernels", device="cpu", commit="abc")
    row = bench.keep(
        "op", "(2, 3)", Timing(9.0, 10.0, 12.0, 30, "cold"), nbytes=5000, flops=2000, backend="triton"
    )
    assert (row.limit, row.ratio) == (5.0, 0.5)
    assert bench.keep("op", "x", Timing(1, 1, 1, 1, "warm"), nbytes=1, flops=7000, backend="b").limit == 7.0
    bench.save(tmp_path)
    written = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert written[0]["p20"] == "9.0"
    assert written[0]["l2"] == "cold"
    assert written[0]["commit"] == "abc"
    assert written[0]["torch"] == torch.__version__


def test_met_follows_from_the_numbers(tmp_path):
    bench = Bench("kernels", "c", device="cpu")
    assert bench.find("fast", 0.71, at_least=0.7, unit="of copy bandwidth").met
    assert not bench.find("slow", 0.69, at_least=0.7).met
    assert bench.find("short", 15.0, at_most=15, unit="us").met
    assert not bench.find("long", 15.1, at_most=15).met
    bench.save(tmp_path)
    lines = json.loads((tmp_path / "summary.json").read_text())
    assert lines[0] == {
        "what": "fast", "figure": 0.71, "goal": "at least 0.7 of copy bandwidth", "met": True, "command": "c",
    }  # fmt: skip


def test_findings_of_other_suites_stay(tmp_path):
    for suite, figure in (("kernels", 1.0), ("sync", 2.0), ("kernels", 3.0)):
        bench = Bench(suite, "c", device="cpu")
        bench.find(suite, figure, at_least=0)
        bench.save(tmp_path)
    lines = json.loads((tmp_path / "summary.json").read_text())
    assert [(line["what"], line["figure"]) for line in lines] == [("kernels", 3.0), ("sync", 2.0)]


def test_rows_of_other_ops_stay(tmp_path):
    for op, nbytes in (("a", 1), ("b", 2), ("a", 3)):
        bench = Bench("kernels", "c", device="cpu")
        bench.keep(op, "x", Timing(1, 1, 1, 1, "warm"), nbytes=nbytes, backend="b")
        bench.save(tmp_path)
    lines = list(csv.DictReader((tmp_path / "kernels.csv").open()))
    assert [(line["op"], line["bytes"]) for line in lines] == [("b", "2"), ("a", "3")]


def test_percentiles_are_of_the_calls():
    clock = iter(range(100))
    timing = time_calls([lambda: next(clock)], l2="warm", samples=5)
    assert timing.samples == 5
    assert 0 < timing.p20 <= timing.p50 <= timing.p80


@pytest.mark.skipif(torch.cuda.is_available(), reason="CPU timing")
def test_one_set_of_buffers_without_cuda():
    assert cold_sets(1) == 1


def test_unknown_suites_and_modules_are_named(tmp_path):
    with pytest.raises(ValueError, match=r"unknown suite 'kernel'; known: kernels"):
        command.run_suite("kernel", tmp_path)
    with pytest.raises(ValueError, match="no benchmark 'x'"):
        command.run_suite("kernels", tmp_path, ["x"])


def test_the_commit_can_be_told(monkeypatch):
    monkeypatch.setenv("LOWBITRL_COMMIT", "told")
    assert current_commit() == "told"


def test_products_are_judged_by_the_rows_there_are():
    """Ours against cuBLAS, against the faster of two peers or the only one, by token count."""
    bench = Bench("kernels", "c", device="cpu")

    def took(op, backend, **micros):
        for m, us in micros.items():
            shape = products.shape(int(m[1:]))
            bench.keep(op, shape, Timing(us, us, us, 1, "cold"), nbytes=1, backend=backend)

    plain = {f"m{m}": 30.0 for m, _ in products.GOALS}
    took("bf16", "cublas", **plain)
    for name in products.FORMATS:
        took(f"w4a16 {name}", "auto", **(plain | {"m1": 10.0, "m64": 20.0}))
    took("w4a16 nvfp4", "marlin", m1=12.0, m64=25.0)
    took("w4a16 nvfp4", "humming", m1=9.0, m64=26.0)
    took("w4a16 int4-g128", "marlin", m1=8.0)
    took("w4a4 nvfp4 + residual 0.5", "auto", m64=21.0)
    for name in products.FORMATS:
        products.judge(bench, name)
    found = {f.what.replace(" K=4096 N=12288", ""): (f.figure, f.met) for f in bench.findings}
    assert found["W4A16 nvfp4, 1 tokens, speed over cuBLAS BF16"] == (3.0, True)
    assert found["W4A16 nvfp4, 64 tokens, speed over cuBLAS BF16"] == (1.5, False)
    assert found["W4A16 nvfp4, 1 tokens, time over the best peer's"] == (1.1111, False)
    assert found["W4A16 nvfp4, 64 tokens, time over the best peer's"] == (0.8, True)
    assert found["W4A16 int4-g128, 1 tokens, time over marlin's"] == (1.25, False)
    assert found["emulated W4A4 + residual 0.5 nvfp4, 64 tokens, time over W4A16"] == (1.05, True)
