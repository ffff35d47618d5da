"""The weight-transfer backend "lowbitrl": a version arrives in buckets, is checked whole, then served at once.

    start     forget what an earlier, broken-off update left
    update    {"tensors": {name: tensor}} in one process, {"path": file.safetensors} across processes,
              and at last {"manifest": ...}: checksums, names, shapes and the plan's digest are verified here
    update    {"abandon": true}: give up; vLLM leaves its update state, the old version goes on serving
    finish    copy, the only step that writes, and the only one that cannot be refused

vLLM's `load_weights` is never called: it would put unquantized weights over served bytes without a word.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from safetensors.torch import load_file
from torch import Tensor
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from lowbitrl.rollout.vllm.sealed import manifest_of
from lowbitrl.rollout.vllm.wearing import Wearing, Write, write_all


@dataclass
class InitInfo(WeightTransferInitInfo):
    """Digest of the plan that the learner wears."""

    digest: str


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):
    """One message of an update; exactly one field is set."""

    tensors: dict[str, Tensor] | None = None
    path: str | None = None
    manifest: dict[str, Any] | None = None
    abandon: bool = False


class LowbitTransfer(WeightTransferEngine[InitInfo, UpdateInfo]):
    """The worker's side; vLLM makes one a worker."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(self, config: Any, vllm_config: Any, device: Any, model: Any) -> None:
        super().__init__(config, vllm_config, device, model)
        self._wearing: Wearing | None = None
        self._arrived: dict[str, Tensor] = {}
        self._sealed: list[Write] | None = None

    @property
    def wearing(self) -> Wearing:
        """The table of what this worker serves, made when first asked for: after the weights are loaded."""
        if self._wearing is None:
            plan = getattr(self.vllm_config.quant_config, "plan", None)
            if plan is None:
                raise ValueError("this vLLM was not started with quantization='lowbitrl'")
            self._wearing = Wearing(self.model, plan)
        return self._wearing

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Refuse a learner with another plan; ValueError."""
        if init_info.digest != self.wearing.plan.digest:
            raise ValueError(
                f"the learner wears plan {init_info.digest}, this vLLM {self.wearing.plan.digest}; start it with the "
                "learner's plan"
            )

    def start_weight_update(self) -> None:
        """Begin with nothing."""
        self._arrived, self._sealed = {}, None

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Take one message; a refusal leaves nothing behind."""
        try:
            self._take(update_info)
        except BaseException:
            self.start_weight_update()
            raise

    def _take(self, message: UpdateInfo) -> None:
        if message.abandon:
            raise RuntimeError("update abandoned; the version before it is still served")
        if message.manifest is not None:
            self._sealed = self.wearing.writes(self._arrived, manifest_of(message.manifest))
            return
        bucket = load_file(message.path) if message.path is not None else message.tensors or {}
        self._sealed = None
        self._arrived.update({name: tensor.to(self.device) for name, tensor in bucket.items()})

    def finish_weight_update(self) -> None:
        """Serve what was sealed.

        Raises:
            RuntimeError: no manifest came after the last bucket.
        """
        if self._sealed is None:
            raise RuntimeError(
                "the update was never sealed by a manifest; the version before it is still served"
            )
        write_all(self._sealed)
        self.start_weight_update()

    def shutdown(self) -> None:
        """Nothing is held open."""

    @staticmethod
    def trainer_send_weights(iterator: Any, trainer_args: Any) -> None:
        """vLLM 0.26 asks for this; our engines send by themselves."""
        raise NotImplementedError("publish with lowbitrl.sync.publisher and update a lowbitrl engine")


class WorkerExtension:
    """Methods that vLLM adds to its workers (`worker_extension_cls`): what is active, and what is served."""

    weight_transfer_engine: Any

    def lowbitrl_report(self) -> dict[str, Any]:
        """See `Wearing.report`."""
        return self.weight_transfer_engine.wearing.report()

    def lowbitrl_state(self) -> dict[str, int]:
        """See `Wearing.state`."""
        return self.weight_transfer_engine.wearing.state()

    def lowbitrl_control(self, step: str, arguments: dict[str, Any]) -> dict[str, str | None]:
        """One of vLLM's update methods, its refusal handed back as text: HTTP routes hide it."""
        if step not in ("start_weight_update", "update_weights", "finish_weight_update"):
            return {"error": f"{step!r} is no step of a weight update"}
        try:
            getattr(self, step)(**arguments)
        except Exception as error:
            return {"error": f"{type(error).__name__}: {error}"}
        return {"error": None}
