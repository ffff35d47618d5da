import errno
import json
import os
import random
import resource
import shutil
import signal
import threading
import zlib
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import state_dict_saver

from lowbitrl.trainer import checkpoint
from lowbitrl.trainer.optim import MasterOptimizer, OptimizerConfig
from tests.conftest import tiny_llama


@pytest.fixture
def optimizer():
    return MasterOptimizer(tiny_llama(), OptimizerConfig())


def stepped(optimizer):
    """One step on gradients of its masters' own values."""
    for master in optimizer.masters.values():
        master.grad = master.detach().clone()
    optimizer.step(optimizer.gradient_norm())


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def test_damaged_checkpoints_of_later_steps_do_not_push_out_the_new_one(tmp_path, optimizer):
    for step in (5, 6):
        (checkpoint.save(tmp_path, step, optimizer, {}, 2) / ".metadata").write_bytes(b"x")
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


def test_what_is_read_is_what_was_written(tmp_path, optimizer):
    stepped(optimizer)
    random.seed(5)
    path = checkpoint.save(tmp_path, 3, optimizer, {"drawn": 7}, 1)
    drawn = random.random(), float(torch.rand(1)), float(np.random.rand())
    before = {name: tensor.clone() for name, tensor in optimizer.tensors().items()}
    stepped(optimizer)
    other = MasterOptimizer(tiny_llama(), OptimizerConfig())
    found, _ = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path == path
    assert found.state == {"step": 3, "drawn": 7, "optimizer_steps": 1}
    found.restore(other)
    assert other.steps == 1
    assert other.tensors().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in other.tensors().items())
    for name, parameter in other.parameters.items():
        assert torch.equal(parameter, before[f"masters.{name}"].bfloat16())
    assert (random.random(), float(torch.rand(1)), float(np.random.rand())) == drawn


def test_the_run_goes_on_while_a_checkpoint_is_written(tmp_path, optimizer, monkeypatch):
    """What is written are the values of the moment it was asked for."""
    goes_on, write = threading.Event(), state_dict_saver.save

    def slow(*arguments, **options):
        assert goes_on.wait(10)
        write(*arguments, **options)

    monkeypatch.setattr(state_dict_saver, "save", slow)
    saver = checkpoint.Saver(tmp_path, 1)
    before = {name: master.clone() for name, master in optimizer.masters.items()}
    saver.save(1, optimizer, {})
    stepped(optimizer)
    assert checkpoint.latest(tmp_path)[0] is None
    goes_on.set()
    saver.wait()
    model = tiny_llama(torch.float32)
    checkpoint.load_masters(tmp_path / "step-000001", model)
    assert all(torch.equal(p, before[name]) for name, p in model.named_parameters())


def test_another_models_checkpoint_is_refused(tmp_path, optimizer):
    checkpoint.save(tmp_path, 1, optimizer, {}, 1)
    other = tiny_llama(num_hidden_layers=1)
    found, _ = checkpoint.latest(tmp_path)
    assert found is not None
    with pytest.raises(ValueError, match=r"is of another model: masters\.model\.layers\.1"):
        found.restore(MasterOptimizer(other, OptimizerConfig()))
    with pytest.raises(ValueError, match=r"is of another model: masters\.model\.layers\.1"):
        checkpoint.load_masters(found.path, other)


def test_a_checkpoint_of_before_is_told_from_a_damaged_one(tmp_path, optimizer):
    folder = tmp_path / "step-000001"
    folder.mkdir()
    (folder / "masters.safetensors").write_bytes(b"12345678")
    (folder / "state.json").write_text('{"step": 1}')
    files = {p.name: [p.stat().st_size, zlib.crc32(p.read_bytes())] for p in folder.iterdir()}
    (folder / "files.json").write_text(json.dumps(files))
    found, damaged = checkpoint.latest(tmp_path)
    assert found is not None
    assert damaged == []
    with pytest.raises(ValueError, match="is of a version of lowbitrl that wrote safetensors"):
        found.restore(optimizer)


def test_the_best_is_kept_beside_the_newest(tmp_path, optimizer):
    for step, score in ((1, 0.2), (2, 0.5), (3, None), (4, 0.5), (5, 0.1), (6, 0.3), (7, None)):
        checkpoint.save(tmp_path, step, optimizer, {"score": score}, 2)
    assert names(tmp_path) == ["step-000004", "step-000006", "step-000007"]


@pytest.mark.parametrize("place", ["cut", "bit", "gone"])
@pytest.mark.parametrize("name", [".metadata", "__0_0.distcp", "state.json", "rng.pt", "files.json"])
def test_the_one_before_is_used_and_the_bad_one_named(tmp_path, optimizer, name, place):
    checkpoint.save(tmp_path, 1, optimizer, {}, 2)
    file = checkpoint.save(tmp_path, 2, optimizer, {}, 2) / name
    data = bytearray(file.read_bytes())
    if place == "cut":
        file.write_bytes(data[: len(data) // 2])
    elif place == "bit":
        data[len(data) // 2] ^= 0x10
        file.write_bytes(data)
    else:
        file.unlink()
    found, damaged = checkpoint.latest(tmp_path)
    assert found is not None
    assert found.path.name == "step-000001"
    assert len(damaged) == 1
    assert "step-000002 is damaged" in damaged[0]


@contextmanager
def small_files(limit):
    """No file may grow over `limit` bytes: a write that does fails, as on a full disk."""
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        signal.signal(signal.SIGXFSZ, handler)


def test_a_write_that_the_disk_refuses_leaves_nothing_and_is_said(tmp_path, optimizer):
    checkpoint.save(tmp_path, 1, optimizer, {}, 2)
    with (
        small_files(50_000),
        pytest.raises(OSError, match=r"step-000002 could not be written .*earlier checkpoints are untouched"),
    ):
        checkpoint.save(tmp_path, 2, optimizer, {}, 2)
    assert names(tmp_path) == ["step-000001"]


@pytest.mark.parametrize(
    ("module", "writer", "error"),
    [
        (torch, "save", RuntimeError("PytorchStreamWriter failed writing file")),
        (json, "dumps", OSError(errno.ENOSPC, "No space left on device")),
        (os, "fsync", OSError(errno.ENOSPC, "No space left on device")),
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


def test_what_a_killed_write_left_is_cleared_by_the_next(tmp_path, optimizer):
    (tmp_path / ".step-000004.partial").mkdir()
    (tmp_path / ".step-000004.partial" / "__0_0.distcp").write_bytes(b"half")
    assert checkpoint.latest(tmp_path) == (None, [])
    checkpoint.save(tmp_path, 1, optimizer, {}, 2)
    assert names(tmp_path) == ["step-000001"]
