"""What must hold before a run: the TRL that this was written for, and settings that mean what they say here.

TRL has no registry for losses or engines, so its trainer is subclassed at three methods that its authors may
change at will (16 minor versions in seven months). They are listed here with the arguments they had, and a TRL
in which one is missing or takes other arguments is refused by name.
"""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from packaging.version import Version
from transformers import PreTrainedModel

from lowbitrl.quant import Plan

OLDEST, BEFORE = "1.16", "1.17"

PRIVATE_HOOKS: dict[str, tuple[str, ...]] = {
    "_generate_single_turn": ("prompt_ids", "images", "multimodal_fields", "num_generations"),
    "_generate_and_score_completions": ("inputs",),
    "_compute_loss": ("model", "inputs"),
    "_get_per_token_logps_and_entropies": (
        "model",
        "input_ids",
        "attention_mask",
        "logits_to_keep",
        "compute_entropy",
    ),
}
"""Private methods of GRPOTrainer: the first three overridden, the last called. Arguments that are relied on."""

PRIVATE_ATTRIBUTES = ("_metrics",)
"""Of an instance: lists of numbers by "train" or "eval" and name, which TRL averages when it logs."""

OURS = "the objective decides that: give LowBitGRPOTrainer(objective=ObjectiveConfig(...))"
SAMPLED = "both sides score the whole distribution after temperature"
REFUSED = {
    "use_vllm": "the embedded engine samples",
    "use_transformers_continuous_batching": "the embedded engine has it: scheduler='continuous'",
    "generation_kwargs": SAMPLED,
    "top_p": SAMPLED,
    "top_k": SAMPLED,
    "min_p": SAMPLED,
    "repetition_penalty": SAMPLED,
    "cast_lm_head_to_fp32": "the learner alone would compute logits in fp32",
    "use_liger_kernel": "the learner alone would run other kernels than the rollout",
    "beta": "a KL to a reference is not wired here; lowbitrl train has objective.kl_coef",
    "mask_truncated_completions": "truncated responses would leave the loss and stay in nothing else",
    "loss_type": OURS,
    "importance_sampling_level": OURS,
    "epsilon": OURS,
    "epsilon_high": OURS,
    "delta": OURS,
    "top_entropy_quantile": OURS,
    "entropy_coef": OURS,
    "use_adaptive_entropy": OURS,
    "off_policy_mask_threshold": OURS,
}
"""Settings of GRPOConfig that nothing here reads, with the reason; refused where they are not TRL's default."""

REFUSED_ARGUMENTS = ("peft_config", "quantization_config", "tools", "rollout_func", "environment_factory")

OWNED_BY_TRL = {
    "advantage_scale": "GRPOConfig(scale_rewards=...)",
    "advantage_baseline": "it subtracts the group's mean",
    "drop_uninformative": "it trains every group",
    "overlong_filter": "it trains truncated responses",
    "overlong_buffer": "write it into a reward function",
    "kl_coef": "not wired here; lowbitrl train has it",
}


def check_hooks(version: str, trainer: type) -> None:
    """Refuse a TRL whose trainer is not the one that is subclassed.

    Args:
        version: of TRL. trainer: its GRPOTrainer.

    Raises:
        ImportError: another version, or a private method that is gone or takes other arguments.
    """
    if not Version(OLDEST) <= Version(version) < Version(BEFORE):
        raise ImportError(
            f"trl {version} is not supported: its private methods move from version to version; install "
            f"'trl>={OLDEST},<{BEFORE}' (pip install 'lowbitrl[trl]')"
        )
    for name, expected in PRIVATE_HOOKS.items():
        method = getattr(trainer, name, None)
        found = tuple(inspect.signature(method).parameters) if method is not None else ()
        missing = [argument for argument in expected if argument not in found]
        if missing:
            what = f"has no argument {missing[0]!r}" if method is not None else "does not exist"
            raise ImportError(
                f"GRPOTrainer.{name} {what} in trl {version}; lowbitrl relies on it and would train something else: "
                f"install 'trl>={OLDEST},<{BEFORE}' as released, and report this version"
            )


def check_attributes(trainer: Any, version: str) -> None:
    """ImportError where a private attribute of an instance is gone."""
    for name in PRIVATE_ATTRIBUTES:
        if not hasattr(trainer, name):
            raise ImportError(f"a GRPOTrainer of trl {version} has no {name}, where lowbitrl writes metrics")


def check_settings(config: Any, arguments: Mapping[str, Any]) -> None:
    """Refuse settings that would be read by nothing, or by one side only.

    Args:
        config: a GRPOConfig. arguments: what else TRL's trainer was given.

    Raises:
        ValueError: naming the first of them, its value and the remedy.
    """
    for name in REFUSED_ARGUMENTS:
        if arguments.get(name) is not None:
            raise ValueError(
                f"{name} is not supported with a low-bit rollout; leave it out, or use GRPOTrainer"
            )
    if config.bf16 or config.fp16:
        mixed = "bf16" if config.bf16 else "fp16"
        raise ValueError(
            f"{mixed}=True runs the learner under autocast, the rollout not; set GRPOConfig(bf16=False, fp16=False): "
            "the model computes in the dtype that it was loaded in, and masters=True keeps fp32 masters"
        )
    defaults = {field.name: field.default for field in fields(config)}
    for name, reason in REFUSED.items():
        if getattr(config, name) != defaults[name]:
            raise ValueError(
                f"GRPOConfig({name}={getattr(config, name)!r}) has no effect here: {reason}; leave it at "
                f"{defaults[name]!r}"
            )


def check_plan(plan: Plan, model: PreTrainedModel) -> None:
    """Refuse what a plan asks of passes that are TRL's own.

    Raises:
        ValueError: static activation scales, or a quantized output head.
    """
    if any(layer.static for layer in plan.layers):
        raise ValueError("activation_scale='static' is not observed in TRL's passes; use 'token'")
    head = model.get_output_embeddings()
    heads = [n for n, p in model.named_parameters() if head is not None and p is head.weight]
    worn = next((name for name in heads if name in plan.by_parameter), None)
    if worn is not None:
        raise ValueError(
            f"{worn}: TRL reads the head's weight past its module; keep it in BF16 (recipe.keep)"
        )
