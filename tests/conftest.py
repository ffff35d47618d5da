"""Small models and poisoned memory, shared by all tests."""

from __future__ import annotations

import copy
import os
import signal
import sys
from collections.abc import Iterator
from types import FunctionType

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


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """A test that leaves the process other than it was makes another one pass or fail in its company."""
    before = _process()
    yield
    assert _process() == before


@pytest.fixture(autouse=True, scope="module")
def _functions_as_before() -> Iterator[None]:
    """The package's functions and methods are not left patched."""
    before = _functions()
    yield
    after = _functions()
    assert [name for name in before if after.get(name, before[name]) is not before[name]] == []


def _process() -> dict[str, object]:
    # Of pytest, of torch's compiler, and what the command line sets for the libraries it loads.
    own = ("PYTEST_", "_TORCHINDUCTOR_", "TRANSFORMERS_VERBOSITY", "HF_HUB_DISABLE_PROGRESS_BARS")
    return {
        "environment": {name: value for name, value in os.environ.items() if not name.startswith(own)},
        "folder": os.getcwd(),
        "dtype": torch.get_default_dtype(),
        "gradients": torch.is_grad_enabled(),
        "threads": torch.get_num_threads(),
        "group": torch.distributed.is_initialized(),
        "interrupt": signal.getsignal(signal.SIGINT),
    }


def _functions() -> dict[str, object]:
    loaded = {name: module for name, module in sys.modules.items() if name.startswith("lowbitrl.")}
    found = {f"{m}.{n}": value for m, module in loaded.items() for n, value in vars(module).items()}
    classes = {name: value for name, value in found.items() if isinstance(value, type)}
    found |= {f"{c}.{n}": value for c, owner in classes.items() for n, value in vars(owner).items()}
    # Torch puts its profiler's hook around an optimizer's step when the first one is made.
    return {n: v for n, v in found.items() if isinstance(v, FunctionType) and not hasattr(v, "hooked")}


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
