"""`train --restarts`: a run that is killed, or whose engine hangs, goes on by itself and ends as an undisturbed one."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time

import pytest

from lowbitrl import watch
from lowbitrl.loop import train
from lowbitrl.supervise import supervise
from lowbitrl.watch import HUNG, Watch
from tests.faults.killing import finish, hang, instead, lasting, lost_steps, start
from tests.tiny_run import config, toml

SECTIONS = {
    "trainer": {"steps": 3},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1},
    "rollout": {"timeout": 2.0},
}
ENVIRONMENT = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path), "OMP_NUM_THREADS": "1"}


def started(folder, out, options, **environment):
    """`lowbitrl train` of a tiny recipe with sabotage: the finished process."""
    objective = {"module": "tests.faults.sabotage"}
    recipe = folder / f"{out}.toml"
    recipe.write_text(
        toml(config(folder, out, **SECTIONS, objective=objective).model_dump(mode="json", exclude_none=True))
    )
    command = [sys.executable, "-m", "lowbitrl", "train", str(recipe), *options]
    marker = {"SABOTAGE_MARKER": str(folder / f"{out}.marker")}
    return subprocess.run(
        command, env=ENVIRONMENT | marker | environment, capture_output=True, text=True, timeout=100
    )


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    folder = tmp_path_factory.mktemp("restarts")
    # The module of the disturbed runs is a setting of theirs; their metrics are those of a run without it.
    return folder, lasting(train(config(folder, "whole", **SECTIONS), say=lambda line: None))


@pytest.mark.slow
def test_a_run_goes_on_by_itself(whole):
    folder, expected = whole
    # About 6 token steps a training step: 8 is in the second.
    done = started(folder, "again", ["--restarts", "2"], SABOTAGE_AT="8")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "the run hung; going on from its last checkpoint (1 more restarts)" in done.stdout
    assert "resumed from" in done.stdout
    assert lasting(folder / "again") == expected
    assert "error: sampling gave no sign of life for rollout.timeout = 2 s" in done.stderr
    assert "in _sample" in (folder / "again" / "hang-0.txt").read_text()


@pytest.mark.parametrize(
    "place", ["lowbitrl.rollout.embedded.batch:sample", "lowbitrl.assemble:EmbeddedEngine.update"]
)
def test_an_engine_in_the_process_that_hangs_ends_it_and_the_run_can_go_on(whole, place):
    folder, expected = whole
    out = place.rpartition(":")[2]
    sabotage = functools.partial(instead, place, 3, hang)
    assert finish(start(folder, out, SECTIONS, sabotage)) == HUNG
    assert lost_steps(folder / out) <= 1
    assert finish(start(folder, out, SECTIONS)) == 0
    assert lasting(folder / out) == expected


def script(tmp_path, *codes):
    """A command that ends with each of `codes` in turn, and writes down what it was called with."""
    file = tmp_path / "script.py"
    file.write_text(
        "import os, pathlib, signal, sys\n"
        # What runs in the background may have inherited that Ctrl-C is ignored.
        "signal.signal(signal.SIGINT, signal.SIG_DFL)\n"
        f"here, codes = pathlib.Path({str(tmp_path)!r}), {list(codes)!r}\n"
        "calls = here / 'calls'\n"
        "done = calls.read_text().splitlines() if calls.exists() else []\n"
        "calls.write_text('\\n'.join([*done, ' '.join(sys.argv[1:])]) + '\\n')\n"
        "code = codes[len(done)]\n"
        "if len(done) == 1: (here / 'config.json').touch()\n"
        "if code < 0: os.kill(os.getpid(), -code)\n"
        "os._exit(code)\n"
    )
    return [sys.executable, str(file), "go"]


@pytest.mark.parametrize(
    ("codes", "restarts", "code", "calls"),
    [
        ((0,), 3, 0, ["go"]),
        ((1,), 3, 1, ["go"]),
        ((2,), 3, 2, ["go"]),
        ((-signal.SIGTERM,), 3, 143, ["go"]),
        ((-signal.SIGINT,), 3, 130, ["go"]),
        ((-signal.SIGKILL, HUNG, -signal.SIGSEGV, 0), 3, 0, ["go", "go", "go --resume", "go --resume"]),
        ((-signal.SIGKILL, -signal.SIGKILL, 0), 1, 137, ["go", "go"]),
        ((HUNG, 1), 3, 1, ["go", "go"]),
    ],
)
def test_what_is_started_again_and_how(tmp_path, codes, restarts, code, calls):
    said = []
    assert supervise(script(tmp_path, *codes), tmp_path, restarts, said.append) == code
    assert (tmp_path / "calls").read_text().splitlines() == calls
    assert len(said) == len(calls) - 1


def test_a_request_to_end_reaches_the_run(tmp_path):
    run = (
        "import signal, sys, time\n"
        "signal.signal(signal.SIGTERM, lambda *_: sys.exit(7))\n"
        f"open({str(tmp_path / 'up')!r}, 'w').close()\n"
        "time.sleep(60)"
    )
    code = (
        "import sys; from pathlib import Path; from lowbitrl.supervise import supervise\n"
        f"sys.exit(supervise([sys.executable, '-c', {run!r}], Path({str(tmp_path)!r}), 3, print))"
    )
    process = subprocess.Popen([sys.executable, "-c", code], env=ENVIRONMENT)
    last = time.monotonic() + 20
    while not (tmp_path / "up").exists():
        assert time.monotonic() < last
        time.sleep(0.05)
    process.terminate()
    assert process.wait(20) == 7


def test_beats_keep_a_slow_call_alive_and_silence_ends_it(tmp_path):
    code = (
        "import sys, time; from pathlib import Path; from lowbitrl.watch import Watch, beat\n"
        "with Watch(0.4, Path(sys.argv[1])).over('a call'):\n"
        "    for _ in range(12): time.sleep(0.1); beat()\n"
        "    print('alive', flush=True)\n"
        "    time.sleep(30)"
    )
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hang.txt")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert (run.returncode, run.stdout) == (HUNG, "alive\n")
    assert "a call gave no sign of life for rollout.timeout = 0.4 s" in run.stderr
    assert "<string>" in (tmp_path / "hang.txt").read_text()


def test_a_hang_that_holds_the_interpreter_s_lock_ends_too(tmp_path):
    code = (
        "import ctypes, sys; from pathlib import Path; from lowbitrl.watch import Watch\n"
        "with Watch(0.4, Path(sys.argv[1])).over('a call'): ctypes.PyDLL(None).sleep(30)"
    )
    began = time.monotonic()
    run = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "hang.txt")],
        env=ENVIRONMENT,
        capture_output=True,
        text=True,
    )
    assert run.returncode == 1
    assert "Timeout (0:00:00.8" in run.stderr
    assert time.monotonic() - began < 15


def test_a_watch_leaves_nothing_behind(tmp_path):
    for seconds in (0, 0.3):
        with Watch(seconds, tmp_path / "hang.txt").over("a call"):
            watch.beat()
    time.sleep(0.8)
    assert not watch._watches
    assert not (tmp_path / "hang.txt").exists()
