"""kill -9 at any moment loses at most its step; resumed, the run ends with the same metrics, to the bit."""

from __future__ import annotations

import functools
import random
import shutil
import signal
import time

import pytest

from lowbitrl.runs import RunFolder
from tests.faults.killing import LONGEST, finish, instead, kill_myself, lasting, lost_steps, start

SECTIONS = {
    "trainer": {"steps": 6},
    "evaluation": {"every": 2},
    "checkpoint": {"every": 1},
    "optimizer": {"name": "muon", "warmup_steps": 3},
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with a model, the metrics of a run that nothing happened to, and how long it took."""
    from tests.tiny_run import config

    folder = tmp_path_factory.mktemp("kill")
    config(folder)
    finish(start(folder, "warm", SECTIONS))
    began = time.monotonic()
    assert finish(start(folder, "whole", SECTIONS)) == 0
    return folder, lasting(folder / "whole"), min(time.monotonic() - began, LONGEST)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(undisturbed, kills):
    folder, whole, seconds = undisturbed
    moments = random.Random(kills)
    fell = []
    while len(fell) < kills:
        shutil.rmtree(folder / "part", ignore_errors=True)
        while len(fell) < kills:
            run = start(folder, "part", SECTIONS)
            run.join(moments.uniform(0, seconds))
            if not run.is_alive():
                break
            run.kill()
            run.join()
            fell.append(lost_steps(folder / "part"))
        assert finish(start(folder, "part", SECTIONS)) == 0
        assert lasting(folder / "part") == whole
    assert max(fell) <= 1


def half_a_line(self, record):
    with self.metrics_file.open("a") as file:
        file.write('{"step": 3, "reward')
    kill_myself()


def in_log():
    """Killed in the middle of writing the metrics of step 3."""
    real = RunFolder.log
    RunFolder.log = lambda self, record: (half_a_line if record["step"] == 3 else real)(self, record)


MOMENTS = {
    "sampling": functools.partial(instead, "lowbitrl.collect:sample", 3, kill_myself),
    "learning": functools.partial(instead, "lowbitrl.trainer:Trainer.update", 3, kill_myself),
    "publishing": functools.partial(
        instead, "lowbitrl.rollout.embedded:EmbeddedEngine.update", 4, kill_myself
    ),
    "evaluating": functools.partial(instead, "lowbitrl.held_out:score", 2, kill_myself),
    "logging": in_log,
    "first-rename": functools.partial(instead, "os:replace", 0, kill_myself),
    "second-rename": functools.partial(instead, "os:replace", 1, kill_myself),
    "later-rename": functools.partial(instead, "os:replace", 6, kill_myself),
    "first-flush": functools.partial(instead, "os:fsync", 0, kill_myself),
    "later-flush": functools.partial(instead, "os:fsync", 12, kill_myself),
    "deleting": functools.partial(instead, "shutil:rmtree", 5, kill_myself),
}


@pytest.mark.parametrize("moment", MOMENTS)
def test_killed_at_a_chosen_moment(undisturbed, moment):
    folder, whole, _ = undisturbed
    shutil.rmtree(folder / "part", ignore_errors=True)
    assert finish(start(folder, "part", SECTIONS, MOMENTS[moment])) == -signal.SIGKILL
    assert lost_steps(folder / "part") <= 1
    assert finish(start(folder, "part", SECTIONS)) == 0
    assert lasting(folder / "part") == whole
