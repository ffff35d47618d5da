import errno
import json
import shutil

import pytest
import torch
from safetensors import SafetensorError

from lowbitrl.trainer import checkpoint
from lowbitrl.trainer.optim import MasterOptimizer, OptimizerConfig
from tests.conftest import tiny_llama


@pytest.fixture
def optimizer():
    return MasterOptimizer(tiny_llama(), OptimizerConfig())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_damaged_checkpoints_of_later_steps_do_not_push_out_the_new_one(tmp_path, optimizer):
    for step in (5, 6):
        (checkpoint.save(tmp_path, step, optimizer, {}, 2) / "optimizer.pt").write_bytes(b"x")
    assert checkpoint.latest(tmp_path)[0] is None
    for step in (1, 2, 3):
        checkpoint.save(tmp_path, step, optimizer, {}, 2)
        found, _ = checkpoint.latest(tmp_path)
        assert found is not None
        assert found.state["step"] == step
    assert names(tmp_path) == ["step-000002", "step-000003", "step-000005", "step-000006"]


def test_folders_beside_the_checkpoints_are_neither_read_nor_dropped(tmp_path, optimizer):
    checkpoint.save(tmp_path, 1, optimizer, {}, 1)
    shutil.copytree(tmp_path / "step-000001", tmp_path / "step-000001-best")
    (tmp_path / "step-000099").write_text("a file")
    checkpoint.save(tmp_path, 2, optimizer, {}, 1)
    assert names(tmp_path) == ["step-000001-best", "step-000002", "step-000099"]
    found, damaged = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path.name == "step-000002"
    assert damaged == []


def test_steps_are_ordered_as_numbers(tmp_path, optimizer):
    for step in (999_999, 1_000_000):
        checkpoint.save(tmp_path, step, optimizer, {}, 1)
    assert names(tmp_path) == ["step-1000000"]


@pytest.mark.parametrize("text", ["[]", "{}", '{"state.json": 3}', "", "null"])
def test_a_list_of_files_that_is_none_is_damage(tmp_path, optimizer, text):
    (checkpoint.save(tmp_path, 1, optimizer, {}, 1) / "files.json").write_text(text)
    found, damaged = checkpoint.latest(tmp_path)
    assert found is None
    assert "step-000001 is damaged (files.json" in damaged[0]


@pytest.mark.parametrize(
    ("module", "writer", "error"),
    [
        (checkpoint, "save_file", SafetensorError("I/O error: No space left on device (os error 28)")),
        (torch, "save", RuntimeError("PytorchStreamWriter failed writing file")),
        (json, "dumps", OSError(errno.ENOSPC, "No space left on device")),
    ],
)
def test_a_full_disk_is_said_whoever_meets_it_and_leaves_nothing(
    tmp_path, optimizer, monkeypatch, module, writer, error
):
    checkpoint.save(tmp_path, 1, optimizer, {}, 2)

    def full(*_, **__):
        raise error

    monkeypatch.setattr(module, writer, full)
    with pytest.raises(
        OSError, match=r"step-000002 could not be written .*earlier checkpoints are untouched"
    ):
        checkpoint.save(tmp_path, 2, optimizer, {}, 2)
    monkeypatch.undo()
    assert names(tmp_path) == ["step-000001"]
