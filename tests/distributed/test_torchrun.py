"""Whole runs as a person starts them: torchrun, the command line, one voice, one writer, one killed rank."""

import os
import re
import subprocess
import sys
import time

import psutil
import pytest

from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from tests import tiny_run
from tests.distributed import work
from tests.distributed.processes import free_port, run_ranks

pytestmark = pytest.mark.slow
SECTIONS = {
    "recipe": {"rollout": "nvfp4-w4a16", "residual": 0.0},
    "rollout": {"prompts": 6},
    "trainer": {"steps": 2, "micro_batch_tokens": 40},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1},
}


def torchrun(size, folder, out, *options, **sections):
    """`torchrun -m lowbitrl train FOLDER/OUT.toml`, started."""
    config = tiny_run.config(folder, out, **(SECTIONS | sections))
    recipe = folder / f"{out}.toml"
    recipe.write_text(tiny_run.toml(config.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-port", str(free_port()), "-m", "lowbitrl", "train", str(recipe), *options]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return subprocess.Popen(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, **pipes)


def ended(process):
    """(exit code, stdout, stderr) of a process that ends by itself."""
    try:
        out, err = process.communicate(timeout=110)
    finally:
        process.kill()
    return process.returncode, out, err


def lasting(folder):
    return [{k: v for k, v in line.items() if not k.startswith("timing/")} for line in read_metrics(folder)]


def test_an_error_is_said_once_and_stops_all(tmp_path):
    code, out, err = ended(torchrun(2, tmp_path, "bad", "--trainer.micro_batch_tokens", "2"))
    assert code != 0
    assert (out + err).count("over trainer.micro_batch_tokens=2; raise it") == 1


def test_a_killed_rank_ends_the_run_and_a_resume_makes_it_whole(tmp_path):
    steps = {"trainer": SECTIONS["trainer"] | {"steps": 6}}
    running = torchrun(2, tmp_path, "killed", **steps)
    began = time.monotonic()
    while len(read_metrics(tmp_path / "killed")) < 3:
        assert running.poll() is None
        assert time.monotonic() - began < 100
        time.sleep(0.05)
    (second,) = (p for p in psutil.Process(running.pid).children() if p.environ().get("RANK") == "1")
    second.kill()
    code, out, _ = ended(running)
    assert code != 0
    assert "2 processes" in out
    assert len(re.findall(r"^step 1/6 ", out, re.MULTILINE)) == 1
    saved = sorted(p.name for p in (tmp_path / "killed" / "checkpoints").glob("step-*"))
    logged = len(read_metrics(tmp_path / "killed")) - 1
    assert int(saved[-1].removeprefix("step-")) >= logged - 1
    settings = SECTIONS | steps
    run_ranks(2, tmp_path / "on", work.run, tiny_run.config(tmp_path, "killed", **settings), True)
    run_ranks(2, tmp_path / "off", work.run, tiny_run.config(tmp_path, "whole", **settings))
    assert lasting(tmp_path / "killed") == lasting(tmp_path / "whole")
    train(tiny_run.config(tmp_path, "alone", **SECTIONS), say=lambda line: None)
    ours, theirs = (lasting(tmp_path / name)[1] for name in ("whole", "alone"))
    same = [k for k in theirs if k.startswith(("reward/", "rollout", "mismatch/"))]
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}
