"""Whole runs of a tiny mixture of experts: every alignment, every replay, every precision, resumed."""

import dataclasses
import json

import pytest
import torch

from lowbitrl.config import ConfigError
from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from tests import tiny_run
from tests.moe_models import tiny_moe

SHORT = {"steps": 3}


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    path = tmp_path_factory.mktemp("moe")
    tiny_run.checkpoint(path / "model")
    tiny_run.prompts(path / "prompts.jsonl")
    tiny_moe("qwen3_moe", mlp_only_layers=[0], num_hidden_layers=3).save_pretrained(path / "model")
    return path


def run(folder, out, **sections):
    sections = {"trainer": SHORT, "evaluation": {"every": 0}} | sections
    config = tiny_run.config(folder, out, **sections)
    said = []
    train(config, say=said.append)
    return read_metrics(folder / out), said


@pytest.mark.parametrize("learner", ["bf16", "weights", "full"])
def test_three_steps_with_every_alignment(folder, learner):
    recipe = {"rollout": "nvfp4", "learner": learner, "residual": 0.5}
    records, said = run(folder, f"align-{learner}", recipe=recipe)
    steps = [r for r in records if r["step"] >= 0]
    assert len(steps) == 3
    assert all(r["sync/sentinel"] < 5 for r in steps)
    assert steps[-1]["quant/changed_codes"] > 0
    assert any("modules quantized" in line for line in said)
    plan = json.loads((folder / f"align-{learner}" / "plan.json").read_text())
    stacks = [layer for layer in plan["layers"] if layer["layout"]]
    assert len(stacks) == 4
    assert all(layer["weight"] == "nvfp4" for layer in stacks)


@pytest.mark.parametrize("rollout", ["bf16", "fp8", "int8", "int4", "nvfp4-w4a16", "nvfp4-w16a4", "mxfp4"])
def test_a_step_with_every_kind_of_precision(folder, rollout):
    recipe = {"rollout": rollout, "learner": "full", "residual": 0.0}
    records, _ = run(folder, rollout, recipe=recipe, trainer={"steps": 1})
    assert records[-1]["mismatch/abs_mean"] < 1e-2


def test_weights_alignment_without_activation_error_is_the_rollout_itself(folder):
    """A weight-only rollout and its aligned learner differ by rounding alone, experts included."""
    recipe = {"rollout": "nvfp4-w4a16", "residual": 0.0}
    aligned, _ = run(folder, "aligned", recipe=recipe | {"learner": "weights"}, trainer={"steps": 1})
    naive, _ = run(folder, "naive", recipe=recipe | {"learner": "bf16"}, trainer={"steps": 1})
    assert aligned[-1]["mismatch/abs_mean"] < 0.2 * naive[-1]["mismatch/abs_mean"]


@pytest.mark.parametrize("replay", ["none", "R2", "R3"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_routes_travel_from_the_engine_to_the_learner(folder, replay, layout):
    trainer = SHORT | {"routing_replay": replay, "mini_batch": 8, "layout": layout}
    records, _ = run(
        folder,
        f"{replay}-{layout}",
        rollout={"record_routing": True, "keep_decoded_experts": True},
        trainer=trainer,
    )
    agreements = [r["routing/agreement"] for r in records if r["step"] >= 0]
    assert all(0.5 < a <= 1 for a in agreements)
    assert {k for k in records[-1] if k.startswith("routing/agreement_")} == {
        "routing/agreement_layer_1",
        "routing/agreement_layer_2",
    }
    rows = (folder / f"{replay}-{layout}" / "rollouts" / "step-000000.jsonl").read_text().splitlines()
    assert json.loads(rows[0])["token_ids"]


def test_r3_without_recorded_routes_is_refused_before_anything_runs(folder):
    with pytest.raises(ConfigError, match=r"set rollout\.record_routing=true"):
        run(folder, "refused", trainer={"routing_replay": "R3"})


def test_a_resumed_run_is_the_run_that_never_stopped(folder):
    checkpoints = {"every": 2, "keep": 5, "final": True}
    whole, _ = run(folder, "whole", trainer={"steps": 4}, checkpoint=checkpoints)
    config = tiny_run.config(
        folder, "stopped", trainer={"steps": 2}, checkpoint=checkpoints, evaluation={"every": 0}
    )
    train(config, say=lambda line: None)
    config = config.model_copy(update={"trainer": config.trainer.model_copy(update={"steps": 4})})
    train(config, resume=True, say=lambda line: None)
    resumed = read_metrics(folder / "stopped")
    deterministic = [k for k in whole[-1] if not k.startswith("timing/")]
    assert [{k: r[k] for k in deterministic} for r in resumed[-2:]] == [
        {k: r[k] for k in deterministic} for r in whole[-2:]
    ]


def test_the_sentinel_blames_the_stack_that_went_wrong(folder, monkeypatch):
    from lowbitrl.quant.experts import StackWeights
    from lowbitrl.sync.sentinel import SentinelError

    adopt, count = StackWeights.adopt, {}

    def spoiled(self, encoded):
        count[self.row.name] = count.get(self.row.name, 0) + 1
        if self.row.name.endswith("layers.2.mlp.experts.down_proj") and count[self.row.name] == 4:
            encoded = dataclasses.replace(encoded, global_scale=encoded.global_scale * 4)
        adopt(self, encoded)

    monkeypatch.setattr(StackWeights, "adopt", spoiled)
    recipe = {"rollout": "nvfp4-w4a16", "learner": "weights", "residual": 0.0}
    with pytest.raises(SentinelError, match=r"layers\.2\.mlp\.experts\.down_proj\.global_scale is served"):
        run(folder, "spoiled", recipe=recipe, sentinel={"slack": 0.02, "factor": 2.0}, trainer={"steps": 4})


def test_muon_steps_stacks(folder):
    records, _ = run(
        folder, "muon", optimizer={"name": "muon", "muon_learning_rate": 1e-3}, trainer={"steps": 1}
    )
    assert torch.isfinite(torch.tensor(records[-1]["actor/grad_norm"]))
