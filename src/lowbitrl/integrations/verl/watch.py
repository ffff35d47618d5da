"""Sentinel and decomposition in verl's logger: what the learner says of the tokens that the rollout sampled.

verl scores every sampled batch with the learner before it updates. Those log-probabilities against the
rollout's are the sentinel's measurement, of all tokens and at no cost; a jump over the run's own floor stops
the run. Now and then a few responses are scored again under each arithmetic between the learner's and the
rollout's, and their mismatch comes apart: `decomposition/*`, whose means add up to the total's.

With a residual chosen over a batch the rollout's batch was another one; what that makes is in the engine's term.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from verl.utils import tensordict_utils as tu
from verl.workers.utils.padding import no_padding_2_padding

from lowbitrl.diagnose.chain import ENGINE, rungs, start
from lowbitrl.integrations.verl.losses import padded
from lowbitrl.integrations.verl.settings import LearnerSettings
from lowbitrl.objectives import mismatch_metrics
from lowbitrl.quant.recipe import Recipe
from lowbitrl.quant.wearing import wearing
from lowbitrl.sync.sentinel import Sentinel

if TYPE_CHECKING:
    from lowbitrl.integrations.verl.engine import LowbitEngine


class Watch:
    """What one rank has seen since the last update, and the run's floor."""

    def __init__(self, engine: LowbitEngine, settings: LearnerSettings, recipe: Recipe) -> None:
        self.engine, self.settings = engine, settings
        self.metrics: dict[str, float] = {}
        self.batches = 0
        own = settings.sentinel
        self.sentinel = own and Sentinel(own, recipe, (), lambda s: [], lambda s: [])

    def compare(self, data: Any, output: Any) -> None:
        """Compare a scored batch with what its rollout said; nothing where it said nothing.

        Raises:
            SentinelError: the mean mismatch over all ranks is over the run's floor, or not finite.
        """
        if "rollout_log_probs" not in data or "log_probs" not in output.get("model_output", {}):
            return
        learner, rollout, mask = _sides(output["model_output"]["log_probs"], data)
        found = mismatch_metrics(learner, rollout, mask)
        self.metrics |= {k: v.item() for k, v in found.items() if k.startswith("mismatch/")}
        self.metrics["sync/version"] = float(self.engine.version)
        if self.sentinel is not None:
            value = self._mean(learner, rollout, mask)
            self.metrics["sync/sentinel"] = self.sentinel.judge(
                value, self.engine.version, lambda: _blame(self.decompose(data))
            )
        every = self.settings.decompose_every
        if every and self.batches % every == 0:
            self.metrics |= self.decompose(data)
        self.batches += 1

    def collect(self) -> dict[str, list[float]]:
        """The metrics since the last call, a list a key: verl averages over it, and over ranks."""
        metrics, self.metrics = self.metrics, {}
        return {name: [value] for name, value in metrics.items()}

    def decompose(self, data: Any) -> dict[str, float]:
        """Mean, and mean size, of what each step of the chain adds on the first rows of a batch, nats a token."""
        rows = tu.index_select_tensor_dict(data, list(range(min(self.settings.decompose_rows, len(data)))))
        tu.assign_non_tensor(rows, micro_batch_size_per_gpu=1, calculate_entropy=False)
        assert self.engine.plan is not None
        recipe = self.engine.plan.recipe
        chain = rungs(recipe)
        above = chain[start(recipe, chain) + 1 :]
        own, rollout, mask = _sides(self.engine.score(rows), rows)
        scores = [own]
        for rung in above:
            with wearing(self.engine.module, rung.recipe, rung.side):
                scores.append(_sides(self.engine.score(rows), rows)[0])
        names = [*(rung.adds for rung in above), ENGINE, "total"]
        terms = [a - b for a, b in zip(scores, [*scores[1:], rollout], strict=True)] + [own - rollout]
        means = {f"decomposition/{n}": t[mask].mean().item() for n, t in zip(names, terms, strict=True)}
        sizes = {
            f"decomposition/{n}_abs": t[mask].abs().mean().item() for n, t in zip(names, terms, strict=True)
        }
        return means | sizes

    def _mean(self, learner: Tensor, rollout: Tensor, mask: Tensor) -> float:
        """Mean |learner - rollout| over the tokens of all ranks, so that all judge alike."""
        gap = torch.where(mask, (learner - rollout).abs(), 0.0)
        sums = torch.stack([gap.sum(), mask.sum().to(gap.dtype)])
        dist.all_reduce(sums, group=self.engine.get_data_parallel_group())
        return (sums[0] / sums[1].clamp(min=1)).item()


def _sides(logprobs: Tensor, data: Any) -> tuple[Tensor, Tensor, Tensor]:
    """Learner (from whole sequences), rollout and mask, (B, T) each."""
    learner = no_padding_2_padding(logprobs, data).float()
    rollout = padded(data, "rollout_log_probs")
    mask = padded(data, "response_mask")
    assert rollout is not None
    assert mask is not None
    return learner, rollout.to(learner.device), mask.to(learner.device).bool()


def _blame(terms: dict[str, float]) -> str:
    sizes = {k: v for k, v in terms.items() if k.endswith("_abs") and not k.endswith("total_abs")}
    worst = max(sizes, key=lambda name: sizes[name])
    name = worst.removeprefix("decomposition/").removesuffix("_abs")
    return f"{name} adds most of it ({sizes[worst]:.3f} nats a token on a few responses of this batch)"
