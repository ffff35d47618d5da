"""A run's checkpoint is a run's on any number of processes, and what export makes of it is the same."""

import json
import shutil

import pytest
import torch

from lowbitrl.export import export_run
from lowbitrl.loop import train
from lowbitrl.runs import read_metrics
from lowbitrl.trainer import checkpoint
from tests import tiny_run
from tests.conftest import tiny_llama
from tests.distributed import work
from tests.distributed.processes import run_ranks

# In fp32 and without low-bit weights only the order of sums tells the runs apart.
SECTIONS = {
    "recipe": {"rollout": "bf16", "residual": 0.0},
    "rollout": {"prompts": 6},
    "trainer": {"steps": 2, "micro_batch_tokens": 40, "mini_batch": 12},
    "optimizer": {"warmup_steps": 4, "eps": 1e-8},
    "evaluation": {"every": 0},
    "checkpoint": {"every": 1, "keep": 9},
}


def config(folder, out, steps=2, **sections):
    made = tiny_run.config(folder, out, **(SECTIONS | sections))
    made = made.model_copy(update={"model": made.model.model_copy(update={"dtype": "float32"})})
    return made.model_copy(update={"trainer": made.trainer.model_copy(update={"steps": steps})})


def run(size, folder, config, resume=False):
    return run_ranks(
        size, folder / f"ranks-{config.out.rpartition('/')[2]}-{resume}", work.run, config, resume
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Two steps on two processes in "two", four on one in "whole"."""
    folder = tmp_path_factory.mktemp("runs")
    run(2, folder, config(folder, "two"))
    train(config(folder, "whole", 4), say=lambda line: None)
    return folder


def lasting(folder):
    """Metrics that are no times and do not depend on how a batch was cut into passes."""
    of_passes = ("timing/", "actor/tokens", "actor/pg_clipfrac", "actor/outside_band")
    return [{k: v for k, v in line.items() if not k.startswith(of_passes)} for line in read_metrics(folder)]


def test_every_process_writes_its_shards(folder):
    files = json.loads((folder / "two" / "checkpoints" / "step-000002" / "files.json").read_text())
    assert {".metadata", "__0_0.distcp", "__1_0.distcp", "state.json", "rng.pt"} == files.keys()
    sizes = [files[f"__{rank}_0.distcp"][0] for rank in range(2)]
    assert max(sizes) < 1.2 * min(sizes)


@pytest.mark.parametrize("size", [0, 1, 2, 3])
def test_a_run_goes_on_on_another_number_of_processes(folder, size):
    shutil.copytree(folder / "two", folder / f"on-{size}")
    said = run(size, folder, config(folder, f"on-{size}", 4), resume=True)
    assert any("resumed from" in line and "step-000002" in line for line in said[0])
    assert all(lines == [] for lines in said[1:])
    ours, theirs = lasting(folder / f"on-{size}"), lasting(folder / "whole")
    assert [line["step"] for line in ours] == [-1, 0, 1, 2, 3]
    for mine, other in zip(ours, theirs, strict=True):
        assert mine == pytest.approx(other, abs=1e-3, rel=1e-3)


def test_a_run_of_one_process_goes_on_on_three(folder):
    shutil.copytree(folder / "whole", folder / "spread")
    for path in (folder / "spread" / "checkpoints").iterdir():
        if path.name > "step-000002":
            shutil.rmtree(path)
    run(3, folder, config(folder, "spread", 4), resume=True)
    for mine, other in zip(lasting(folder / "spread"), lasting(folder / "whole"), strict=True):
        assert mine == pytest.approx(other, abs=1e-3, rel=1e-3)


def test_export_reads_the_shards_of_all(folder, tmp_path):
    from transformers import AutoModelForCausalLM

    notes = export_run(folder / "two", tmp_path / "hf", "2")
    assert "step-000002" in notes[0]
    model, ours = AutoModelForCausalLM.from_pretrained(tmp_path / "hf"), tiny_llama(torch.float32)
    checkpoint.load_masters(folder / "two" / "checkpoints" / "step-000002", ours)
    assert all(
        torch.equal(p, dict(ours.named_parameters())[n].bfloat16()) for n, p in model.named_parameters()
    )


def test_a_damaged_shard_of_another_process_is_named_and_the_one_before_used(folder):
    shutil.copytree(folder / "two", folder / "damaged")
    shard = folder / "damaged" / "checkpoints" / "step-000002" / "__1_0.distcp"
    shard.write_bytes(shard.read_bytes()[:-1000])
    said = run(2, folder, config(folder, "damaged", 3), resume=True)[0]
    assert any("step-000002 is damaged (__1_0.distcp has" in line for line in said)
    assert any("resumed from" in line and "step-000001" in line for line in said)
