"""Small models and poisoned memory, shared by all tests."""

from __future__ import annotations

import copy
import os

import pytest
import torch

# Read when Triton is imported, which transformers does.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

from transformers import LlamaConfig, LlamaForCausalLM

os.environ.setdefault("HF_HUB_OFFLINE", "1")


@pytest.fixture(autouse=True)
def _seeded() -> None:
    torch.manual_seed(0)


def tiny_llama(dtype: torch.dtype = torch.bfloat16, **overrides: object) -> LlamaForCausalLM:
    """Two layers, width 64, tied embeddings, weights large enough that logits differ."""
    options: dict[str, object] = {
        "vocab_size": 128,
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 64,
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "initializer_range": 0.15,
    }
    torch.manual_seed(7)
    return LlamaForCausalLM(LlamaConfig(**(options | overrides))).to(dtype).eval()


@pytest.fixture
def tiny() -> LlamaForCausalLM:
    """A BF16 model of its own for each test."""
    return tiny_llama()


@pytest.fixture
def tiny_fp32() -> LlamaForCausalLM:
    """The same in fp32, where parity can be tight."""
    return tiny_llama(torch.float32)


@pytest.fixture
def clone():
    """A deep copy, so that two sides start from the same weights."""
    return copy.deepcopy
