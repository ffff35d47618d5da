"""Held-out scores served unquantized: the trained weights' own, not the start's and not the rollout's."""

import pytest
import torch

from lowbitrl import held_out
from lowbitrl.config import ConfigError
from lowbitrl.loop import train
from lowbitrl.models import load_model
from lowbitrl.runs import read_metrics
from tests import tiny_run

QUIET = {"say": lambda line: None}


def test_a_run_scores_its_weights_unquantized_at_the_start_and_the_end(tmp_path):
    sections = {"trainer": {"steps": 2}, "evaluation": {"every": 1, "unquantized": True}}
    records = read_metrics(train(tiny_run.config(tmp_path, **sections), **QUIET))
    scored = [r["step"] for r in records if "eval_unquantized/pass@1" in r]
    assert [r["step"] for r in records if "eval/pass@1" in r] == [-1, 0, 1]
    assert scored == [-1, 1]


def test_in_a_bf16_run_both_scores_are_one(tmp_path):
    sections = {
        "trainer": {"steps": 2},
        "recipe": {"rollout": "bf16", "learner": "bf16", "residual": 0.0},
        "evaluation": {"every": 1, "unquantized": True},
    }
    for record in read_metrics(train(tiny_run.config(tmp_path, **sections), **QUIET)):
        if "eval_unquantized/pass@1" in record:
            plain = {k.split("/", 1)[1]: v for k, v in record.items() if k.startswith("eval_unquantized/")}
            assert plain == {k.split("/", 1)[1]: v for k, v in record.items() if k.startswith("eval/")}


def test_it_is_the_learners_weights_that_are_scored(tmp_path, monkeypatch):
    config = tiny_run.config(tmp_path)
    learner, tokenizer = load_model(config.model.name, config.model.dtype, torch.device("cpu"))
    with torch.no_grad():
        learner.model.norm.weight.mul_(3)
    seen = {}
    monkeypatch.setattr(held_out, "score", lambda _, engine, *rest: seen.update(engine.model.state_dict()))
    held_out.score_unquantized(config, learner, None, tokenizer)
    for name, weight in learner.state_dict().items():
        torch.testing.assert_close(seen[name], weight, rtol=0, atol=0)


def test_without_held_out_scores_there_is_nothing_to_add_to(tmp_path):
    with pytest.raises(ConfigError, match=r"unquantized=true adds to held-out scores, and every=0"):
        tiny_run.config(tmp_path, evaluation={"every": 0, "unquantized": True})
