"""Sentinel and decomposition in verl's logger: what the learner says of the tokens that the rollout sampled.

verl scores every sampled batch with the learner before it updates. Those log-probabilities against the
rollout's are the sentinel's measurement, of all tokens and at no cost; a jump over the run's own floor stops
the run. Now and then a few responses are scored again under each arithmetic between a BF16 learner and the
rollout, and the mismatch comes apart into what weights, activations and engine add.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.workers.utils.padding import no_padding_2_padding

from lowbitrl.integrations.verl.losses import padded
from lowbitrl.integrations.verl.settings import LearnerSettings
from lowbitrl.objectives import mismatch_metrics
from lowbitrl.sync.sentinel import Sentinel

if TYPE_CHECKING:
    from lowbitrl.integrations.verl.engine import LowbitEngine

PREFIXES = ("mismatch/",)


class Watch:
    """What one rank has seen since the last update, and the run's floor."""

    def __init__(self, engine: LowbitEngine, settings: LearnerSettings) -> None:
        self.engine, self.settings = engine, settings
        self.metrics: dict[str, float] = {}
        self.batches = 0
        own = settings.sentinel
        self.sentinel = own and Sentinel(own, (), lambda s: [], lambda s: [])

    def compare(self, data: Any, output: Any) -> None:
        """Compare a scored batch with what its rollout said.

        Raises:
            SentinelError: the mean mismatch over all ranks is over the run's floor, or not finite.
        """
        rollout = padded(data, "rollout_log_probs")
        if rollout is None or "log_probs" not in output.get("model_output", {}):
            return
        learner = no_padding_2_padding(output["model_output"]["log_probs"], data).float()
        mask = data.select("response_mask").to_padded_tensor()["response_mask"].bool()
        rollout = rollout.to(learner.device)
        found = mismatch_metrics(learner, rollout, mask.to(learner.device))
        self.metrics |= {k: v.item() for k, v in found.items() if k.startswith(PREFIXES)}
        if self.sentinel is not None:
            value = self._mean(learner, rollout, mask.to(learner.device))
            self.metrics["sync/sentinel"] = self.sentinel.judge(value, self.engine.version, lambda: "")
        self.metrics["sync/version"] = float(self.engine.version)
        self.batches += 1

    def collect(self) -> dict[str, list[float]]:
        """The metrics since the last call, a list a key: verl averages over it, and over ranks."""
        metrics, self.metrics = self.metrics, {}
        return {name: [value] for name, value in metrics.items()}

    def _mean(self, learner: Tensor, rollout: Tensor, mask: Tensor) -> float:
        """Mean |learner - rollout| over the tokens of all ranks, so that all judge alike."""
        gap = torch.where(mask, (learner - rollout).abs(), 0.0)
        sums = torch.stack([gap.sum(), mask.sum().to(gap.dtype)])
        dist.all_reduce(sums, group=self.engine.get_data_parallel_group())
        return (sums[0] / sums[1].clamp(min=1)).item()
