"""A reward that hangs, raises, allocates, writes or dies costs its own completion its reward, and nothing else."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from lowbitrl.evaluation import evaluate
from lowbitrl.loop import train
from lowbitrl.rollout import Completion
from lowbitrl.runs import read_metrics
from lowbitrl.tasks import Failure, RewardError, RewardsConfig, TaskConfig, make_task
from lowbitrl.tasks.limits import KINDS, Limits
from lowbitrl.tasks.pool import RewardPool
from tests import tiny_run
from tests.tiny_run import config

LIMITS = Limits(timeout=1.5, cpu_seconds=1, memory_mb=200, file_mb=1, files=16)
PROMPT = {"id": "p/7", "answer": "12"}
HERE = "tests.faults.bad_rewards"
quiet = lambda line: None  # noqa: E731


@pytest.fixture(scope="module")
def pool():
    made = RewardPool(f"{HERE}:obey", LIMITS, ("", PROMPT), workers=2)
    yield made
    made.close()


ACTS = {
    "sleeps": ("while True: time.sleep(1)", "timeout", r"took more than rewards\.timeout = 1\.5 s"),
    "is-stopped": ("os.kill(os.getpid(), 19)", "timeout", "took more than"),
    "burns-in-threads": (
        "import hashlib, threading\n"
        "burn = lambda: [hashlib.md5(bytes(10**7)) for _ in range(10**4)]\n"
        "for _ in range(2): threading.Thread(target=burn).start()\n"
        "time.sleep(9)",
        "cpu|timeout",
        "used more than rewards.cpu_seconds = 1|took more than",
    ),
    "allocates-at-once": ("bytearray(10**11)", "memory", "raised MemoryError"),
    "allocates-bit-by-bit": ("kept = []\nwhile True: kept.append(bytearray(1 << 20))", "memory", "raised MemoryError"),
    "raises": ("1 / 0", "error", r"raised ZeroDivisionError: division by zero \(completion '!1 / 0'\)"),
    "exits": ("raise SystemExit(3)", "error", "raised SystemExit: 3"),
    "recurses": ("f = lambda: f()\nf()", "error", "raised .*Error"),
    "ends-its-process": ("os._exit(3)", "crash", "its process ended with code 3"),
    "segfaults": ("import ctypes; ctypes.string_at(0)", "crash", "ended by SIGSEGV"),
    "is-killed": ("os.kill(os.getpid(), 9)", "crash", "ended by SIGKILL"),
    "writes-a-big-file": ("open('x', 'wb').write(bytes(5 << 20))", "files", "File too large"),
    "writes-many-files": ("[open(f'x{i}', 'w').close() for i in range(40)]", "files", "left 40 files, rewards"),
    "writes-much": (
        "[open(f'x{i}', 'wb').write(bytes(900_000)) for i in range(3)]",
        "files",
        "left 2700000 bytes in files, rewards.file_mb is 1",
    ),
    "opens-many-files": ("KEPT.append([open(os.devnull) for _ in range(40)])", "files", "Too many open files"),
    "closes-everything": ("os.closerange(3, 64)", "crash", "its process"),
    "answers-for-others": (
        "import stat\n[os.write(i, b'[0, 9]\\n[') for i in range(3, 9) if stat.S_ISSOCK(os.fstat(i).st_mode)]",
        "crash",
        "",
    ),
}  # fmt: skip


@pytest.mark.parametrize("act", ACTS)
def test_what_a_reward_does_stays_with_its_completion(pool, act):
    code, kind, message = ACTS[act]
    work = [("ab", PROMPT)] * 50 + [("!" + code, PROMPT)] + [("abc", PROMPT)] * 50
    outcomes = pool.score(work)
    failed = outcomes.pop(50)
    assert outcomes == [2.0] * 50 + [3.0] * 50
    assert isinstance(failed, Failure)
    assert failed.kind in kind.split("|")
    assert failed.kind in KINDS
    assert "reward 'tests.faults.bad_rewards:obey' on prompt 'p/7'" in failed.message

    assert re.search(message, failed.message), failed.message


def test_many_at_once(pool):
    """Failures of every kind among a thousand: each is its own."""
    quick = [name for name, (_, kind, _) in ACTS.items() if kind in ("error", "crash", "memory", "files")]
    work, expected = [], []
    for i in range(1000):
        bad = i % 97 == 5
        name = quick[i % len(quick)]
        work.append(("!" + ACTS[name][0] if bad else "x" * (i % 13), PROMPT))
        expected.append(ACTS[name][1] if bad else float(i % 13))
    outcomes = pool.score(work)
    assert [o.kind if isinstance(o, Failure) else o for o in outcomes] == expected


def test_it_keeps_up_with_thousands_of_rewards(pool):
    work = [("y" * 400, {"id": str(i), "prompt": "x" * 300}) for i in range(4000)]
    began = time.monotonic()
    assert pool.score(work) == [400.0] * 4000
    assert time.monotonic() - began < 4  # 0.1 s on an idle machine


def test_a_process_that_fills_up_is_no_fault_of_the_last_completion():
    pool = RewardPool(f"{HERE}:leaky", LIMITS, ("", PROMPT), workers=1)
    assert pool.score([("x", PROMPT)] * 12) == [1.0] * 12
    pool.close()


def test_each_completion_finds_an_empty_folder(tmp_path, monkeypatch):
    before = set(os.listdir())
    pool = RewardPool(f"{HERE}:writes", LIMITS, ("", PROMPT), workers=2)
    assert pool.score([("text", PROMPT)] * 80) == [0.0] * 80
    scratch = Path(pool._scratch.name)
    assert not [name for worker in scratch.iterdir() for name in worker.iterdir()]
    pool.close()
    assert set(os.listdir()) == before
    assert not scratch.exists()


def alive(pid):
    try:
        # A zombie is dead: what follows its name in parentheses is its state.
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def gone(pids, seconds=10):
    last = time.monotonic() + seconds
    while any(map(alive, pids)) and time.monotonic() < last:
        time.sleep(0.05)
    return not any(map(alive, pids))


@pytest.mark.parametrize("which", [0, 1], ids=["worker", "template"])
def test_processes_that_are_killed_are_replaced(tmp_path, which):
    prompt = PROMPT | {"file": str(tmp_path / "pids")}
    pool = RewardPool(f"{HERE}:tells_its_parents", LIMITS, ("", prompt), workers=2)
    assert pool.score([("x", prompt)] * 40) == [1.0] * 40
    pids = {int(line.split()[which]) for line in (tmp_path / "pids").read_text().splitlines()}
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    assert pool.score([("x", prompt)] * 40) == [1.0] * 40
    pool.close()
    everyone = {int(pid) for line in (tmp_path / "pids").read_text().splitlines() for pid in line.split()}
    assert gone(everyone)


def test_none_outlives_a_run_that_is_killed(tmp_path):
    prompt = PROMPT | {"file": str(tmp_path / "pids")}
    code = (
        "from lowbitrl.tasks.pool import RewardPool; from lowbitrl.tasks.limits import Limits\n"
        f"p = {prompt!r}\n"
        "limits = Limits(timeout=60, cpu_seconds=60, memory_mb=0, file_mb=1, files=9)\n"
        f"pool = RewardPool('{HERE}:tells_its_parents', limits, ('', p), 2)\n"
        "pool.score([('hang', p)] * 2)"
    )
    run = subprocess.Popen(
        [sys.executable, "-c", code], env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    )
    last = time.monotonic() + 20
    while not (tmp_path / "pids").exists() or (tmp_path / "pids").read_text().count("\n") < 2:
        assert time.monotonic() < last
        time.sleep(0.05)
    run.kill()
    run.wait()
    pids = {int(pid) for line in (tmp_path / "pids").read_text().splitlines() for pid in line.split()}
    assert len(pids) == 3
    assert gone(pids)


def contained(tmp_path, function, **options):
    rewards = {"timeout": 0.3} | options
    task = {"reward": f"{HERE}:{function}"}
    return config(tmp_path, task=task, rewards=rewards, trainer={"steps": 2}, evaluation={"every": 0})


def test_hanging_rewards_count_as_zero_and_the_run_says_so_once(tmp_path):
    said = []
    folder = train(contained(tmp_path, "hangs_on_even"), say=said.append)
    for line in read_metrics(folder)[1:]:
        assert line["faults/reward_timeout"] > 0
        assert line["faults/dropped"] == 0
        assert line["reward/mean"] > 0
        assert "actor/loss" in line
    named = "faults/reward_timeout: reward 'tests.faults.bad_rewards:hangs_on_even' on"
    assert sum(named in line for line in said) == 1


def test_dropped_ones_leave_their_groups(tmp_path):
    folder = train(contained(tmp_path, "hangs_on_even", on_failure="drop"), say=quiet)
    for line in read_metrics(folder)[1:]:
        assert line["faults/dropped"] == line["faults/reward_timeout"] > 0
        assert line["rollout/batch_filled"] == 1 - line["faults/dropped"] / 16


def test_a_run_may_be_told_to_stop(tmp_path):
    with pytest.raises(RuntimeError, match=r"took more than .*; rewards\.on_failure is 'raise'") as stopped:
        train(contained(tmp_path, "hangs_on_even", on_failure="raise"), say=quiet)
    assert any("no checkpoint was written before it" in note for note in stopped.value.__notes__)


@pytest.mark.parametrize("rule", ["zero", "drop"])
def test_a_step_without_a_single_reward_stops_the_run(tmp_path, rule):
    with pytest.raises(RuntimeError, match=r"raised ValueError.*; every reward of the step failed"):
        train(contained(tmp_path, "none_but_nothing", on_failure=rule), say=quiet)


def test_an_evaluation_counts_them_as_wrong(tmp_path):
    run = contained(tmp_path, "raises_on_even")
    task, words = make_task(run.task, run.rewards), tiny_run.tokenizer()
    replies = [
        Completion(p, j, (5,) * (1 + j), (-1.0,) * (1 + j), "stop", 0) for p in range(2) for j in range(2)
    ]

    class Replies:
        def generate(self, *arguments, **options):
            return replies

    result = evaluate(Replies(), task, words, count=2, n=2, sampling=None)
    assert (result.failed, result.avg_at_n, result.metrics()["eval/failed"]) == (2, 0.5, 2.0)
    task.close()


@pytest.mark.parametrize("contain", ["auto", "none"])
def test_a_reward_that_cannot_score_nothing_is_refused_at_the_start(tmp_path, contain):
    run = contained(tmp_path, "shy", contain=contain)
    with pytest.raises(
        RewardError, match=r"bad_rewards:shy' on prompt .* raised IndexError.*the empty one included"
    ):
        make_task(run.task, run.rewards)


def test_contained_and_here_give_the_same_rewards(tmp_path):
    run = config(tmp_path)
    pairs = [(prompt, "w3 w4 " * i) for i, prompt in enumerate(make_task(run.task).prompts("train", 0, 20))]
    both = []
    for contain in ("auto", "none"):
        task = make_task(run.task, RewardsConfig(contain=contain))
        both.append(task.score_all(pairs))
        task.close()
    assert both[0] == both[1]


def test_a_scorer_that_evaluates_what_it_is_given_is_contained():
    """reasoning-gym's countdown evaluates the answer: this one would take longer than the universe has."""
    task = make_task(TaskConfig(name="countdown"), RewardsConfig(timeout=2, cpu_seconds=1))
    prompt = task.prompts("train", 0, 1)[0]
    hung, wrong = task.score_all([(prompt, "9**9**9**9"), (prompt, "no idea")])
    assert next(failure.kind for failure in hung.failures) in ("timeout", "cpu")
    assert "reasoning-gym" not in hung.scores
    assert wrong.scores["reasoning-gym"] < 1
    task.close()


def test_scorers_that_compare_stay_here():
    task = make_task(TaskConfig(name="chain_sum"))
    assert not task._judges["reasoning-gym"].contained
    assert (
        make_task(TaskConfig(name="chain_sum"), RewardsConfig(contain="all"))
        ._judges["reasoning-gym"]
        .contained
    )
