"""TensorBoard and Weights & Biases get what metrics.jsonl gets; a backend that is not there is said early."""

import importlib.util

import pytest

from lowbitrl import tracking
from lowbitrl.config import ConfigError
from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from tests.tiny_run import config

quiet = lambda line: None  # noqa: E731
needs = lambda name: pytest.mark.skipif(  # noqa: E731
    importlib.util.find_spec(name) is None, reason=f"{name} is not installed"
)


def events(folder, name):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    accumulated = EventAccumulator(str(folder / "tensorboard"))
    accumulated.Reload()
    return {e.step: e.value for e in accumulated.Scalars(name)}


@needs("tensorboard")
def test_tensorboard_holds_the_same_numbers_and_no_step_twice_after_a_resume(tmp_path):
    sections = {"tracking": {"tensorboard": True}, "checkpoint": {"every": 2}}
    folder = train(config(tmp_path, **sections), say=quiet)
    lines = read_metrics(folder)
    logged = {r["step"] + 1: pytest.approx(r["reward/mean"], rel=1e-6) for r in lines if "reward/mean" in r}
    assert events(folder, "reward/mean") == logged
    assert events(folder, "eval/pass@1").keys() == {0, 2, 4}
    for file in (folder / "checkpoints" / "step-000004").iterdir():
        file.unlink()
    (folder / "checkpoints" / "step-000004").rmdir()
    train(config(tmp_path, **sections), resume=True, say=quiet)
    assert events(folder, "reward/mean") == logged


@needs("wandb")
def test_wandb_runs_offline_and_closes(tmp_path, monkeypatch):
    monkeypatch.setenv("WANDB_SILENT", "true")
    folder = train(
        config(tmp_path, tracking={"wandb": True, "project": "tiny"}, trainer={"steps": 2}), say=quiet
    )
    files = list((folder / "wandb").glob("offline-run-*/run-*.wandb"))
    assert len(files) == 1
    assert (folder / "wandb-id").read_text() in files[0].name
    assert b"reward/mean" in files[0].read_bytes()


def test_a_backend_that_is_not_installed_is_refused_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(tracking.importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="tensorboard is not installed: pip install tensorboard"):
        config(tmp_path, tracking={"tensorboard": True})


def test_nothing_is_opened_unless_asked(tmp_path):
    with tracking.trackers(tracking.TrackingConfig(), tmp_path, 0, {}) as opened:
        assert opened == []
    assert list(tmp_path.iterdir()) == []


def test_every_listener_hears_every_record(tmp_path):
    heard = []

    class Recording:
        def __enter__(self):
            return [heard.append]

        def __exit__(self, *error):
            heard.append("closed")

    from lowbitrl import loop

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loop, "trackers", lambda *arguments: Recording())
        folder = train(config(tmp_path), say=quiet)
    assert heard == [*read_metrics(folder), "closed"]
