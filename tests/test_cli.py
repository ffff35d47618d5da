"""The command line as a person types it."""

import json
import subprocess
import sys

import pytest

from lowbitrl import cli
from tests.tiny_run import checkpoint, prompts


@pytest.fixture
def folder(tmp_path):
    """A recipe of two steps on a tiny model."""
    checkpoint(tmp_path / "model")
    prompts(tmp_path / "prompts.jsonl")
    (tmp_path / "r.toml").write_text(
        f"""
out = "{tmp_path}/run"
[model]
name = "{tmp_path}/model"
device = "cpu"
[task]
path = "{tmp_path}/prompts.jsonl"
reward = "tests.tiny_rewards:even_words"
held_out = 4
[recipe]
rollout = "nvfp4"
residual = 0.5
[rollout]
prompts = 3
samples = 4
max_tokens = 5
[trainer]
steps = 2
[sentinel]
slack = 5.0
"""
    )
    return tmp_path


def run(*arguments, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["lowbitrl", *map(str, arguments)])
    with pytest.raises(SystemExit) as stopped:
        cli.main()
    return stopped.value.code or 0, capsys.readouterr().out


def test_train_report_evaluate_and_plan(folder, monkeypatch, capsys):
    go = lambda *a: run(*a, monkeypatch=monkeypatch, capsys=capsys)  # noqa: E731
    code, out = go("train", folder / "r.toml", "--trainer.steps", "1")
    assert (code, "step 1/1" in out, "device cpu" in out) == (0, True, True)
    assert (folder / "run" / "report.html").stat().st_size > 10_000
    code, out = go("train", folder / "r.toml", "--resume", "--trainer.steps", "2")
    assert (code, "resumed from" in out, "step 2/2" in out) == (0, True, True)
    assert go("report", folder / "run")[0] == 0
    code, out = go("evaluate", folder / "r.toml", "--checkpoint", folder / "run/checkpoints/step-000002")
    assert code == 0
    assert "eval/pass@4" in out
    code, out = go("plan", folder / "model", "--recipe", folder / "r.toml")
    assert (code, "residual 0.5, scale of q_proj" in out) == (0, True)
    digest = json.loads((folder / "run" / "plan.json").read_text())["digest"]
    assert f"plan {digest}:" in out


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--trainer.stpes", "3"], "did you mean 'steps'?"),
        (["--recipe.residual", "2"], "residual=2.0 is not a fraction"),
        (["--model.name", "/nowhere/x"], "/nowhere/x"),
        (["--task.reward", "no.such:thing"], "no.such"),
        (["--trainer.steps"], "needs a value"),
        (["--resum"], "--resum is not an option; did you mean --resume?"),
        (["--rollout", "3"], "rollout is a section, not a value; set one of its keys, as in --rollout."),
    ],
)
def test_mistakes_end_in_one_message_and_code_2(folder, monkeypatch, capsys, arguments, message):
    code, out = run("train", folder / "r.toml", *arguments, monkeypatch=monkeypatch, capsys=capsys)
    assert code == 2
    assert "error: " in out
    assert message in out
    assert "Traceback" not in out
    assert not (folder / "run" / "config.json").exists()


def test_what_torchrun_starts_again_goes_on(folder, monkeypatch, capsys):
    go = lambda *a: run(*a, monkeypatch=monkeypatch, capsys=capsys)  # noqa: E731
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    code, out = go("train", folder / "r.toml", "--trainer.steps", "1")
    assert (code, "resumed from" in out) == (0, False), "killed before there was a run: from the beginning"
    code, out = go("train", folder / "r.toml", "--trainer.steps", "2")
    assert (code, "resumed from" in out) == (0, True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "0")
    code, out = go("train", folder / "r.toml")
    assert (code, "already holds a run" in out) == (2, True)


def test_restarts_under_torchrun_are_torchruns(folder, monkeypatch, capsys):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    code, out = run("train", folder / "r.toml", "--restarts", "1", monkeypatch=monkeypatch, capsys=capsys)
    assert (code, "--max-restarts" in out) == (2, True)


def test_doctor_says_what_runs_and_why_the_rest_does_not(monkeypatch, capsys):
    code, out = run("doctor", monkeypatch=monkeypatch, capsys=capsys)
    assert code == 0
    assert "ok  rollout precision nvfp4" in out
    assert all(line[:3] in ("ok ", "no ") for line in out.strip().splitlines())


def test_help_needs_no_torch():
    code = "import sys; from lowbitrl import cli; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True)
    shown = subprocess.run(
        [sys.executable, "-m", "lowbitrl", "--help"], capture_output=True, text=True, check=True
    )
    assert all(
        command in shown.stdout for command in ("train", "evaluate", "plan", "report", "demo", "doctor")
    )
