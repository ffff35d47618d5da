"""What differs between the vLLM versions we run with: 0.26 (CUDA, torch 2.11) and 0.32 (CPU, torch 2.13)."""

from __future__ import annotations

import importlib
import inspect
import sys
from typing import Any

RUNNERS = (
    "vllm.v1.worker.gpu_model_runner",  # V1; the CPU's runner inherits from it
    "vllm.v1.worker.gpu.model_runner",  # V2, CUDA only
)


def model_runners() -> list[type]:
    """Model runner classes of this process: those whose module vLLM has imported."""
    return [sys.modules[name].GPUModelRunner for name in RUNNERS if name in sys.modules]


def finish_weight_update(llm: Any, version: int) -> None:
    """End an update; 0.32 stamps its outputs with the version, 0.26 has no such stamp."""
    if "weight_version" in inspect.signature(llm.finish_weight_update).parameters:
        llm.finish_weight_update(weight_version=str(version))
    else:
        llm.finish_weight_update()


def stamp(llm: Any, version: int) -> None:
    """The version of outputs from now on, where vLLM stamps them: what its own end of an update does last."""
    if hasattr(llm.llm_engine, "set_weight_version"):
        llm.llm_engine.set_weight_version(str(version))


def stamped_versions(output: Any) -> list[tuple[int, int, int]] | None:
    """(version, first token, past its last token) spans of a completion; None where vLLM keeps none."""
    spans = getattr(output, "weight_versions", None)
    if spans is None:
        return None
    return [(int(s.version), s.start, s.end) for s in spans if s.version != "default"]


def routed_experts_class() -> type:
    """The module that owns an MoE layer's weights."""
    return importlib.import_module("vllm.model_executor.layers.fused_moe.routed_experts").RoutedExperts
