"""A dense checkpoint made a mixture of experts that computes the same function: a real MoE to try things on.

Every expert starts as a copy of the dense MLP and the weights of the chosen experts sum to 1, so whatever
the router says the output is the dense model's. Noise on the copies, or a brief training, makes them differ.
"""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from lowbitrl.models import load_model

# Architectures that a mixture repeats module for module, but for the MLP.
TARGETS = {"llama": "mixtral", "mistral": "mixtral", "qwen3": "qwen3_moe"}
RECORD = "upcycle.json"


def upcycle_checkpoint(
    name: str | Path, out: Path, experts: int, top_k: int, noise: float = 0.0, seed: int = 0
) -> Path:
    """Load `name` in BF16, upcycle it, and write model and tokenizer to `out`.

    Returns:
        `out`, a checkpoint folder under the target architecture's own names.

    Raises:
        FileExistsError: `out` holds files already. ValueError: see `upcycle`; and what `load_model` raises.
    """
    if out.exists() and any(out.iterdir()):
        raise FileExistsError(f"{out} is not empty; give a new folder")
    dense, tokenizer = load_model(name)
    model = upcycle(dense, experts, top_k, noise, seed)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    made = {"source": str(name), "experts": experts, "top_k": top_k, "noise": noise, "seed": seed}
    (out / RECORD).write_text(json.dumps(made, indent=2) + "\n")
    return out


@torch.no_grad()
def upcycle(
    dense: PreTrainedModel, experts: int, top_k: int, noise: float = 0.0, seed: int = 0
) -> PreTrainedModel:
    """A mixture of `experts` copies of each MLP of `dense`, `top_k` of them taken by each token.

    Args:
        dense: a Llama, Mistral (both become Mixtral) or Qwen3 model (becomes Qwen3-MoE).
        noise: Gaussian noise on every expert, in standard deviations of the matrix it is added to; 0
            keeps the dense function.
        seed: of the router (standard deviation `initializer_range`) and the noise.

    Returns:
        The mixture, in eval mode, with the dtype of `dense`; its weights are its own.

    Raises:
        ValueError: counts that cannot be meant, noise below 0, another architecture, or biases that the
            target has no place for.
    """
    if experts < 1 or not 1 <= top_k <= experts:
        raise ValueError(
            f"experts={experts}, top_k={top_k}: give at least 1 expert, and top_k from 1 to experts"
        )
    if noise < 0:
        raise ValueError(f"noise={noise} is a standard deviation; give 0 or more")
    config = _config(dense.config, experts, top_k)
    model = AutoModelForCausalLM.from_config(config, dtype=dense.dtype).eval()
    source, generator = dict(dense.named_parameters()), torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if name.endswith(".mlp.gate.weight"):
            parameter.copy_(_normal(parameter, generator) * config.initializer_range)
        elif ".mlp.experts." in name:
            whole = _dense_weight(name, source).expand_as(parameter)
            parameter.copy_(
                whole + noise * whole.float().std() * _normal(parameter, generator) if noise else whole
            )
        else:
            parameter.copy_(source[name])
    if dense.generation_config is not None:
        model.generation_config = dense.generation_config
    return model


def _config(dense: PretrainedConfig, experts: int, top_k: int) -> PretrainedConfig:
    target = TARGETS.get(dense.model_type)
    if target is None:
        raise ValueError(f"{dense.model_type} has no mixture of its shape here; known: {', '.join(TARGETS)}")
    for field in ("attention_bias", "mlp_bias"):
        if getattr(dense, field, False) and not (target == "qwen3_moe" and field == "attention_bias"):
            raise ValueError(f"{field}=true: {target} has no such bias, so the function would change")
    known = AutoConfig.for_model(target).to_dict().keys()
    identity = {"model_type", "architectures", "transformers_version"}
    shared = {k: v for k, v in dense.to_dict().items() if k in known and k not in identity}
    shared["sliding_window"] = getattr(dense, "sliding_window", None)
    count = "num_local_experts" if target == "mixtral" else "num_experts"
    own = {count: experts, "num_experts_per_tok": top_k}
    if target == "qwen3_moe":
        own |= {
            "moe_intermediate_size": dense.intermediate_size,
            "norm_topk_prob": True,
            "decoder_sparse_step": 1,
        }
    return AutoConfig.for_model(target, **(shared | own))


def _dense_weight(name: str, source: dict[str, nn.Parameter]) -> Tensor:
    """What one expert of the stack `name` is a copy of: (2I, H) of gate over up, or (H, I)."""
    mlp, _, leaf = name.partition(".experts.")
    if leaf == "down_proj":
        return source[f"{mlp}.down_proj.weight"]
    return torch.cat([source[f"{mlp}.gate_proj.weight"], source[f"{mlp}.up_proj.weight"]])


def _normal(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.randn(like.shape, generator=generator).to(like.device)
