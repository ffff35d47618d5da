"""The learner: scores responses, takes gradient steps on an objective, refuses to step on NaN."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.distributed import ranks
from lowbitrl.distributed.balance import Pass, deal
from lowbitrl.distributed.sharding import DistributedConfig, device_of, shard
from lowbitrl.formats import Calibrator
from lowbitrl.objectives import (
    batch_denominator,
    error_token_metrics,
    kl_estimate,
    mismatch_metrics,
    policy_loss,
)
from lowbitrl.quant import attachment, forget_bytes, observing, recomputation
from lowbitrl.trainer.batch import TrainingBatch, micro_batches
from lowbitrl.trainer.config import ObjectiveConfig, TrainerConfig
from lowbitrl.trainer.logprobs import check_head, response_logprobs
from lowbitrl.trainer.optim import MasterOptimizer, OptimizerConfig
from lowbitrl.trainer.routes import RoutePass, agreement_metrics

Metrics = dict[str, float]
RoutesOf = Callable[[TrainingBatch], RoutePass | None]


class NonFiniteError(RuntimeError):
    """A loss or gradient is NaN or Inf; no parameter has been touched by it."""


class Trainer:
    """Owns the learner, its optimizer and, where a KL is asked for, the frozen reference.

    Args:
        model: prepared with side="learner".
        temperature: of the rollouts; the learner scores the same processed distribution.
        seed: orders mini-batches.
        distributed / device: how learner and reference are spread over processes, where there are several.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        config: TrainerConfig,
        objective: ObjectiveConfig,
        optimizer: OptimizerConfig,
        *,
        temperature: float = 1.0,
        seed: int = 0,
        distributed: DistributedConfig | None = None,
        device: torch.device | None = None,
    ) -> None:
        check_head(model)
        self.model = model
        if config.routing_replay != "none" and not attachment(model).routing.names:
            raise ValueError(
                f"routing_replay={config.routing_replay!r} needs a mixture of experts; this model has no routers"
            )
        _check_bypass(config, objective)
        self.config = config
        self.objective = objective
        self.temperature = temperature
        self.seed = seed
        self.reference = _frozen_copy(model) if objective.kl_coef else None
        # Dropout would make the learner another policy than the one that is published; train mode
        # only switches checkpointing on.
        refuse_dropout(model)
        model.train(config.gradient_checkpointing)
        if config.gradient_checkpointing:
            _enable_checkpointing(model)
        spread = distributed or DistributedConfig(), device or model.device
        shard(model, *spread, masters=optimizer.masters == "float32")
        if self.reference is not None:
            shard(self.reference, *spread, masters=False)
        self.optimizer = MasterOptimizer(model, optimizer)

    @torch.no_grad()
    def score(self, batch: TrainingBatch, model: PreTrainedModel | None = None) -> Tensor:
        """Log-probabilities of the responses, (B, T) fp32 on the CPU, zeros where masked.

        Experts are replayed as far as `routing_replay` and the batch's routes say; another model's never.
        """
        return self._score(batch, self._routes if model is None else _own_choice, model)[0]

    def reference_kl(self, batch: TrainingBatch) -> Tensor:
        """KL of each response to the frozen start policy by the objective's estimator, summed over its
        tokens, (B,) fp32 nats: what `kl_in="reward"` charges.

        Raises:
            ValueError: the objective has no KL, so no reference is kept.
        """
        if self.reference is None:
            raise ValueError("kl_coef=0 keeps no reference policy; set objective.kl_coef")
        ours, theirs = self.score(batch), self.score(batch, self.reference)
        return kl_estimate(ours, theirs, batch.mask, kind=self.objective.kl_estimator).sum(-1)

    def _score(
        self, batch: TrainingBatch, passes: RoutesOf, model: PreTrainedModel | None = None
    ) -> tuple[Tensor, dict[int, Tensor]]:
        """Log-probabilities (B, T), and the experts chosen by row where `passes` records them."""
        scores, chosen = torch.zeros_like(batch.rollout_logprobs), {}
        for work in self._passes(batch):
            micro = batch.select(work.rows)
            routes = passes(micro)
            logprobs, _ = self._forward(micro, routes, model)
            if work.index is not None:
                scores[work.rows, : logprobs.shape[1]] = logprobs.cpu()
                chosen.update(zip(work.rows, routes.own if routes else (), strict=False))
        everyone = ranks.gather(chosen)
        return ranks.total(scores), {row: own for part in everyone for row, own in part.items()}

    def _passes(self, batch: TrainingBatch) -> list[Pass]:
        """This rank's forward passes over `batch`."""
        lengths = batch.lengths
        cut = lambda tokens: micro_batches(lengths, tokens, self.config.layout)  # noqa: E731
        return deal(cut, self.config.micro_batch_tokens, lengths, ranks.size())[ranks.rank()]

    def _routes(self, batch: TrainingBatch) -> RoutePass | None:
        """What the routers are told in a pass over `batch`."""
        replay = self.config.routing_replay != "none"
        if self.config.routing_replay == "R3" and batch.routes is None:
            raise ValueError(
                "routing_replay='R3' needs the rollout's routes; set rollout.record_routing=true"
            )
        return None if batch.routes is None else RoutePass(batch.routes, replay)

    @torch.no_grad()
    def _first_score(self, batch: TrainingBatch) -> tuple[Tensor, TrainingBatch]:
        """Old log-probabilities, and the batch whose routes the passes after them replay."""
        if self.config.routing_replay != "R2":
            return self.score(batch), batch
        scores, chosen = self._score(batch, lambda micro: RoutePass())
        return scores, dataclasses.replace(batch, routes=tuple(chosen[row] for row in range(len(batch))))

    def update(self, batch: TrainingBatch, step: int) -> Metrics:
        """Train on one batch of rollouts.

        With one optimizer step a batch and no correction that rejects, the log-probabilities of
        that step's own forward are the old ones (the policy has not moved): one pass less.
        Static activation scales observe the passes, for the next publish.

        Raises:
            NonFiniteError: naming the step and what was not finite; parameters are as before the
                optimizer step that failed.
        """
        # Whatever ran before may have switched gradients off for good: a reward model's file does, as a rule.
        with torch.enable_grad(), observing(self.model):
            metrics = self._update(batch, step)
        _observe_together(attachment(self.model).scales, device_of(self.model))
        scales = attachment(self.model).scales.values()
        # Inputs that passed the maximum they were scaled by: they saturated wherever it was in use.
        saturated = (
            {"quant/saturated_sites": sum(s.overflows for s in scales) / len(scales)} if scales else {}
        )
        return metrics | saturated

    def _update(self, batch: TrainingBatch, step: int) -> Metrics:
        old = None
        if self.config.old_logprobs == "rollout":
            old = batch.rollout_logprobs
        elif self._needs_old(len(batch)):
            old, batch = self._first_score(batch)
        elif self.config.routing_replay == "R2":
            batch = dataclasses.replace(batch, routes=None)
        in_loss = self.reference is not None and self.objective.kl_in == "loss"
        reference = self.score(batch, self.reference) if in_loss else None
        total: list[tuple[int, Metrics]] = []
        seen = torch.zeros_like(batch.rollout_logprobs)
        for rows in self._mini_batches(len(batch), step):
            metrics, logprobs = self._step(batch.select(rows), _rows(old, rows), _rows(reference, rows), step)
            seen[rows] = logprobs
            total.append((len(rows), metrics))
        before = seen if old is None or self.config.old_logprobs == "rollout" else old
        compared = mismatch_metrics(before, batch.rollout_logprobs, batch.mask)
        errors = error_token_metrics(before, batch.advantages, batch.mask, tokens=_token_matrix(batch))
        return _mean(total) | {name: float(value) for name, value in (compared | errors).items()}

    def _needs_old(self, size: int) -> bool:
        several = self.config.epochs > 1 or 0 < self.config.mini_batch < size
        return several or self.objective.correction != "none"

    def _mini_batches(self, size: int, step: int) -> Iterator[list[int]]:
        count = self.config.mini_batch or size
        for epoch in range(self.config.epochs):
            generator = torch.Generator().manual_seed(self.seed * 1_000_003 + step * 1009 + epoch)
            order = torch.randperm(size, generator=generator).tolist()
            for first in range(0, size, count):
                yield order[first : first + count]

    def _step(
        self, batch: TrainingBatch, old: Tensor | None, reference: Tensor | None, step: int
    ) -> tuple[Metrics, Tensor]:
        """One optimizer step; returns metrics and this forward's log-probabilities (B, T)."""
        denominator = batch_denominator(
            self.objective.name,
            mask=batch.mask,
            old_logprobs=old,
            rollout_logprobs=batch.rollout_logprobs,
            **self.objective.correction_options(),
        )
        seen, parts = torch.zeros_like(batch.rollout_logprobs), []
        for work in self._passes(batch):
            rows, micro = work.rows, batch.select(work.rows)
            routes = self._routes(micro)
            logprobs, entropy = self._forward(micro, routes)
            if work.index is None:
                # Its gradients are the others' to wait for, and zeros.
                (0.0 * logprobs.sum()).backward()
                continue
            out = self._loss(micro, logprobs, entropy, _rows(old, rows), _rows(reference, rows), denominator)
            out.loss.backward()
            # Only now: a look at the device waits for all that was asked of it.
            seen[rows, : logprobs.shape[1]] = logprobs.detach().cpu()
            metrics = _numbers(out.metrics | {"": out.loss.detach()}, logprobs.device)
            loss = metrics.pop("")
            parts.append(
                _Part(work.index, rows, loss, int(micro.mask.sum()), metrics | self._agreement(routes))
            )
        everyone = sorted((p for of_rank in ranks.gather(parts) for p in of_rank), key=lambda p: p.index)
        # After the last pass, on all ranks: one that stopped in the middle would leave the others waiting.
        for part in everyone:
            self._check("loss", part.loss, step, batch.select(part.rows))
        norm = self.optimizer.gradient_norm()
        self._check("gradient", float(norm), step, batch)
        self.optimizer.step(norm)
        forget_bytes(self.model)
        totals = {"actor/loss": sum(part.loss for part in everyone), "actor/grad_norm": float(norm)}
        return _mean([(part.tokens, part.metrics) for part in everyone]) | totals, ranks.total(seen)

    def _agreement(self, routes: RoutePass | None) -> Metrics:
        by_layer = routes.agreement() if routes is not None else None
        return {} if by_layer is None else agreement_metrics(by_layer, attachment(self.model).routing.names)

    def _forward(
        self, batch: TrainingBatch, routes: RoutePass | None, model: PreTrainedModel | None = None
    ) -> tuple[Tensor, Tensor]:
        return response_logprobs(
            model or self.model,
            batch.prompts,
            batch.responses,
            temperature=self.temperature,
            layout=self.config.layout,
            chunk=self.config.logprob_chunk,
            routes=routes,
            entropy_gradient=self.objective.entropy_coef > 0,
        )

    def _loss(
        self,
        batch: TrainingBatch,
        logprobs: Tensor,
        entropy: Tensor,
        old: Tensor | None,
        reference: Tensor | None,
        denominator: Tensor,
    ) -> Any:
        width, device = logprobs.shape[1], logprobs.device
        clip = lambda t: t[:, :width].to(device)  # noqa: E731
        return policy_loss(
            self.objective.name,
            logprobs=logprobs,
            old_logprobs=logprobs.detach() if old is None else clip(old),
            rollout_logprobs=clip(batch.rollout_logprobs),
            advantages=batch.advantages.to(device),
            mask=clip(batch.mask),
            denominator=denominator.to(device),
            ref_logprobs=None if reference is None else clip(reference),
            entropy=entropy,
            kl_coef=0.0 if reference is None else self.objective.kl_coef,
            kl_kind=self.objective.kl_estimator,
            entropy_coef=self.objective.entropy_coef,
            **self.objective.correction_options(),
            **self.objective.parameters,
        )

    def _check(self, what: str, number: float, step: int, batch: TrainingBatch) -> None:
        if not math.isfinite(number):
            self.optimizer.zero_grad()
            raise NonFiniteError(
                f"{what} is {number} at step {step}, in a batch of {len(batch)} responses whose first prompt is "
                f"{list(batch.prompts[0])[:16]}...; no optimizer step was taken with it"
            )


@dataclasses.dataclass(frozen=True)
class _Part:
    """What one micro-batch left, whichever rank ran it: its place, rows, loss, trained tokens, metrics."""

    index: int
    rows: list[int]
    loss: float
    tokens: int
    metrics: Metrics


def _observe_together(scales: Mapping[str, Calibrator], device: torch.device) -> None:
    """Make the maxima that static sites saw those of all ranks' passes."""
    mine = {name: float(scale.seen) for name, scale in scales.items() if scale.seen is not None}
    for of_rank in ranks.gather(mine):
        for name, peak in of_rank.items():
            scales[name].observe(torch.tensor([peak], device=device))


def _check_bypass(config: TrainerConfig, objective: ObjectiveConfig) -> None:
    if config.old_logprobs == "learner":
        return
    if objective.correction != "none":
        raise ValueError(
            f"objective.correction={objective.correction!r} weighs old against rollout log-probabilities, which "
            "old_logprobs='rollout' makes equal; set correction='none', or old_logprobs='learner'"
        )
    if config.routing_replay == "R2":
        raise ValueError(
            "routing_replay='R2' replays the pass that old_logprobs='rollout' leaves out; use 'R3' or 'none'"
        )


def _own_choice(batch: TrainingBatch) -> None:
    """No routes: the routers choose."""


def refuse_dropout(model: PreTrainedModel) -> None:
    """ValueError where the model's config asks for noise in training; names the setting."""
    for field in ("attention_dropout", "hidden_dropout", "resid_pdrop", "dropout", "router_jitter_noise"):
        value = getattr(model.config, field, 0) or 0
        if value:
            raise ValueError(
                f"config.{field}={value}: noise makes the trained policy differ from the published one; set it to 0"
            )


def _enable_checkpointing(model: PreTrainedModel) -> None:
    arguments = {"use_reentrant": False, "context_fn": recomputation(model)}
    # transformers 5.24 renamed this method and its argument, and warns about the old name.
    enable = getattr(model, "activation_checkpointing_enable", None)
    if enable is not None:
        enable(activation_checkpointing_kwargs=arguments)
    else:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=arguments)


def _frozen_copy(model: PreTrainedModel) -> PreTrainedModel:
    reference = copy.deepcopy(model)
    reference.requires_grad_(False)
    return reference.eval()


def _rows(tensor: Tensor | None, rows: list[int]) -> Tensor | None:
    return None if tensor is None else tensor[rows]


def _token_matrix(batch: TrainingBatch) -> Tensor:
    tokens = torch.zeros(batch.mask.shape, dtype=torch.long)
    for row, response in zip(tokens, batch.responses, strict=True):
        row[: len(response)] = torch.tensor(response)
    return tokens


def _numbers(named: Mapping[str, Tensor | float], device: torch.device) -> Metrics:
    """Scalars by name, most of them on `device`, fetched in one copy."""
    doubles = [torch.as_tensor(v, dtype=torch.float64, device=device).reshape(()) for v in named.values()]
    return dict(zip(named, torch.stack(doubles).tolist(), strict=True))


def _mean(parts: list[tuple[int, Metrics]]) -> Metrics:
    """Weighted mean of each metric over the parts that have it."""
    names = {name: None for _, metrics in parts for name in metrics}
    return {name: _weighted([(w, m[name]) for w, m in parts if name in m]) for name in names}


def _weighted(pairs: list[tuple[int, float]]) -> float:
    weight = sum(w for w, _ in pairs)
    return sum(w * v for w, v in pairs) / weight if weight else 0.0
