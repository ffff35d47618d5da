"""`lowbitrl diagnose --engine vllm`: the same tokens by every engine and the learner."""

from __future__ import annotations

import json

import pytest
import torch

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.diagnose.command import Request, run_diagnose
from lowbitrl.diagnose.run import DiagnoseConfig
from lowbitrl.quant import Recipe
from tests.vllm.tiny import dense


def test_an_exported_checkpoint_the_plugin_and_the_learner_agree(tmp_path):
    (tmp_path / "prompts.txt").write_text("w3 w9 w27\nw5 w25 w125 w17\n")
    request = Request(
        model=str(dense(tmp_path / "model")), out=tmp_path / "out", recipe=Recipe(rollout="int4"),
        prompts=tmp_path / "prompts.txt", engine="vllm", dtype="bfloat16",
    )  # fmt: skip
    said = []
    path = run_diagnose(request, DiagnoseConfig(tokens=60, max_tokens=12), torch.device("cpu"), said.append)
    rows = {row["scorer"]: row for row in json.loads(path.read_text())["rows"]}
    assert list(rows) == ["vllm sampling", "vllm prefill", "vllm stock", "embedded", "learner"]
    for name in ("vllm prefill", "embedded", "learner"):
        assert rows[name]["mean"] < 0.05
    # The same codes and scales, by kernels of its own.
    assert rows["vllm stock"]["mean"] < 0.01
