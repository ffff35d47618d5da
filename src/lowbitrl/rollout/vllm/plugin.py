"""What vLLM calls in each of its processes: registers the quantization method and the weight-transfer backend."""

from __future__ import annotations

from lowbitrl.rollout.vllm.planned import QUANT_METHOD


def register() -> None:
    """Entry point of `vllm.general_plugins`; idempotent, since vLLM calls it several times.

    vLLM only logs a plugin that fails to load, so the engine asks the workers whether this one is active.
    """
    from vllm.distributed.weight_transfer.factory import WeightTransferEngineFactory
    from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config

    if QUANT_METHOD in QUANTIZATION_METHODS:
        return
    from lowbitrl.rollout.vllm.method import LowbitConfig

    register_quantization_config(QUANT_METHOD)(LowbitConfig)
    WeightTransferEngineFactory.register_engine(
        QUANT_METHOD, "lowbitrl.rollout.vllm.transfer", "LowbitTransfer"
    )
