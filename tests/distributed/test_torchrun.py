"""Whole runs as a person starts them: torchrun, the command line, one voice, one writer."""

import os
import re
import subprocess
import sys

import pytest

from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from tests import tiny_run
from tests.distributed.processes import free_port

pytestmark = pytest.mark.slow
SECTIONS = {
    "recipe": {"rollout": "nvfp4-w4a16", "residual": 0.0},
    "rollout": {"prompts": 6},
    "trainer": {"steps": 2, "micro_batch_tokens": 40},
    "evaluation": {"every": 0},
    "checkpoint": {"final": False},
}


def torchrun(size, folder, out, *options, **sections):
    """`torchrun -m lowbitrl train FOLDER/recipe.toml`; the finished process."""
    config = tiny_run.config(folder, out, **(SECTIONS | sections))
    recipe = folder / f"{out}.toml"
    recipe.write_text(toml(config.model_dump(mode="json", exclude_none=True)))
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", str(size)]
    command += ["--master-port", str(free_port()), "-m", "lowbitrl", "train", str(recipe), *options]
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    return subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)


def toml(data, prefix=""):
    """Plain data as TOML, sections after values."""
    values = {k: v for k, v in data.items() if not isinstance(v, dict)}
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in values.items()]
    for name, section in data.items():
        if isinstance(section, dict) and section:
            lines += [f"[{prefix}{name}]", toml(section, f"{prefix}{name}.")]
    return "\n".join(lines)


def test_two_processes_speak_with_one_voice_and_write_one_run(tmp_path):
    done = torchrun(2, tmp_path, "two")
    assert done.returncode == 0, done.stderr
    assert "2 processes" in done.stdout
    assert len(re.findall(r"^step 1/2 ", done.stdout, re.MULTILINE)) == 1
    assert [line["step"] for line in read_metrics(tmp_path / "two")] == [-1, 0, 1]
    train(tiny_run.config(tmp_path, "alone", **SECTIONS), say=lambda line: None)
    ours, theirs = (read_metrics(tmp_path / name)[1] for name in ("two", "alone"))
    same = [k for k in theirs if k.startswith(("reward/", "rollout", "mismatch/"))]
    assert {k: ours[k] for k in same} == {k: theirs[k] for k in same}


def test_an_error_is_said_once_and_stops_all(tmp_path):
    failed = torchrun(2, tmp_path, "bad", "--trainer.micro_batch_tokens", "2")
    assert failed.returncode != 0
    assert (failed.stdout + failed.stderr).count("over trainer.micro_batch_tokens=2; raise it") == 1
