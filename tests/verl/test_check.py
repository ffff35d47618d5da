"""`lowbitrl verl check` in processes of its own: all active, and what it says where something is not."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest


def check(**environment):
    command = [sys.executable, "-m", "lowbitrl", "verl", "check"]
    clean = {k: v for k, v in os.environ.items() if not k.startswith("VERL_")}
    return subprocess.run(command, capture_output=True, text=True, env=clean | environment, timeout=120)


def test_every_piece_is_active():
    done = check()
    assert done.returncode == 0, done.stdout
    missing = [line for line in done.stdout.splitlines() if line.startswith("no ")]
    assert all("vLLM" in line for line in missing)
    for piece in ("policy losses", "engine fsdp2", "rollout server", "rollout adapter"):
        assert f"ok  {piece}" in done.stdout


def test_plugins_switched_off_are_named_with_the_remedy():
    done = check(VERL_USE_EXTERNAL_PLUGINS="none")
    assert done.returncode == 1
    assert "no  plugins allowed: VERL_USE_EXTERNAL_PLUGINS=none leaves lowbitrl out; unset it" in done.stdout


@pytest.fixture
def broken(tmp_path):
    """A module that is imported first, and takes from verl what the plugin needs."""
    (tmp_path / "breaks.py").write_text(
        "import sys, types\nsys.modules['lowbitrl.integrations.verl.rollout'] = types.ModuleType('empty')\n"
    )
    return str(tmp_path)


def test_a_plugin_that_verl_swallowed_is_shown_with_its_error(broken):
    done = check(
        PYTHONPATH=os.pathsep.join([broken, os.environ.get("PYTHONPATH", "")]),
        VERL_USE_EXTERNAL_MODULES="breaks",
    )
    assert done.returncode == 1
    assert "no  rollout server: not registered (KeyError" in done.stdout
    assert "the plugin fails with" in done.stdout
