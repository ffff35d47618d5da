"""SmolLM2's GGUF as llama.cpp writes it, decoded into an ordinary BF16 checkpoint.

transformers reads GGUF too, but differently from version to version, for some only with accelerate, and
without the pre-tokenizer. Two things that llama.cpp does are undone here:

* rows of q_proj and k_proj are interleaved for its rotary layout:
  `w_hf[h, j, i] = w_gguf[h, i, j]`, h a head, i < head_dim / 2, j < 2;
* the pre-tokenizer is only named (`smollm`): single digits are split off, then byte-level BPE.
  Without the digit split a run of spaces before a number is tokenized otherwise (`x  42`).
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

if TYPE_CHECKING:
    from transformers import PreTrainedModel, PreTrainedTokenizerBase

CONTROL_TOKEN = 3  # of tokenizer.ggml.token_type
HF_PARTS = {
    "token_embd": "embed_tokens",
    "output_norm": "norm",
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}


def gguf_to_bf16(gguf: Path, folder: Path) -> None:
    """Decode a Llama-architecture GGUF with a SmolLM tokenizer into an HF checkpoint in BF16.

    Weights are decoded in fp32 and rounded once. Raises ImportError without the package `gguf`,
    ValueError for another architecture or pre-tokenizer.
    """
    try:
        from gguf import GGUFReader
    except ImportError:
        raise ImportError(
            f"{gguf.name} needs the package gguf to be read; install it with: pip install 'lowbitrl[demo]'"
        ) from None
    reader = GGUFReader(gguf)
    fields = {name: field.contents() for name, field in reader.fields.items()}
    found = (fields["general.architecture"], fields["tokenizer.ggml.pre"])
    if found != ("llama", "smollm"):
        raise ValueError(f"{gguf}: architecture, pre-tokenizer are {found}; only ('llama', 'smollm') is read")
    tokenizer = _tokenizer(fields)
    _model(fields, reader.tensors).save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _model(fields: dict[str, Any], tensors: list[Any]) -> PreTrainedModel:
    from gguf import dequantize
    from transformers import LlamaForCausalLM

    config = _config(fields)
    weights = {_hf_name(t.name): torch.tensor(dequantize(t.data, t.tensor_type)) for t in tensors}
    for name, weight in weights.items():
        if name.endswith(("q_proj.weight", "k_proj.weight")):
            weights[name] = _uninterleave(weight, config.head_dim)
    model = LlamaForCausalLM(config).bfloat16()
    missing, unexpected = model.load_state_dict(weights, strict=False)
    if unexpected or set(missing) - {"lm_head.weight"}:
        raise ValueError(f"the GGUF does not fill a Llama: missing {missing}, unexpected {unexpected}")
    model.tie_weights()
    return model


def _config(fields: dict[str, Any]) -> Any:
    from transformers import LlamaConfig

    llama = {key.removeprefix("llama."): value for key, value in fields.items() if key.startswith("llama.")}
    return LlamaConfig(
        vocab_size=llama["vocab_size"],
        hidden_size=llama["embedding_length"],
        intermediate_size=llama["feed_forward_length"],
        num_hidden_layers=llama["block_count"],
        num_attention_heads=llama["attention.head_count"],
        num_key_value_heads=llama["attention.head_count_kv"],
        head_dim=llama["rope.dimension_count"],
        max_position_embeddings=llama["context_length"],
        # Stored in fp32, where 1e-5 reads 9.9999997e-06.
        rms_norm_eps=round(llama["attention.layer_norm_rms_epsilon"], 9),
        rope_parameters={"rope_type": "default", "rope_theta": llama["rope.freq_base"]},
        tie_word_embeddings=True,
        bos_token_id=fields["tokenizer.ggml.bos_token_id"],
        eos_token_id=fields["tokenizer.ggml.eos_token_id"],
        pad_token_id=fields["tokenizer.ggml.padding_token_id"],
    )


def _hf_name(name: str) -> str:
    """blk.3.attn_q.weight -> model.layers.3.self_attn.q_proj.weight, as transformers names a Llama."""
    *layer, part, kind = name.removeprefix("blk.").split(".")
    return ".".join(["model", *(["layers", *layer] if layer else []), HF_PARTS[part], kind])


def _uninterleave(weight: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Rows of one head (2i, 2i+1) -> (i, i + head_dim / 2). weight (heads * head_dim, in)."""
    return weight.view(-1, head_dim // 2, 2, weight.shape[1]).transpose(1, 2).reshape(weight.shape)


def _tokenizer(fields: dict[str, Any]) -> PreTrainedTokenizerBase:
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    tokens, kinds = fields["tokenizer.ggml.tokens"], fields["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ")) for merge in fields["tokenizer.ggml.merges"]]
    backend = Tokenizer(models.BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    backend.decoder = decoders.ByteLevel()
    control = [token for token, kind in zip(tokens, kinds, strict=True) if kind == CONTROL_TOKEN]
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in control])
    roles = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    named: Any = {key: tokens[fields[f"tokenizer.ggml.{role}_token_id"]] for key, role in roles.items()}
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        chat_template=fields["tokenizer.chat_template"],
        model_max_length=fields["llama.context_length"],
        clean_up_tokenization_spaces=False,
        **named,
    )
