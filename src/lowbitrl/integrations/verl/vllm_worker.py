"""vLLM's worker under verl (`worker_extension_cls`): takes the published stream, serves it whole or not at all.

verl's own extension would load BF16 weights, or quantize them again; ours receives by verl's transport and
writes by the plan, as `rollout.vllm.transfer` does for our own engines.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

from verl.workers.rollout.vllm_rollout.bucketed_weight_transfer import BucketedWeightReceiver
from verl.workers.rollout.vllm_rollout.utils import vLLMColocateWorkerExtension

from lowbitrl.integrations.verl.stream import Arrivals
from lowbitrl.rollout.vllm.wearing import Wearing, write_all


class LowbitWorker(vLLMColocateWorkerExtension):
    """verl's extension with another way to load weights."""

    model_runner: Any
    device: Any

    @cached_property
    def lowbitrl_wearing(self) -> Wearing:
        """Everything this worker serves.

        Raises:
            ValueError: vLLM was not started with quantization='lowbitrl', or a planned module is not worn.
        """
        plan = getattr(self.model_runner.vllm_config.quant_config, "plan", None)
        if plan is None:
            raise ValueError(
                "this vLLM serves no plan: rollout.engine_kwargs.vllm.quantization must be 'lowbitrl', as the "
                "overrides of `lowbitrl verl overrides` have it"
            )
        return Wearing(self.model_runner.model, plan)

    def update_weights_from_ipc(
        self, peft_config: Any = None, base_sync_done: bool = False, use_shm: bool = False
    ) -> None:
        """Receive a version and serve it; the old one stays where it is refused.

        Raises:
            ValueError: a stream that is not exactly its manifest's, another plan's version, or an adapter.
        """
        if peft_config:
            raise ValueError("an adapter came, which is not published as bytes; set model.lora_rank=0")
        arrivals = Arrivals()
        receiver = BucketedWeightReceiver(self._get_zmq_handle(), self.device, use_shm)
        receiver.receive_weights(on_bucket_received=lambda named, is_last: arrivals.take(named))
        write_all(self.lowbitrl_wearing.writes(arrivals.tensors, arrivals.manifest()))

    def lowbitrl_report(self) -> dict[str, Any]:
        """What is active; see `Wearing.report`."""
        return self.lowbitrl_wearing.report()

    def lowbitrl_state(self) -> dict[str, int]:
        """Checksums of what is served; see `Wearing.state`."""
        return self.lowbitrl_wearing.state()
