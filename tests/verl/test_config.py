"""The overrides fit verl's own configuration: every key exists, every value is of its type, ours arrive."""

from __future__ import annotations

from pathlib import Path

import pytest
import verl.trainer.main_ppo
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from verl.utils.config import omega_conf_to_dataclass
from verl.workers.config import HFModelConfig

from lowbitrl.config import validate
from lowbitrl.integrations.verl.engine import checked
from lowbitrl.integrations.verl.overrides import overrides
from tests.tiny_run import checkpoint

CONFIGS = Path(verl.trainer.main_ppo.__file__).parent / "config"
MOVED = {
    "rollout": {"prompts": 6, "samples": 3, "max_tokens": 9, "temperature": 0.5},
    "objective": {"name": "gspo", "parameters": {"clip_low": 0.1}, "correction": "mis", "level": "geometric",
                  "cap": 3.0, "kl_coef": 0.1, "kl_kind": "k2", "entropy_coef": 0.01},
    "trainer": {"steps": 3, "mini_batch": 9, "epochs": 2, "layout": "packed"},
    "optimizer": {"name": "muon", "masters": "compute", "max_grad_norm": 0.0},
    "evaluation": {"every": 5}, "task": {"held_out": 8}, "tracking": {"tensorboard": True},
    "sentinel": {"sequences": 0}, "distributed": {"cpu_offload": True},
}  # fmt: skip
BYPASS = {"objective": {"name": "grpo"}, "trainer": {"old_logprobs": "rollout"}}
VLLM = {"rollout": {"engine": "vllm", "vllm": {"max_model_len": 64}}}


def composed(folder, **sections):
    """verl's whole config under the overrides of a recipe."""
    if not (folder / "model").is_dir():
        checkpoint(folder / "model")
    data = {
        "out": str(folder / "run with spaces"),
        "model": {"name": str(folder / "model")},
        "task": {"path": "prompts.jsonl", "reward": "tests.tiny_run:reward"},
        "recipe": {"rollout": "nvfp4", "residual": 0.5},
    }
    for name, section in sections.items():
        data[name] = data.get(name, {}) | section
    lines = overrides(validate(data), folder / "plan.json")
    with initialize_config_dir(str(CONFIGS), version_base=None):
        return compose("ppo_trainer", lines)


@pytest.mark.parametrize("sections", [{}, MOVED, BYPASS, VLLM])
def test_every_override_is_a_key_of_verls(tmp_path, sections):
    config = composed(tmp_path, **sections)
    assert config.actor_rollout_ref.actor.strategy == "fsdp2"
    assert config.ray_kwargs.ray_init.runtime_env.env_vars.VERL_ENGINE_VENDOR == "lowbitrl"
    assert config.trainer.default_local_dir.endswith("run with spaces")


def test_our_settings_arrive_in_verls_dataclasses(tmp_path):
    actor = composed(tmp_path, objective=MOVED["objective"], sentinel={"slack": 0.3}).actor_rollout_ref.actor
    engine = omega_conf_to_dataclass(actor.fsdp_config)
    assert engine.settings.sentinel.slack == 0.3
    assert engine.settings.load().recipe.residual == 0.5
    loss = omega_conf_to_dataclass(actor.policy_loss)
    assert loss.objective.correction == "mis"
    assert loss.objective.parameters == {"clip_low": 0.1}
    whole = omega_conf_to_dataclass(actor.__class__(dict(actor) | {"ppo_micro_batch_size_per_gpu": 1}))
    assert whole.policy_loss.objective.name == "gspo"


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"strategy": "fsdp"}, "use 'fsdp2'"),
        ({"lowbitrl": None}, "lowbitrl verl overrides"),
        ({"qat": True}, "second time"),
        ({"lora": 8}, "lora_rank=8"),
    ],
)
def test_an_engine_that_cannot_wear_the_plan_is_refused(tmp_path, change, message):
    section = composed(tmp_path).actor_rollout_ref.actor.fsdp_config
    OmegaConf.set_struct(section, False)
    if "strategy" in change:
        section.strategy = "fsdp"
    if "qat" in change:
        section.qat.enable = True
    if "lowbitrl" in change:
        section.pop("lowbitrl")
        section._target_ = "verl.workers.config.FSDPEngineConfig"
    model = HFModelConfig(path=str(tmp_path / "model"), lora_rank=change.get("lora", 0))
    with pytest.raises(ValueError, match=message):
        checked(model, omega_conf_to_dataclass(section))
