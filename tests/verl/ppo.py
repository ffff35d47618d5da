"""A whole `main_ppo` of a tiny model on a CPU, from one of our recipes, in processes of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pandas as pd
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbitrl.config import validate
from lowbitrl.integrations.verl.overrides import overrides
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe
from tests.tiny_run import CHAT

ROOT = Path(__file__).parents[2]
SECONDS = 600


def reward(data_source, solution_str, ground_truth, extra_info=None, **_):
    """Half of a point for an even number of words, and a little for length, so that groups differ."""
    return 0.5 * (len(solution_str.split()) % 2 == 0) + 0.01 * len(solution_str)


# Heads of 32, which vLLM's CPU attention takes.
WIDE = {"hidden_size": 128, "max_position_embeddings": 128}


def write_tokenizer(folder: Path) -> None:
    """126 words, and the two tokens that verl asks tokenizers of Qwen models for."""
    words = [*(f"w{i}" for i in range(126)), "\n", "<|im_end|>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w2",
        extra_special_tokens=words[126:],
        chat_template=CHAT,
    ).save_pretrained(folder)


def write_inputs(folder: Path, moe: bool) -> None:
    """A checkpoint and a table of prompts."""
    model = tiny_moe("qwen3_moe", **WIDE, head_dim=32) if moe else tiny_llama(**WIDE)
    model.save_pretrained(folder / "model")
    write_tokenizer(folder / "model")
    words = [" ".join(f"w{3 + (i * j) % 120}" for j in range(1, 2 + i % 4)) for i in range(16)]
    rows = [
        {
            "data_source": "words",
            "prompt": [{"role": "user", "content": text}],
            "reward_model": {"style": "rule", "ground_truth": ""},
            "extra_info": {"index": i},
        }
        for i, text in enumerate(words)
    ]
    pd.DataFrame(rows).to_parquet(folder / "prompts.parquet")


def recipe(folder: Path, **sections: dict) -> list[str]:
    """The overrides that `lowbitrl verl overrides` prints for a recipe of two steps of 4 x 4."""
    data = {
        "out": str(folder / "run"),
        "model": {"name": str(folder / "model"), "dtype": "float32"},
        "task": {"path": "unused.jsonl", "reward": "tests.tiny_run:reward"},
        "recipe": {"rollout": "nvfp4-w4a16", "learner": "weights"},
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 8},
        "trainer": {"steps": 2},
        "optimizer": {"learning_rate": 1e-3},
        "sentinel": {"slack": 1.0},
    }
    for name, section in sections.items():
        data[name] = data[name] | section if name in data else section
    return overrides(validate(data), folder / "plan.json")


def run(folder: Path, lines: list[str], ranks: int, path: str = "") -> list[dict[str, float]]:
    """Metrics of each step; `path` is a further folder to import from.

    Raises:
        RuntimeError: verl failed; the end of its log is in the message.
    """
    here = {
        "trainer.nnodes": 1,
        "trainer.n_gpus_per_node": ranks,
        "trainer.device": "cpu",
        "trainer.logger": "[console,file]",
        "+ray_kwargs.ray_init.num_gpus": ranks,
        "ray_kwargs.ray_init.num_cpus": 64,
        "+ray_kwargs.ray_init.include_dashboard": "false",
        "transfer_queue.backend.SimpleStorage.num_data_storage_units": 1,
        "actor_rollout_ref.rollout.agent.num_workers": 1,
        "actor_rollout_ref.rollout.tensor_model_parallel_size": 1,
        "actor_rollout_ref.actor.fsdp_config.use_torch_compile": "false",
        "actor_rollout_ref.actor.use_torch_compile": "false",
        "+actor_rollout_ref.model.override_config.attn_implementation": "sdpa",
        "reward.num_workers": 1,
        "reward.custom_reward_function.path": str(Path(__file__)),
        "reward.custom_reward_function.name": "reward",
        "data.train_files": str(folder / "prompts.parquet"),
        "data.val_files": str(folder / "prompts.parquet"),
        "data.max_prompt_length": 16,
        "data.dataloader_num_workers": 0,
        "data.shuffle": "false",
    }
    metrics = folder / "metrics.jsonl"
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), str(ROOT / "src"), path])),
        "VERL_PLATFORM": "cpu",
        "VERL_USE_EXTERNAL_MODULES": "tests.verl.cpu_platform",
        "VERL_FILE_LOGGER_PATH": str(metrics),
        "OMP_NUM_THREADS": "1",
        "RAY_DEDUP_LOGS": "0",
        "HYDRA_FULL_ERROR": "1",
    }
    command = [sys.executable, "-m", "verl.trainer.main_ppo", *lines, *(f"{k}={v}" for k, v in here.items())]
    with (folder / "log.txt").open("w") as log:
        done = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, timeout=SECONDS)
    if done.returncode or not metrics.exists():
        tail = (folder / "log.txt").read_text(errors="replace")[-6000:]
        raise RuntimeError(f"main_ppo ended with {done.returncode}:\n{tail}")
    return [json.loads(line)["data"] for line in metrics.read_text().splitlines()]
