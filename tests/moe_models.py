"""Tiny random mixtures of experts, one for each layout that the package knows."""

from __future__ import annotations

import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

SHARED = {
    "vocab_size": 128,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 64,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 2,
    "initializer_range": 0.15,
}
KINDS = {
    "qwen3_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
    "mixtral": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "sliding_window": None,
    },
    "olmoe": {"num_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32},
    "gpt_oss": {
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "intermediate_size": 32,
        "layer_types": ["full_attention"] * 2,
    },
    "qwen2_moe": {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 48,
        "decoder_sparse_step": 1,
    },
}


def tiny_moe(
    kind: str = "qwen3_moe",
    dtype: torch.dtype = torch.bfloat16,
    dispatch: str = "grouped_mm",
    **overrides: object,
) -> PreTrainedModel:
    """Two layers, width 64, four experts of which two are taken; random weights, experts and biases included."""
    torch.manual_seed(7)
    config = AutoConfig.for_model(kind, **(SHARED | KINDS[kind] | overrides))
    model = AutoModelForCausalLM.from_config(config, dtype=dtype, experts_implementation=dispatch).eval()
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" not in name:
                parameter.normal_(0, 0.15)
    return model
