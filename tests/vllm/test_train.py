"""`lowbitrl train` with rollouts by a real vLLM, on a CPU."""

from __future__ import annotations

import json

import pytest

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.loop import train
from tests import tiny_run
from tests.vllm.tiny import dense

OPTIONS = {"max_model_len": 64, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26}


@pytest.mark.parametrize("engine", ["vllm", "vllm-server"])
def test_three_steps_learn_and_stay_aligned(tmp_path, engine):
    dense(tmp_path / "model")
    tiny_run.prompts(tmp_path / "prompts.jsonl")
    config = tiny_run.config(
        tmp_path,
        model={"dtype": "float32"},
        recipe={"rollout": "nvfp4-w4a16", "learner": "weights", "residual": 0.0},
        rollout={"engine": engine, "vllm": OPTIONS},
        trainer={"steps": 3},
        sentinel={"slack": 1e-3},
    )
    lines = []
    run = train(config, say=lines.append)
    assert any("vLLM wears plan" in line for line in lines)
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    steps = [row for row in rows if row["step"] >= 0]
    assert [row["sync/version"] for row in steps] == [1, 2, 3]
    assert all(row["mismatch/abs_mean"] < 2e-5 for row in steps)
    assert all(row["quant/changed_codes"] > 0 for row in steps)
