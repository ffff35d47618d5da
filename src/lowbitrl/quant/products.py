"""What the rollout multiplies with: the learner's products, or kernels that read low-bit bytes.

    "learner"   decoded weights, rounded to the compute dtype with their global scale in them, times BF16 inputs by
                the library's product: the learner's own, so the same bytes and input give the same bits
    "low-bit"   bytes as published; block scales on the weights, the global scale on the fp32 sums

Both compute sum_k x_k w_k. A decoded NVFP4 weight has one rounding more, at most 2^-8 of it, and fp32 sums have an
order of their own: on the same input the two are apart by at most (2^-8 + K 2^-23) sum_k |x_k w_k| and a rounding
of each result, 2^-8 of it. Quantized activations can pass that on as flipped codes.
"""

from __future__ import annotations

import torch
from torch import nn

from lowbitrl.kernels.w4a16_choice import measured_on
from lowbitrl.kernels.weights4 import why_not_format4, why_not_weight4
from lowbitrl.quant.experts import WornExperts
from lowbitrl.quant.linear import CODE_PAIRS, CODES_CHECKED_ON, RolloutLinear, most_tokens
from lowbitrl.quant.plan import Plan

REMEDY = "set rollout.kernels='learner'"


def refuse_low_bit(plan: Plan, model: nn.Module, side: str, keep_decoded_experts: bool) -> None:
    """Raise ValueError where kernels="low-bit" could not run a single product, or contradicts another choice."""
    parameter = next(model.parameters())
    reason = why_not_low_bit(plan, parameter.device, parameter.dtype)
    if side != "rollout":
        reason = "the learner multiplies decoded weights"
    elif keep_decoded_experts:
        reason = "keep_decoded_experts holds decoded experts to multiply by; set one of them"
    if reason:
        raise ValueError(f"kernels='low-bit' can't run here: {reason}; {REMEDY}")


def why_not_low_bit(plan: Plan, device: torch.device, dtype: torch.dtype) -> str | None:
    """Why no product of this plan can read low-bit bytes, or None."""
    if device.type != "cuda":
        return f"the kernels run on CUDA, the model is on {device.type}"
    if dtype != torch.bfloat16:
        return f"the kernels multiply bfloat16, the model computes in {dtype}"
    if measured_on() is None:
        return "the kernels have been checked on no GPU yet"
    rows = [layer for layer in plan.layers if layer.weight]
    if any(why_not_format4(layer.weight or "") is None for layer in rows):
        return None
    codes = {(layer.activation, layer.weight) for layer in rows if layer.layout is not None} & CODE_PAIRS
    if codes and CODES_CHECKED_ON is not None:
        return None
    return f"rollout={plan.recipe.rollout!r} has no weights that they read"


def describe_products(model: nn.Module) -> str:
    """One line for a person: what the linears and experts of a prepared rollout model multiply with."""
    attached = model.__dict__["lowbitrl"]
    if attached.kernels == "learner":
        return "rollout products: the learner's, by decoded weights (rollout.kernels = 'learner')"
    linears = [m for m in model.modules() if isinstance(m, RolloutLinear) and m.encoded is not None]
    reading = [m for m in linears if m.encoded is not None and why_not_weight4(m.encoded) is None]
    most = sorted({most_tokens(m.encoded) for m in reading if m.encoded is not None})
    few = f" (up to {' or '.join(map(str, most))} tokens a pass)" if most else ""
    parts = [f"{len(reading)} of {len(linears)} linears{few}"]
    worn = worn_experts(model)
    parts += [_of_experts(worn)] if worn else []
    return (
        f"rollout products: low-bit kernels in {' and '.join(parts)}, the learner's elsewhere; their rounding differs "
        "from the learner's and counts as engine drift (rollout.kernels = 'low-bit')"
    )


def why_experts_wait(model: nn.Module) -> str | None:
    """Why the host must see a rollout's routing between two launches, or None: all its experts read bytes."""
    for experts in worn_experts(model):
        reason = experts.why_not_bytes() if experts.low_bit else "rollout.kernels = 'learner'"
        if reason:
            return reason
    return None


def worn_experts(model: nn.Module) -> list[WornExperts]:
    """What the experts modules of a prepared model wear."""
    return [m.__dict__["lowbitrl_experts"] for m in model.modules() if "lowbitrl_experts" in m.__dict__]


def _of_experts(worn: list[WornExperts]) -> str:
    reasons = [reason for reason in (experts.why_not_bytes() for experts in worn) if reason]
    why = f" (not the others: {', '.join(sorted(set(reasons)))})" if reasons else ""
    return f"experts of {len(worn) - len(reasons)} of {len(worn)} layers{why}"
