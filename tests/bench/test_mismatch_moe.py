"""The script behind results/mismatch-moe-smollm2 on a tiny model: every part has its rows, the report reads them."""

import json
import runpy
import sys
from pathlib import Path

import pytest

from tests.conftest import tiny_llama
from tests.tiny_run import tokenizer

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = {
    "experts": 4,
    "tune-steps": 2,
    "tune-tokens": 200,
    "tokens": 30,
    "prompts": 1,
    "samples": 1,
    "max-tokens": 4,
    "micro-batch-tokens": 2048,
    "block-rows": 4,
    "device": "cpu",
}


def run(script, monkeypatch, *arguments):
    monkeypatch.setattr(sys, "argv", [script, *map(str, arguments)])
    runpy.run_path(str(BENCHMARKS / script), run_name="__main__")


@pytest.mark.slow
def test_every_part_is_measured_and_reported(tmp_path, monkeypatch):
    tiny_llama(max_position_embeddings=1024).save_pretrained(tmp_path / "model")
    tokenizer().save_pretrained(tmp_path / "model")
    options = SMALL | {"model": tmp_path / "model", "out": tmp_path / "0"}
    run("mismatch_moe.py", monkeypatch, *(f"--{name}={value}" for name, value in options.items()))
    results = json.loads((tmp_path / "0" / "results.json").read_text())
    table = {name: cells["weights"]["mean"] for name, cells in results["table"].items()}
    assert len(table) == 24
    assert table["every site 1 per batch"] < 0.5 * table["w4a4"]
    assert table["w4a16"] < 0.1 * table["w4a4"]
    assert {"full"} == set(results["table"]["w13 0.5 per token"]) - set(results["table"]["w13 0.5 per batch"])
    assert all(len(blocks) == 2 for blocks in results["blocks"].values())
    assert len(results["routing"]) == 5
    assert set(results["routing"]) < set(results["table"])
    run("mismatch_moe_report.py", monkeypatch, tmp_path / "0", "--out", tmp_path / "report")
    written = {path.name for path in (tmp_path / "report").iterdir()}
    assert written == {"results.json", "tables.md", "blocks.png", "fractions.png"}
    assert "| every site 0.5 per token |" in (tmp_path / "report" / "tables.md").read_text()
