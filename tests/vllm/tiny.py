"""Tiny checkpoints that vLLM's CPU attention takes: heads of 32."""

from __future__ import annotations

from pathlib import Path

from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe
from tests.tiny_run import tokenizer

DENSE = {"hidden_size": 128, "intermediate_size": 192, "max_position_embeddings": 128}
MOE = {"hidden_size": 128, "head_dim": 32, "moe_intermediate_size": 64, "max_position_embeddings": 128}


def dense(folder: Path, **overrides: object) -> Path:
    """A Llama of two layers, with a tokenizer."""
    tiny_llama(**(DENSE | overrides)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def moe(folder: Path) -> Path:
    """A Qwen3-MoE of two layers and four experts, with a tokenizer."""
    tiny_moe(**MOE).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder
