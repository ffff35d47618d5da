"""Rollouts from a vLLM beside each rank (a stand-in for it): a version arrives whole, a lost server comes back."""

import json

import pytest

from lowbitrl.distributed import ranks
from lowbitrl.runs import read_metrics
from tests import tiny_run
from tests.distributed import work
from tests.distributed.processes import run_ranks
from tests.faults.test_served_engine import FAKE

SECTIONS = {
    # Its tokens depend on the bytes it was given, so a version that differs from one process's would show.
    "recipe": {"rollout": "nvfp4-w4a16", "residual": 0.0},
    "rollout": {"engine": "vllm-server", "timeout": 2.0, "prompts": 5},
    "sentinel": {"sequences": 0},
    "trainer": {"steps": 2},
    "evaluation": {"every": 0},
}


def lasting(folder):
    return [{k: v for k, v in line.items() if not k.startswith("timing/")} for line in read_metrics(folder)]


def test_a_server_beside_each_rank(tmp_path):
    """The first step is one process's; a server lost on the second rank changes nothing but the count."""
    made = [tiny_run.config(tmp_path, name, **SECTIONS) for name in ("one", "two", "lost")]
    for name in ("one", "two", "lost"):
        (tmp_path / name).mkdir()
    run_ranks(0, tmp_path / "r1", work.served, made[0], FAKE, tmp_path / "one")
    ((_, first), (_, second)) = run_ranks(2, tmp_path / "r2", work.served, made[1], FAKE, tmp_path / "two")
    assert (first, second) == (1, 1)
    orders = [["exit", "complete", 4], ["hang", "update", 4]]
    (tmp_path / "lost" / "orders-1.json").write_text(json.dumps(orders))
    ((said, first), (_, second)) = run_ranks(
        2, tmp_path / "r3", work.served, made[2], FAKE, tmp_path / "lost"
    )
    assert (first, second) == (1, 3)
    assert sum("engine restarted, its version given to it again" in line for line in said) == 2
    one, two, lost = (lasting(tmp_path / name) for name in ("one", "two", "lost"))
    sampled = [k for k in one[1] if k.startswith(("reward/", "rollout/", "mismatch/"))]
    assert {k: two[1][k] for k in sampled} == {k: one[1][k] for k in sampled}
    assert two[-1]["quant/changed_codes"] > 0
    assert sum(line.pop("faults/engine_restarts", 0) for line in lost) == 2
    assert lost == [{k: v for k, v in line.items() if k != "faults/engine_restarts"} for line in two]


@pytest.mark.parametrize(
    ("named", "rank", "visible", "share"),
    [
        ("4,5,6,7", 0, None, "4,5"),
        ("4,5,6,7", 1, None, "6,7"),
        (None, 1, None, "1"),
        (None, 1, "6,3", "3"),
    ],
)
def test_gpus_of_a_ranks_server(monkeypatch, named, rank, visible, share):
    monkeypatch.setattr(ranks, "joined", lambda: True)
    monkeypatch.setattr(ranks.torch.cuda, "is_available", lambda: True)
    for name, value in (("LOCAL_RANK", rank), ("LOCAL_WORLD_SIZE", 2)):
        monkeypatch.setenv(name, str(value))
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)
    assert ranks.local_gpus(named) == share


def test_gpus_that_cannot_be_shared_out(monkeypatch):
    assert ranks.local_gpus("0,1,2") == "0,1,2"
    assert ranks.local_gpus(None) is None
    monkeypatch.setattr(ranks, "joined", lambda: True)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    with pytest.raises(ValueError, match="names 3 GPUs for the servers of 2 processes"):
        ranks.local_gpus("0,1,2")
