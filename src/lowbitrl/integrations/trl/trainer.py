"""LowBitGRPOTrainer: TRL's GRPOTrainer whose rollouts are low-bit and whose learner knows it.

    __init__                          prepare(model, recipe) before TRL touches it; an engine beside it
    create_optimizer                  public: TRL's own, on fp32 masters
    _generate_single_turn             publish what changed, sample from the published bytes
    _generate_and_score_completions   the denominator of the whole batch, which no micro-batch knows
    _compute_loss                     lowbitrl.objectives by name, with the sampler's log-probabilities

Everything else is TRL's: prompts, rewards, advantages, schedules, logging, checkpoints.
"""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

from lowbitrl.integrations.shared import make_objective
from lowbitrl.integrations.trl import checks
from lowbitrl.integrations.trl.masters import keep_masters
from lowbitrl.integrations.trl.rollouts import Rollouts, name_real_tokens, scalars
from lowbitrl.models import load_model
from lowbitrl.objectives import batch_denominator, mismatch_metrics, policy_loss
from lowbitrl.quant import Recipe, forget_bytes, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.sync.sentinel import SentinelConfig
from lowbitrl.trainer.config import ObjectiveConfig
from lowbitrl.trainer.logprobs import check_head
from lowbitrl.trainer.trainer import refuse_dropout

try:
    from trl.trainer.grpo_trainer import GRPOTrainer

    import trl
except ImportError as error:
    raise ImportError(
        f"LowBitGRPOTrainer needs TRL, which does not import ({error}); pip install 'lowbitrl[trl]'"
    ) from error

DENOMINATOR = "lowbitrl_denominator"


class LowBitGRPOTrainer(GRPOTrainer):
    """TRL's GRPOTrainer with rollouts by the embedded engine under a recipe.

    Args:
        model: checkpoint folder, hub id or "demo" (loaded in BF16), or a model in the dtype to compute in.
        recipe: what rollout and learner wear; `learner="weights"` is QUADS, "full" is QaRL.
        objective: a name of `lowbitrl.objectives`, or its settings. TRL's own losses are not used.
        masters: step fp32 masters of half-precision weights. Micro-batches add up in fp32 in one process, in
            the weights' dtype in several.
        watch: when the gap between learner and engine on the watched sequences stops the run.
        scheduler / max_batch: the engine's.
        args: a GRPOConfig with bf16=False: compute is the model's dtype, on both sides.
        arguments: everything else that GRPOTrainer takes, tools, adapters and rollout functions excepted.

    Raises:
        ImportError: TRL is missing, of another version, or lacks a private method that is used.
        ValueError: a setting that would be read by nothing or by one side only.
    """

    def __init__(
        self,
        model: str | PreTrainedModel,
        *,
        recipe: Recipe,
        args: Any,
        objective: str | ObjectiveConfig = "tbpo",
        masters: bool = True,
        watch: SentinelConfig | None = None,
        scheduler: str = "auto",
        max_batch: int = 256,
        **arguments: Any,
    ) -> None:
        checks.check_hooks(trl.__version__, GRPOTrainer)
        checks.check_settings(args, arguments)
        given = objective if isinstance(objective, str) else objective.model_dump(exclude_unset=True)
        self.objective = make_objective(given, "TRL", checks.OWNED_BY_TRL)
        self.masters = masters
        self._forgets: torch.optim.Optimizer | None = None
        if isinstance(model, str):
            model, tokenizer = load_model(model)
            arguments.setdefault("processing_class", tokenizer)
        check_head(model)
        refuse_dropout(model)
        # Before TRL patches forward methods: the rollout is the plain model.
        rollout = copy.deepcopy(model)
        self.plan = prepare(model, recipe, "learner")
        checks.check_plan(self.plan, model)
        super().__init__(model=model, args=args, **arguments)
        checks.check_attributes(self, trl.__version__)
        if self.is_fsdp_enabled or self.is_deepspeed_enabled:
            raise ValueError(
                "the learner is published whole from every process, which FSDP and DeepSpeed do not hold; for "
                "several GPUs: torchrun -m lowbitrl train, or verl (docs/verl.md)"
            )
        if self.aux_loss_enabled:
            raise ValueError(
                f"router_aux_loss_coef={self.router_aux_loss_coef} is not part of our objectives; set "
                "GRPOConfig(router_aux_loss_coef=0.0)"
            )
        model.register_forward_pre_hook(name_real_tokens, with_kwargs=True)
        self.rollouts = Rollouts(
            model,
            rollout.to(self.accelerator.device),  # type: ignore[arg-type]
            self.plan,
            Sampling(
                max_tokens=args.max_completion_length,
                temperature=args.temperature,
                stop_token_ids=tuple(self.eos_token_ids),
            ),
            seed=(args.seed, self.accelerator.process_index),
            watch=watch or SentinelConfig(),
            scheduler=scheduler,
            max_batch=max_batch,
        )

    def create_optimizer(self, *args: Any, **kwargs: Any) -> torch.optim.Optimizer:
        """TRL's, stepping fp32 masters where `masters` says so."""
        made = self.optimizer is None
        optimizer = super().create_optimizer(*args, **kwargs)
        if made and self.masters:
            keep_masters(optimizer, fp32_gradients=self.accelerator.num_processes == 1)
        if self._forgets is not optimizer:
            # Fused optimizers write past the version counters that bytes are cached against.
            optimizer.register_step_post_hook(lambda *_: forget_bytes(self.rollouts.learner))
            self._forgets = optimizer
        return optimizer

    def _generate_single_turn(
        self,
        prompt_ids: list[list[int]],
        images: Any,
        multimodal_fields: dict[str, Any],
        num_generations: int,
        has_tool_images: bool = False,
    ) -> tuple[list[list[int]], list[list[float]]]:
        if images is not None or multimodal_fields:
            raise ValueError("the embedded engine samples from text alone, and these prompts hold images")
        completions, metrics = self.rollouts.generate(prompt_ids, num_generations, self.state.global_step)
        self._note(metrics)
        return [list(c.token_ids) for c in completions], [list(c.rollout_logprobs) for c in completions]

    def _generate_and_score_completions(self, inputs: list[dict[str, Any]]) -> dict[str, Any]:
        output = super()._generate_and_score_completions(inputs)
        options = self.objective.correction_options()
        own = batch_denominator(self.objective.name, mask=output["completion_mask"], **options)
        everyone: Any = self.accelerator.gather(own.to(self.accelerator.device))
        output[DENOMINATOR] = everyone.sum()
        return output

    def _compute_loss(self, model: Any, inputs: dict[str, Any]) -> Tensor:
        mask, responses = inputs["completion_mask"], inputs["completion_ids"]
        logprobs, entropy, _ = self._get_per_token_logps_and_entropies(
            model,
            torch.cat([inputs["prompt_ids"], responses], dim=1),
            torch.cat([inputs["prompt_mask"], mask], dim=1),
            responses.shape[1],
            compute_entropy=True,
        )
        # None where the policy that samples is still the one that trains: TRL has not scored it apart.
        old = inputs.get("old_per_token_logps")
        old = logprobs.detach() if old is None else old
        sampled = inputs["sampling_per_token_logps"]
        out = policy_loss(
            self.objective.name,
            logprobs=logprobs.float(),
            old_logprobs=old.float(),
            rollout_logprobs=sampled.float(),
            advantages=inputs["advantages"].float(),
            mask=mask,
            denominator=self._share_of(inputs[DENOMINATOR]),
            entropy=entropy.float(),
            entropy_coef=self.objective.entropy_coef,
            **self.objective.correction_options(),
            **self.objective.parameters,
        )
        self._note(scalars(out.metrics | mismatch_metrics(old.float(), sampled.float(), mask)))
        return out.loss

    def _share_of(self, denominator: Tensor) -> Tensor:
        """Of a generation's denominator, what one optimizer step's share is; ranks' gradients are averaged."""
        if not self._trains():
            return denominator / self.accelerator.num_processes
        steps = self.current_gradient_accumulation_steps / self.args.steps_per_generation  # type: ignore[attr-defined]
        return denominator * steps / self.accelerator.num_processes

    def _note(self, metrics: dict[str, float]) -> None:
        mode = "train" if self._trains() else "eval"
        for name, value in metrics.items():
            self._metrics[mode][name].append(value)

    def _trains(self) -> bool:
        assert self.model is not None
        return self.model.training
