"""The model that whole-model suites measure: random weights of a published 1B shape, or a tiny one on a CPU."""

from __future__ import annotations

import copy
import gc
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from lowbitrl.formats import QuantizedTensor
from lowbitrl.quant import attachment
from lowbitrl.quant.linear import RolloutLinear

SEED = 0
# Llama 3.2 1B: 0.97 billion weights in linears, 0.26 in the embedding that is also the output head.
BILLION = {
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
}
TINY = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}
BF16_BYTES = 2


def shape(device: str) -> dict[str, Any]:
    """The configuration's sizes for a device."""
    return BILLION if device == "cuda" else TINY


def shape_name(device: str) -> str:
    """What rows call it."""
    return "1B" if device == "cuda" else "tiny"


def build(device: str) -> LlamaForCausalLM:
    """The same random BF16 weights at every call; the embedding is the output head too."""
    torch.manual_seed(SEED)
    config = LlamaConfig(
        **shape(device), tie_word_embeddings=True, max_position_embeddings=4096, bos_token_id=1, eos_token_id=2,
        pad_token_id=2,
    )  # fmt: skip
    config._attn_implementation = "sdpa"
    with torch.device(device):
        model: Any = LlamaForCausalLM(config)
    return model.to(torch.bfloat16).eval()


def copies(base: LlamaForCausalLM, count: int) -> list[LlamaForCausalLM]:
    """Fresh models of the same weights, after what the last case held has been let go: prepared ones hold cycles."""
    gc.collect()
    return [copy.deepcopy(base) for _ in range(count)]


def no_stop(model: nn.Module) -> tuple[int, ...]:
    """A token id past the vocabulary: no response ends before its length."""
    return (model.config.vocab_size,)  # type: ignore[union-attr, return-value]


def prompts(device: str, count: int, length: int) -> list[list[int]]:
    """Random token ids, `count` prompts of `length`."""
    generator = torch.Generator().manual_seed(SEED)
    return torch.randint(3, shape(device)["vocab_size"], (count, length), generator=generator).tolist()


def encoded(model: nn.Module) -> list[QuantizedTensor]:
    """The bytes that a rollout model's linears serve."""
    return [m.encoded for m in model.modules() if isinstance(m, RolloutLinear) and m.encoded is not None]


def decode_bytes(model: nn.Module, rows: int, columns: int) -> int:
    """Fewest bytes of a decoding step: every weight read once as published, keys and values of `rows` sequences read.

    Args:
        columns: tokens of each sequence so far.
    """
    planned = attachment(model).plan.by_parameter
    plain = (p for n, p in model.named_parameters() if n not in planned or not planned[n].weight)
    return _total(encoded(model)) + _total(plain) + rows * columns * cache_bytes(model)


def cache_bytes(model: nn.Module) -> int:
    """Bytes of keys and values of one token in all layers, BF16."""
    config = model.config
    width = config.hidden_size // config.num_attention_heads * config.num_key_value_heads  # type: ignore[union-attr, operator]
    return 2 * BF16_BYTES * width * config.num_hidden_layers  # type: ignore[union-attr, operator, return-value]


def _total(tensors: Iterable[torch.Tensor | QuantizedTensor]) -> int:
    return sum(t.nbytes for t in tensors)
