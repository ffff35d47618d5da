"""A whole run in seconds: a tiny model with a tokenizer of its own, a file of prompts, a reward."""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbitrl.config import RunConfig, validate
from tests.conftest import tiny_llama

CHAT = "{% for m in messages %}{{ m.content }} {% endfor %}"


def checkpoint(folder: Path) -> Path:
    """Model and tokenizer, 128 words."""
    tiny_llama().save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def tokenizer() -> PreTrainedTokenizerFast:
    """128 words, one token each."""
    words = {f"w{i}": i for i in range(128)}
    backend = Tokenizer(models.WordLevel(words, unk_token="w0"))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        unk_token="w0",
        bos_token="w1",
        eos_token="w2",
        pad_token="w2",
        chat_template=CHAT,
    )


def prompts(file: Path, count: int = 24) -> Path:
    """A JSONL of prompts of different lengths."""
    rows = [{"prompt": " ".join(f"w{3 + (i * j) % 120}" for j in range(1, 2 + i % 4))} for i in range(count)]
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


def config(folder: Path, out: str = "run", **sections: object) -> RunConfig:
    """A run in `folder`: four steps of 4 x 4 completions."""
    if not (folder / "model").is_dir():
        checkpoint(folder / "model")
        prompts(folder / "prompts.jsonl")
    data: dict = {
        "out": str(folder / out),
        "model": {"name": str(folder / "model"), "device": "cpu"},
        "task": {
            "path": str(folder / "prompts.jsonl"),
            "reward": "tests.tiny_rewards:even_words",
            "held_out": 4,
        },
        "recipe": {"rollout": "nvfp4", "learner": "weights", "residual": 0.5},
        "rollout": {"prompts": 4, "samples": 4, "max_tokens": 6, "keep": 3},
        "trainer": {"steps": 4},
        "optimizer": {"learning_rate": 1e-3},
        "evaluation": {"every": 2, "samples": 2, "k": 2},
        "sentinel": {"slack": 5.0},
    }
    for name, section in sections.items():
        data[name] = data[name] | section if isinstance(data.get(name), dict) else section
    return validate(data)


def toml(data: dict, prefix: str = "") -> str:
    """Plain data as TOML, sections after values."""
    values = {k: v for k, v in data.items() if not isinstance(v, dict)}
    lines = [f"{k} = {str(v).lower() if isinstance(v, bool) else repr(v)}" for k, v in values.items()]
    for name, section in data.items():
        if isinstance(section, dict) and section:
            lines += [f"[{prefix}{name}]", toml(section, f"{prefix}{name}.")]
    return "\n".join(lines)
