import os

import pytest

from lowbitrl.runs import RunFolder, read_metrics


def test_a_folder_stays_the_same_when_the_working_folder_changes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    with RunFolder("run") as run:
        (tmp_path / "elsewhere").mkdir()
        os.chdir("elsewhere")
        run.log({"step": 0})
        run.write_json("config.json", {})
    assert [line["step"] for line in read_metrics(tmp_path / "run")] == [0]
    assert (tmp_path / "run" / "config.json").is_file()


def test_a_refused_folder_is_not_left_locked(tmp_path):
    with RunFolder(tmp_path) as run:
        run.write_json("config.json", {})
    with pytest.raises(FileExistsError, match="already holds a run") as refused:
        RunFolder(tmp_path)
    with RunFolder(tmp_path, resume=True):
        assert refused.traceback  # still alive, as in a notebook


def test_checkpoints_without_a_run_are_refused_before_a_resume_could_take_them_up(tmp_path):
    (tmp_path / "checkpoints" / "step-000009").mkdir(parents=True)
    with pytest.raises(FileExistsError, match="checkpoints of an earlier run"):
        RunFolder(tmp_path)


@pytest.mark.parametrize("bad", [b'{"step": 1, "rew', b"\xff\xfe", b"", b"3"])
def test_a_damaged_line_is_named(tmp_path, bad):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n' + bad + b'\n{"step": 2}\n')
    with pytest.raises(ValueError, match=r"metrics\.jsonl, line 2: "):
        read_metrics(tmp_path)


def test_a_line_cut_off_at_the_end_is_left_out(tmp_path):
    (tmp_path / "metrics.jsonl").write_bytes(b'{"step": 0}\n{"step": 1, "rew\xc3')
    assert read_metrics(tmp_path) == [{"step": 0}]


def test_rewinding_never_leaves_less_than_was_kept(tmp_path, monkeypatch):
    with RunFolder(tmp_path) as run:
        for step in range(3):
            run.log({"step": step})

        def killed(*_):
            raise KeyboardInterrupt

        monkeypatch.setattr(os, "replace", killed)
        with pytest.raises(KeyboardInterrupt):
            run.rewind(1)
        monkeypatch.undo()
        assert len(read_metrics(tmp_path)) == 3
        run.rewind(1)
        assert read_metrics(tmp_path) == [{"step": 0}]
