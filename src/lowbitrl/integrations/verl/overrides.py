"""A recipe as verl's Hydra overrides; what verl cannot do is refused by `limits`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from lowbitrl.config import RunConfig
from lowbitrl.integrations.verl.limits import hydra, refuse
from lowbitrl.models import load_skeleton, resolve_model
from lowbitrl.objectives import get_objective
from lowbitrl.quant import Plan, resolve
from lowbitrl.rollout.vllm.planned import QUANT_METHOD, to_file

PACKAGE = "lowbitrl.integrations.verl"
VENDOR = "lowbitrl"
ACTOR, ROLLOUT = "actor_rollout_ref.actor", "actor_rollout_ref.rollout"
KL = {"k1": "kl", "k2": "mse", "k3": "low_var_kl"}
"""Our estimators of the KL by verl's names."""


def overrides(config: RunConfig, plan_file: Path) -> list[str]:
    """`key=value` arguments of `python -m verl.trainer.main_ppo`; writes the resolved plan to `plan_file`.

    The plan is resolved here, once: learner and rollout of the run read this file, which every node must
    see under the same path, and compare digests.

    Raises:
        ValueError: a setting that verl cannot do, with the remedy; everything `resolve` refuses.
    """
    refuse(config)
    model = resolve_model(config.model.name)
    plan = resolve(config.recipe, load_skeleton(model))
    plan_file.parent.mkdir(parents=True, exist_ok=True)
    rollout = to_file(plan, plan_file)
    pairs = {
        "actor_rollout_ref.model.path": str(model),
        **_learner(config, plan, rollout["plan_file"]),
        **_objective(config),
        **_optimizer(config),
        **_sampling(config, rollout),
        **_trainer(config),
    }
    return [f"{key}={hydra(value)}" for key, value in pairs.items()]


def _learner(config: RunConfig, plan: Plan, plan_file: str) -> dict[str, Any]:
    engine = f"{ACTOR}.fsdp_config"
    compute = {"bfloat16": "bf16", "float32": "fp32"}[config.model.dtype]
    sentinel = config.sentinel.model_dump(exclude={"sequences"})
    settings = {"plan_file": plan_file, "digest": plan.digest, "sentinel": sentinel}
    if not config.sentinel.sequences:
        settings["sentinel"] = None
    return {
        "+ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR": VENDOR,
        f"{ACTOR}.strategy": "fsdp2",
        f"{engine}._target_": f"{PACKAGE}.config.LowbitEngineConfig",
        f"{engine}.strategy": "fsdp2",
        f"{engine}.model_dtype": "fp32" if config.optimizer.masters == "float32" else compute,
        f"+{engine}.mixed_precision": {"param_dtype": compute, "reduce_dtype": "fp32"},
        f"+{engine}.lowbitrl": settings,
        f"{engine}.offload_policy": config.distributed.cpu_offload,
        "actor_rollout_ref.model.enable_gradient_checkpointing": config.trainer.gradient_checkpointing,
        "actor_rollout_ref.model.use_remove_padding": config.trainer.layout == "packed",
    }


def _objective(config: RunConfig) -> dict[str, Any]:
    objective, loss = config.objective, f"{ACTOR}.policy_loss"
    average = objective.aggregate or get_objective(objective.name).aggregate
    leave_one_out = objective.advantage_baseline == "leave-one-out"
    pairs = {
        f"{loss}._target_": f"{PACKAGE}.config.LowbitPolicyLoss",
        f"{loss}.loss_mode": f"lowbitrl_{objective.name}",
        f"+{loss}.lowbitrl": {
            "parameters": objective.parameters,
            "module": objective.module,
            **{k: getattr(objective, k) for k in ("correction", "level", "cap", "floor", "count_rejected")},
        },
        f"{ACTOR}.loss_agg_mode": average,
        f"{ACTOR}.loss_scale_factor": objective.max_tokens,
        f"{ACTOR}.entropy_coeff": objective.entropy_coef,
        "algorithm.adv_estimator": "rloo" if leave_one_out else "grpo",
        "algorithm.norm_adv_by_std_in_grpo": objective.advantage_scale == "std",
        "algorithm.rollout_correction.rollout_is": None,
        "algorithm.rollout_correction.rollout_rs": None,
        "algorithm.rollout_correction.bypass_mode": config.trainer.old_logprobs == "rollout",
    }
    kind = KL[objective.kl_estimator]
    if objective.kl_coef and objective.kl_in == "loss":
        own = {"use_kl_loss": True, "kl_loss_coef": objective.kl_coef, "kl_loss_type": kind}
        pairs |= {f"{ACTOR}.{key}": value for key, value in own.items()}
    elif objective.kl_coef:
        own = {"use_kl_in_reward": True, "kl_penalty": kind, "kl_ctrl.kl_coef": objective.kl_coef}
        pairs |= {f"algorithm.{key}": value for key, value in own.items()}
    return pairs


def _optimizer(config: RunConfig) -> dict[str, Any]:
    own, optim = config.optimizer, f"{ACTOR}.optim"
    muon = {"muon_lr": own.muon_learning_rate, "momentum": own.momentum} if own.name == "muon" else {}
    return {
        f"{optim}.optimizer": "Muon" if muon else "AdamW",
        f"{optim}.lr": own.learning_rate,
        f"{optim}.betas": list(own.betas),
        f"{optim}.weight_decay": own.weight_decay,
        f"{optim}.lr_warmup_steps": own.warmup_steps,
        f"{optim}.override_optimizer_config": {"eps": own.eps, **muon},
        # verl has no value for "off": a norm that no gradient reaches.
        f"{optim}.clip_grad": own.max_grad_norm or 1e30,
    }


def _sampling(config: RunConfig, plan: dict[str, Any]) -> dict[str, Any]:
    own = config.rollout
    pairs = {
        f"{ROLLOUT}.name": "vllm" if own.engine == "vllm" else VENDOR,
        f"{ROLLOUT}.n": own.samples,
        f"{ROLLOUT}.temperature": own.temperature,
        f"{ROLLOUT}.top_p": 1.0,
        f"{ROLLOUT}.top_k": -1,
        f"{ROLLOUT}.dtype": config.model.dtype,
        f"{ROLLOUT}.seed": config.seed,
        f"{ROLLOUT}.calculate_log_probs": True,
        f"{ROLLOUT}.logprobs_mode": "processed_logprobs",
        f"{ROLLOUT}.val_kwargs.n": config.evaluation.samples,
        f"{ROLLOUT}.val_kwargs.do_sample": True,
        f"{ROLLOUT}.val_kwargs.temperature": own.temperature,
        "data.train_batch_size": own.prompts,
        "data.max_response_length": own.max_tokens,
        "data.seed": config.seed,
    }
    if own.engine == "embedded":
        options = {
            "plan_file": plan["plan_file"],
            "digest": plan["digest"],
            "scheduler": own.scheduler,
            "max_batch": own.max_batch,
            "keep_decoded_experts": own.keep_decoded_experts,
            "kernels": own.kernels,
        }
        return pairs | {f"+{ROLLOUT}.engine_kwargs.{VENDOR}": options}
    served = {
        "quantization": QUANT_METHOD,
        "hf_overrides": {"quantization_config": plan},
        "worker_extension_cls": f"{PACKAGE}.vllm_worker.LowbitWorker",
        **own.vllm,
    }
    return pairs | {f"+{ROLLOUT}.engine_kwargs.vllm.{key}": value for key, value in served.items()}


def _trainer(config: RunConfig) -> dict[str, Any]:
    own, tokens = config.trainer, config.trainer.micro_batch_tokens
    loggers = {"tensorboard": config.tracking.tensorboard, "wandb": config.tracking.wandb}
    return {
        "trainer.total_training_steps": own.steps,
        "trainer.default_local_dir": str(Path(config.out).resolve()),
        "trainer.logger": ["console", *(name for name, on in loggers.items() if on)],
        "trainer.project_name": config.tracking.project,
        "trainer.save_freq": config.checkpoint.every or -1,
        "trainer.max_actor_ckpt_to_keep": config.checkpoint.keep,
        "trainer.test_freq": config.evaluation.every or -1,
        "trainer.val_before_train": bool(config.evaluation.every),
        f"{ACTOR}.ppo_mini_batch_size": own.mini_batch // config.rollout.samples or config.rollout.prompts,
        f"{ACTOR}.ppo_epochs": own.epochs,
        f"{ACTOR}.use_dynamic_bsz": True,
        f"{ACTOR}.ppo_max_token_len_per_gpu": tokens,
        f"{ACTOR}.data_loader_seed": config.seed,
    }
