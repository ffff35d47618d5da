"""Whole-model suites on a tiny model: every case has a row, work is what its row says, bytes are counted from bytes."""

import csv

import pytest
import torch

from lowbitrl.bench import ceilings, command, policy, record, rollout, step, sync, timing
from lowbitrl.quant import Recipe, prepare

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="sizes of a CPU")


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    for name in ("copy_bandwidth", "matmul_rate"):
        monkeypatch.setattr(ceilings, name, lambda device: 1e9)
    for suite in (rollout, step, sync):
        monkeypatch.setattr(suite, "SAMPLES", 1)


def rows(folder, suite):
    return list(csv.DictReader((folder / f"{suite}.csv").open()))


def test_rollout_has_a_row_a_format_and_scheduler(tmp_path, monkeypatch):
    monkeypatch.setattr(rollout, "FORMATS", {"bf16": Recipe(), "w4a16": Recipe(rollout="nvfp4-w4a16")})
    command.run_suite("rollout", tmp_path)
    written = {row["op"]: row for row in rows(tmp_path, "rollout")}
    assert set(written) == {f"generate {f} {s}" for f in ("bf16", "w4a16") for _, s in rollout.CASES["cpu"]}
    for row in written.values():
        rate = float(row["note"].split()[0])
        assert rate == pytest.approx(rollout.TINY.rows / float(row["p50"]) * 1e6, rel=0.01, abs=1)
        assert row["backend"] == "learner"
    assert int(written["generate w4a16 batch"]["bytes"]) < int(written["generate bf16 batch"]["bytes"])


def test_the_bytes_of_a_decoding_step_are_those_of_the_weights_as_published():
    model = policy.build("cpu")
    linears = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj"))
    whole = sum(p.numel() for p in model.parameters())
    prepare(model, Recipe(rollout="nvfp4-w4a16"), "rollout")
    scales = 4 * len(policy.encoded(model))
    cache = 2 * 2 * policy.TINY["num_hidden_layers"] * policy.TINY["hidden_size"] // 2
    expected = linears * 9 // 16 + scales + 2 * (whole - linears) + 3 * 5 * cache
    assert policy.decode_bytes(model, rows=3, columns=5) == expected


def test_equal_weights_at_every_build():
    first, second = (policy.build("cpu").state_dict() for _ in range(2))
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_step_times_every_phase_of_every_alignment(tmp_path):
    command.run_suite("step", tmp_path)
    ops = {row["op"]: float(row["p50"]) for row in rows(tmp_path, "step")}
    for name in step.ALIGNMENTS:
        assert ops[f"step {name}"] == pytest.approx(sum(ops[f"{p} {name}"] for p in step.PHASES), rel=1e-3)


def test_a_measured_step_trains_and_reaches_the_rollout():
    base, size = policy.build("cpu"), step.SIZES["cpu"]
    both = step.Policy(base, step.ALIGNMENTS["QUADS nvfp4 + residual 0.5"], size, "cpu")
    both.generate()
    assert {len(r) for r in both.batch.responses} == {size.response}
    assert len(both.batch) == size.rows
    both.update()
    both.publish()
    assert both.engine.version == both.done == 1
    trained = dict(both.trainer.model.named_parameters())
    assert any(not torch.equal(p, trained[n]) for n, p in base.named_parameters())


def test_sync_counts_what_each_part_must_move(tmp_path):
    command.run_suite("sync", tmp_path)
    found = {row["op"]: int(row["bytes"]) for row in rows(tmp_path, "sync")}
    model = policy.build("cpu")
    linears = sum(m.weight.numel() for n, m in model.named_modules() if n.endswith("_proj"))
    rest = 2 * (sum(p.numel() for p in model.parameters()) - linears)
    codes = found["encode nvfp4"] - 2 * linears
    assert 0 <= codes - linears * 9 // 16 <= 64 * 4  # global scales
    assert found["checksum nvfp4"] == codes + rest
    assert found["publish nvfp4"] == 2 * linears + rest + codes + rest
    assert found["apply nvfp4"] == 2 * (codes + rest) + 2 * linears
    assert found["transport nvfp4"] == 2 * found["checksum nvfp4"]


def test_wall_time_covers_the_call_and_leaves_warm_ups_out(monkeypatch):
    ticks = iter([0.0, 5.0, 5.0, 7.0, 7.0, 10.0])
    monkeypatch.setattr(timing.time, "perf_counter", lambda: next(ticks))
    calls = []
    measured = timing.time_whole(lambda: calls.append(1), samples=3, warm_ups=2)
    assert len(calls) == 5
    assert (measured.p50, measured.samples) == (3e6, 3)


def test_rollout_speeds_are_held_to_bf16_and_graphs_to_eager_batches():
    bench = record.Bench("rollout", "a command", device="cuda", commit="abc")
    load, took = rollout.MANY, {"bf16": 20.0, "fp8": 10.0}
    for scheduler in ("graph", "batch", "continuous"):
        for name in took:
            rollout._finding(bench, name, scheduler, load, took, {"bf16": 5.0, "fp8": 20.0})
    found = {finding.what: (finding.figure, finding.met) for finding in bench.findings}
    assert found == {
        "rollout 1B fp8, graph, 128 rows: tokens/s over BF16": (2.0, True),
        "rollout 1B bf16, 128 rows: graph over batch, tokens/s": (4.0, True),
        "rollout 1B fp8, 128 rows: graph over batch, tokens/s": (0.5, False),
    }
