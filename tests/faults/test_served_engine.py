"""A served engine that hangs, dies or falls ill is restarted with its version; completions are those it owed."""

from __future__ import annotations

import contextlib
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest
import torch

from lowbitrl.loop import train
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.vllm import server as module
from lowbitrl.rollout.vllm.process import Server, flags, free_port, is_healthy
from lowbitrl.rollout.vllm.server import EngineLostError, VllmServerEngine
from lowbitrl.sync.manifest import Manifest
from tests.faults.killing import lasting
from tests.faults.test_rewards import gone
from tests.tiny_run import config

FAKE = Path(__file__).with_name("fake_vllm.py")
PLAN = SimpleNamespace(digest="0f3a")
PROMPTS = [[5, 6], [7], [8, 9, 10]]
SAMPLING = Sampling(max_tokens=8)


def version(number):
    tensors = {"a.weight": torch.full((4, 4), float(number)), "b.weight": torch.arange(6.0) * number}
    return tensors, Manifest.of(number, PLAN.digest, tensors)


@pytest.fixture
def fake(tmp_path):
    """Starts servers; `fake.orders(...)` makes the next ones misbehave."""
    file = tmp_path / "orders.json"
    servers = []

    def start(digest=PLAN.digest):
        command = [sys.executable, "-S", str(FAKE), digest, str(file)]
        servers.append(Server(lambda port: [*command, "--port", str(port)], seconds=20))
        return servers[-1]

    orders = lambda *orders: file.write_text(json.dumps(orders))  # noqa: E731
    yield SimpleNamespace(start=start, servers=servers, orders=orders)
    for server in servers:
        server.close()


def engine_of(server, **options):
    engine = VllmServerEngine(server, PLAN, (2,), **({"seconds": 0.8, "bucket_bytes": 64} | options))
    for number in (0, 1):
        tensors, manifest = version(number)
        engine.update(tensors.items(), manifest)
    return engine


@pytest.fixture
def owed(fake):
    """What a server that nothing happens to answers."""
    return engine_of(fake.start()).generate(PROMPTS, 4, SAMPLING, [1, 2, 3])


@pytest.mark.parametrize("what", ["hang", "exit"])
@pytest.mark.parametrize("at", [1, 7])
def test_a_completion_that_never_comes(fake, owed, what, at):
    engine = engine_of(fake.start())
    fake.orders([what, "complete", at])
    assert engine.generate(PROMPTS, 4, SAMPLING, [1, 2, 3]) == owed
    assert engine.server.starts == 2
    assert len(engine.losses) == 1
    assert engine.version == 1


def test_an_engine_that_calls_itself_dead_is_not_waited_for(fake, owed, monkeypatch):
    monkeypatch.setattr(module, "HEALTH_EVERY", 0.1)
    engine = engine_of(fake.start(), seconds=60)
    fake.orders(["sick", "complete", 3])
    assert engine.generate(PROMPTS, 4, SAMPLING, [1, 2, 3]) == owed
    assert "/health failed 3 times in a row" in engine.losses[0]


@pytest.mark.parametrize("what", ["hang", "exit"])
def test_lost_in_the_middle_of_an_update(fake, what):
    engine = engine_of(fake.start())
    tensors, manifest = version(2)
    healthy = engine_of(fake.start())
    healthy.update(tensors.items(), manifest)
    fake.orders([what, "update", 0])
    engine.update(iter(tensors.items()), manifest)
    assert (engine.version, engine.server.starts) == (2, 2)
    seeds = [1, 2, 3]
    assert engine.generate(PROMPTS, 2, SAMPLING, seeds) == healthy.generate(PROMPTS, 2, SAMPLING, seeds)


def test_killed_from_outside_between_calls(fake, owed):
    engine = engine_of(fake.start())
    children = subprocess.run(
        ["ps", "-o", "pid=", "--ppid", str(engine.server._process.pid)], capture_output=True, text=True
    )
    os.kill(int(children.stdout), signal.SIGKILL)
    assert engine.generate(PROMPTS, 4, SAMPLING, [1, 2, 3]) == owed


def test_killed_before_it_was_met(fake, owed):
    server = fake.start()
    for process in psutil.Process(server._process.pid).children():
        process.kill()
    engine = engine_of(server)
    assert server.starts == 2
    assert engine.generate(PROMPTS, 4, SAMPLING, [1, 2, 3]) == owed


def test_one_that_is_lost_every_time_is_given_up(fake):
    engine = engine_of(fake.start(), restarts=2)
    fake.orders(*[["exit", "complete", 1]] * 3)
    with pytest.raises(EngineLostError, match="gave no answer") as lost:
        engine.generate(PROMPTS, 4, SAMPLING)
    assert lost.value.__notes__ == ["rollout.restarts is 2; the server's own log may say why"]
    assert engine.server.starts == 3


def test_one_that_is_not_ours_is_named_and_not_touched(fake):
    server = fake.start()
    engine = engine_of(server.url)
    fake.orders(["hang", "complete", 1])
    with pytest.raises(EngineLostError, match=r"v1/completions gave no answer: .*timed out"):
        engine.generate(PROMPTS, 1, SAMPLING)
    assert is_healthy(server.url)
    assert server.starts == 1


def test_a_refusal_is_no_loss(fake, monkeypatch):
    engine = engine_of(fake.start())
    monkeypatch.setattr(engine, "_rpc", lambda *a, **k: {"error": "ValueError: a.weight arrived as x"})
    tensors, manifest = version(2)
    with pytest.raises(ValueError, match=r"a\.weight arrived as x"):
        engine.update(tensors.items(), manifest)
    assert (engine.version, engine.losses, engine.server.starts) == (1, [], 1)


def test_a_server_that_cannot_start_shows_its_log():
    with pytest.raises(
        RuntimeError, match=r"the server ended after at most 20 s; the end of its log:\n(.|\n)*no such thing"
    ):
        Server(lambda port: [sys.executable, "-c", "raise SystemExit('no such thing')"], seconds=20)
    with pytest.raises(RuntimeError, match="runs but does not answer after at most 1 s"):
        Server(lambda port: [sys.executable, "-c", "import time; time.sleep(60)"], seconds=1)


STUBBORN = (
    "import os, signal, subprocess, sys, time\n"
    "signal.signal(signal.SIGTERM, signal.SIG_IGN)\n"
    "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
    "open(sys.argv[1], 'w').write(f'{os.getpid()} {child.pid}')\n"
    "time.sleep(600)"
)


@pytest.mark.parametrize("end", ["killed", "collected"])
def test_it_never_outlives_its_owner(tmp_path, end):
    """Not even one that ignores SIGTERM and has children of its own, whose owner was killed."""
    file = tmp_path / "pids"
    owner = (
        "import sys; from lowbitrl.rollout.vllm import process, keeper\n"
        "process.is_healthy = lambda url: __import__('os').path.exists(sys.argv[1])\n"
        "server = process.Server(lambda port: [sys.executable, '-c', sys.argv[2], sys.argv[1]], 20)\n"
        + ("import time; time.sleep(600)" if end == "killed" else "del server")
    )
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)}
    process = subprocess.Popen([sys.executable, "-c", owner, str(file), STUBBORN], env=environment)
    last = time.monotonic() + 30
    while not file.exists() or len(file.read_text().split()) < 2:
        assert time.monotonic() < last
        time.sleep(0.05)
    if end == "killed":
        time.sleep(0.3)
        process.kill()
    assert process.wait(30) == (-signal.SIGKILL if end == "killed" else 0)
    assert gone(list(map(int, file.read_text().split())), seconds=30)


@pytest.mark.parametrize(
    "orders", [[["hang", "complete", 20]], [["exit", "complete", 40], ["exit", "update", 0]]]
)
def test_a_run_counts_restarts_and_ends_with_the_same_metrics(fake, tmp_path, monkeypatch, orders):
    """A whole run on served rollouts: lost completions and updates change nothing but the count of restarts."""
    monkeypatch.setattr("lowbitrl.engines.VllmServer", lambda source, plan, *_, **__: fake.start(plan.digest))
    sections = {
        "rollout": {"engine": "vllm-server", "timeout": 0.8},
        "sentinel": {"sequences": 0},
        "trainer": {"steps": 3},
        "evaluation": {"every": 0},
    }
    whole = lasting(train(config(tmp_path, "whole", **sections), say=lambda line: None))
    fake.orders(*orders)
    said = []
    part = lasting(train(config(tmp_path, "part", **sections), say=said.append))
    counts = [line.pop("faults/engine_restarts", 0) for line in part]
    assert sum(counts) == len(orders)
    assert part == [{k: v for k, v in line.items() if k != "faults/engine_restarts"} for line in whole]
    assert sum("engine restarted, its version given to it again: " in line for line in said) == len(orders)
    assert whole[-1]["actor/grad_norm"] > 0


def kill_at(servers, moments, ended, killed):
    """kill -9 of the newest server that runs, some seconds after the one before; notes each."""
    for moment in moments:
        if ended.wait(moment):
            return
        keeper = servers[-1]._process.pid
        with contextlib.suppress(psutil.NoSuchProcess):
            for process in psutil.Process(keeper).children():
                process.kill()
                killed.append(moment)


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.slow)])
def test_killed_at_random_moments(fake, tmp_path, monkeypatch, kills):
    """At rest, in a request, in an update or while it starts: the run is that of a server which lived."""
    monkeypatch.setattr("lowbitrl.engines.VllmServer", lambda s, plan, *_, **__: fake.start(plan.digest))
    sections = {
        "rollout": {"engine": "vllm-server", "timeout": 5.0, "restarts": 20},
        "sentinel": {"sequences": 0},
        "trainer": {"steps": 6},
        "evaluation": {"every": 0},
    }
    began = time.monotonic()
    whole = lasting(train(config(tmp_path, "whole", **sections), say=lambda line: None))
    draw, seconds, killed = random.Random(kills), time.monotonic() - began, []
    while len(killed) < kills:
        shutil.rmtree(tmp_path / "part", ignore_errors=True)
        ended, servers = threading.Event(), len(fake.servers)
        moments = [draw.uniform(0, seconds / 3) for _ in range(kills)]
        killer = threading.Thread(target=kill_at, args=(fake.servers, moments, ended, killed))
        run = config(tmp_path, "part", **sections)
        monkeypatch.setattr(
            "lowbitrl.engines.VllmServer",
            lambda s, plan, *_, killer=killer, **__: (fake.start(plan.digest), killer.start())[0],
        )
        part = lasting(train(run, say=lambda line: None))
        ended.set()
        killer.join()
        assert len(fake.servers) == servers + 1
        restarts = sum(line.pop("faults/engine_restarts", 0) for line in part)
        assert part == [{k: v for k, v in line.items() if k != "faults/engine_restarts"} for line in whole]
        assert restarts <= len(killed)
    assert sum(server.starts for server in fake.servers) > kills / 2


def test_flags_and_ports():
    given = {
        "max_model_len": 96,
        "enforce_eager": True,
        "chunked": False,
        "overrides": {"a": [1]},
        "dtype": "float32",
    }
    assert flags(given) == ["--max-model-len", "96", "--enforce-eager", "--no-chunked", "--overrides", '{"a": [1]}',
                            "--dtype", "float32"]  # fmt: skip
    assert free_port() != 0
