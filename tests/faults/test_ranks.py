"""kill -9 of one of several processes that train together: the others end by themselves, and the run can go on."""

from __future__ import annotations

import random
import shutil
import time

import pytest

from tests.faults.killing import LONGEST, finish, lasting, lost_steps, start_ranks
from tests.tiny_run import config

SECTIONS = {
    "recipe": {"rollout": "nvfp4-w4a16", "residual": 0.0},
    "trainer": {"steps": 4},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1},
}
SIZE = 2


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory):
    """A folder with a model, the metrics of a run that nothing happened to, and how long it took."""
    folder = tmp_path_factory.mktemp("ranks")
    config(folder)
    began = time.monotonic()
    assert [finish(process) for process in start_ranks(folder, "whole", SECTIONS, SIZE)] == [0] * SIZE
    return folder, lasting(folder / "whole"), min(time.monotonic() - began, LONGEST)


def until_joined(lock, began, victim):
    """Wait until the ranks are a group, which is what open run folders: those that wait for one that never
    came are ended by torchrun, which is not here."""
    while victim.is_alive() and not (lock.exists() and lock.stat().st_mtime >= began):
        time.sleep(0.01)


@pytest.mark.parametrize("kills", [2, pytest.param(20, marks=pytest.mark.slow)])
def test_a_rank_killed_at_random_moments(undisturbed, kills):
    folder, whole, seconds = undisturbed
    moments = random.Random(kills)
    fell = []
    while len(fell) < kills:
        shutil.rmtree(folder / "part", ignore_errors=True)
        while len(fell) < kills:
            began = time.time()
            ranks = start_ranks(folder, "part", SECTIONS, SIZE)
            victim = ranks.pop(moments.randrange(SIZE))
            until_joined(folder / "part" / "run.lock", began, victim)
            victim.join(moments.uniform(0, 1) * seconds)
            if not victim.is_alive():
                assert [finish(process) for process in [victim, *ranks]] == [0] * SIZE
                break
            victim.kill()
            victim.join()
            for other in ranks:
                # 0 where it had done its last message.
                assert finish(other) is not None
            fell.append(lost_steps(folder / "part"))
        assert [finish(process) for process in start_ranks(folder, "part", SECTIONS, SIZE)] == [0] * SIZE
        assert lasting(folder / "part") == whole
    assert max(fell) <= 1
