"""Whole runs of TRL's trainer with low-bit rollouts, and its loss against TRL's own, on a CPU.

Skipped where TRL is not installed; `make test-parity` makes that an error.
"""

import importlib.util
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("trl.trainer.grpo_trainer", reason="needs the extra `trl`", exc_type=ImportError)

from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from lowbitrl.integrations.trl import LowBitGRPOTrainer
from lowbitrl.integrations.trl.checks import PRIVATE_HOOKS, check_hooks
from lowbitrl.integrations.trl.masters import keep_masters
from lowbitrl.quant import Recipe
from lowbitrl.sync.sentinel import SentinelConfig, SentinelError
from lowbitrl.trainer.config import ObjectiveConfig
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe
from tests.tiny_run import tokenizer
from trl import GRPOConfig, GRPOTrainer

pytestmark = pytest.mark.trl
ROOT = Path(__file__).parents[2]
ALIGNED = {
    "weights": Recipe(rollout="nvfp4-w4a16", learner="weights"),
    "full": Recipe(rollout="nvfp4", learner="full"),
    "full, residual": Recipe(rollout="nvfp4", learner="full", residual=0.5),
}
NAIVE = {
    "weight-only": Recipe(rollout="nvfp4-w4a16", learner="bf16"),
    "W4A4": Recipe(rollout="nvfp4", learner="bf16"),
}


def even_words(completions, **_):
    return [sum(int(w[1:]) % 2 == 0 for w in c.split()) / max(1, len(c.split())) for c in completions]


def prompts(count=24):
    """Of one to four words: the batches are padded."""
    rows = [{"prompt": " ".join(f"w{3 + (i * j) % 120}" for j in range(1, 2 + i % 4))} for i in range(count)]
    return Dataset.from_list(rows)


def config(folder, **settings):
    defaults = {
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "gradient_accumulation_steps": 2,
        "max_completion_length": 8,
        "max_steps": 2,
        "learning_rate": 1e-3,
        "lr_scheduler_type": "constant",
        "bf16": False,
        "use_cpu": True,
        "report_to": [],
        "logging_steps": 1,
        "save_strategy": "no",
        "disable_tqdm": True,
    }
    return GRPOConfig(output_dir=str(folder), **(defaults | settings))


def trainer(folder, recipe=ALIGNED["weights"], model=None, ours=None, **settings):
    return LowBitGRPOTrainer(
        tiny_llama(torch.float32) if model is None else model,
        recipe=recipe,
        args=config(folder, **settings),
        reward_funcs=even_words,
        train_dataset=prompts(),
        processing_class=tokenizer(),
        **(ours or {}),
    )


def run(folder, *args, **kwargs):
    """The logged lines of a run's steps."""
    made = trainer(folder, *args, **kwargs)
    made.train()
    return [row for row in made.state.log_history if "mismatch/abs_mean" in row]


@pytest.fixture(scope="module")
def floor(tmp_path_factory):
    """Mismatch of a rollout that is not quantized: two kinds of forward pass over the same weights."""
    rows = run(tmp_path_factory.mktemp("floor"), Recipe(rollout="bf16", learner="bf16"))
    return max(row["mismatch/abs_mean"] for row in rows)


@pytest.mark.parametrize("name", ALIGNED)
def test_an_aligned_learner_is_at_the_floor(name, floor, tmp_path):
    rows = run(tmp_path, ALIGNED[name])
    assert 0 < floor < 1e-5
    # Quantized activations amplify: where rounding noise flips a code, that one token moves by far more.
    limit = 4 * floor if name == "weights" else 1e-3
    assert all(row["mismatch/abs_mean"] < limit for row in rows)
    assert rows[0]["mismatch/abs_mean"] < 4 * floor
    assert [row["sync/version"] for row in rows] == [0, 1]
    assert rows[1]["quant/changed_codes"] > 0.01, "no update reached the rollout"
    assert all(row["sync/sentinel"] < limit for row in rows)


@pytest.mark.parametrize("name", NAIVE)
def test_a_naive_learner_is_far_above_it(name, floor, tmp_path):
    rows = run(tmp_path, NAIVE[name], ours={"watch": SentinelConfig(slack=2.0)})
    assert all(row["mismatch/abs_mean"] > 1e4 * floor for row in rows)


def test_quads_stands_between_them(floor, tmp_path):
    quads = run(tmp_path, Recipe(rollout="nvfp4", learner="weights", residual=1.0))
    naive = run(tmp_path, NAIVE["W4A4"], ours={"watch": SentinelConfig(slack=2.0)})
    assert 4 * floor < quads[0]["mismatch/abs_mean"] < 0.2 * naive[0]["mismatch/abs_mean"]


def test_a_mixture_of_experts_is_at_the_floor(floor, tmp_path):
    rows = run(tmp_path, model=tiny_moe(dtype=torch.float32), router_aux_loss_coef=0.0)
    assert all(row["mismatch/abs_mean"] < 4 * floor for row in rows)
    assert rows[1]["quant/changed_codes"] > 0.01


def test_bf16_is_at_bf16s_floor(tmp_path):
    own = run(tmp_path, Recipe(rollout="bf16", learner="bf16"), model=tiny_llama(), max_steps=4)
    rows = run(tmp_path, model=tiny_llama(), max_steps=4)
    naive = run(tmp_path, NAIVE["weight-only"], model=tiny_llama(), ours={"watch": SentinelConfig(slack=2.0)})
    limit = max(0.01, 2 * max(row["mismatch/abs_mean"] for row in own))
    assert max(row["mismatch/abs_mean"] for row in rows) < limit < naive[0]["mismatch/abs_mean"] / 5


def test_a_run_repeats_to_the_bit_and_its_seed_counts(tmp_path):
    first, again, other = (run(tmp_path, seed=seed) for seed in (3, 3, 4))
    figures = ("loss", "grad_norm", "reward", "mismatch/abs_mean")
    assert [[row[k] for k in figures] for row in first] == [[row[k] for k in figures] for row in again]
    assert first[0]["reward"] != other[0]["reward"]


@pytest.mark.parametrize("settings", [{"gradient_accumulation_steps": 1}, {"steps_per_generation": 4}])
def test_generations_that_last_several_steps(settings, floor, tmp_path):
    rows = run(tmp_path, max_steps=4, num_iterations=2, ours={"objective": "grpo"}, **settings)
    assert all(row["mismatch/abs_mean"] < 4 * floor for row in rows)
    assert any(row["actor/ratio_mean"] != 1 for row in rows), "the policy never left the one that sampled"


LOSSES = {
    "dapo": ("dapo", {}, {"loss_type": "dapo", "epsilon_low": 0.2, "epsilon_high": 0.28}),
    "grpo": (
        "grpo",
        {"clip_low": 0.2, "clip_high": 0.2},
        {"loss_type": "grpo", "epsilon_low": 0.2, "epsilon_high": 0.2},
    ),
    "gspo": (
        "gspo",
        {"clip_low": 3e-4, "clip_high": 4e-4},
        {
            "loss_type": "grpo",
            "importance_sampling_level": "sequence",
            "epsilon_low": 3e-4,
            "epsilon_high": 4e-4,
        },
    ),
}


@pytest.mark.parametrize("name", LOSSES)
def test_loss_and_gradient_are_trls_own(name, tmp_path):
    objective, parameters, theirs = LOSSES[name]
    made = trainer(
        tmp_path,
        ours={"objective": ObjectiveConfig(name=objective, parameters=parameters)},
        gradient_accumulation_steps=3,
    )
    made.model.train()
    batch = made._generate_and_score_completions([made.train_dataset[i // 4] for i in range(24)])
    batch["old_per_token_logps"] = batch["sampling_per_token_logps"] + 0.3 * torch.randn(24, 8)
    ours, peer = [], []
    for first in (0, 8, 16):
        micro = {k: v[first : first + 8] if v.ndim else v for k, v in batch.items()}
        made.current_gradient_accumulation_steps = 3
        ours.append(loss_and_gradient(made, LowBitGRPOTrainer._compute_loss, micro))
        with pytest.MonkeyPatch.context() as patch:
            for key, value in theirs.items():
                patch.setattr(made, key, value)
            peer.append(loss_and_gradient(made, GRPOTrainer._compute_loss, micro))
    for (loss, grad), (peer_loss, peer_grad) in zip(ours, peer, strict=True):
        assert loss == pytest.approx(peer_loss, abs=1e-6)
        torch.testing.assert_close(grad, peer_grad, atol=1e-6, rtol=1e-4)
    assert sum(grad.abs().max() for _, grad in ours) > 1e-3


def loss_and_gradient(made, compute, inputs):
    made.model.zero_grad()
    loss = compute(made, made.model, inputs)
    loss.backward()
    grads = [p.grad.flatten() for p in made.model.parameters() if p.grad is not None]
    return loss.item(), torch.cat(grads)


def test_micro_batches_add_up_to_the_whole_batch(tmp_path):
    """TBPO averages over responses, and a response cut in no batch counts more than in another."""
    made = trainer(tmp_path)
    made.model.train()
    batch = made._generate_and_score_completions([made.train_dataset[i // 4] for i in range(16)])
    # Responses without a token are in no mean, so the halves have other counts than their rows.
    batch["completion_mask"][:3] = 0
    made.current_gradient_accumulation_steps, made.args.steps_per_generation = 2, 2
    batch["lowbitrl_denominator"] = batch["completion_mask"].any(-1).sum().float()
    halves = [{k: v[first : first + 8] if v.ndim else v for k, v in batch.items()} for first in (0, 8)]
    parts = [loss_and_gradient(made, LowBitGRPOTrainer._compute_loss, half) for half in halves]
    whole = loss_and_gradient(made, LowBitGRPOTrainer._compute_loss, batch)
    assert sum(loss for loss, _ in parts) == pytest.approx(whole[0], abs=1e-6)
    torch.testing.assert_close(sum(grad for _, grad in parts), whole[1], atol=1e-6, rtol=1e-4)


def test_the_sentinel_stops_a_run_whose_bytes_do_not_arrive(tmp_path, monkeypatch):
    made = trainer(tmp_path, learning_rate=0.05, max_steps=3)
    served = made.rollouts.engine.update

    def only_the_first(stream, manifest):
        if manifest.version == 0:
            served(stream, manifest)
        made.rollouts.engine.version = manifest.version

    monkeypatch.setattr(made.rollouts.engine, "update", only_the_first)
    with pytest.raises(SentinelError, match=r"is served with other bytes than were published"):
        made.train()


REFUSED = {
    "use_vllm=True": {"use_vllm": True},
    "top_p=0.9": {"top_p": 0.9},
    "loss_type='grpo'": {"loss_type": "grpo"},
    "epsilon=0.1": {"epsilon": 0.1},
    "beta=0.04": {"beta": 0.04},
    "bf16=True": {"bf16": True},
    "repetition_penalty=1.1": {"repetition_penalty": 1.1},
    "mask_truncated_completions=True": {"mask_truncated_completions": True},
}


@pytest.mark.parametrize("text", REFUSED)
def test_settings_without_effect_are_refused(text, tmp_path):
    with pytest.raises(ValueError, match=text.replace(".", r"\.")):
        trainer(tmp_path, **REFUSED[text])


def test_what_trl_decides_is_refused_in_the_objective(tmp_path):
    with pytest.raises(ValueError, match="scale_rewards"):
        trainer(tmp_path, ours={"objective": ObjectiveConfig(advantage_scale="none")})
    with pytest.raises(ValueError, match="count_rejected=true"):
        trainer(tmp_path, ours={"objective": ObjectiveConfig(name="grpo", correction="rejection")})


@pytest.mark.parametrize(
    ("recipe", "model", "text"),
    [
        (Recipe(rollout="nvfp4", activation_scale="static"), {}, "static"),
        (Recipe(rollout="nvfp4-w4a16", keep=()), {"tie_word_embeddings": False}, "lm_head"),
        (ALIGNED["weights"], {"attention_dropout": 0.1}, "attention_dropout=0.1"),
    ],
)
def test_models_and_recipes_that_would_part_are_refused(recipe, model, text, tmp_path):
    with pytest.raises(ValueError, match=text):
        trainer(tmp_path, recipe, model=tiny_llama(torch.float32, **model))


def test_adapters_are_refused(tmp_path):
    with pytest.raises(ValueError, match="peft_config"):
        trainer(tmp_path, ours={"peft_config": object()})


def test_the_installed_trl_has_the_hooks():
    import trl

    check_hooks(trl.__version__, GRPOTrainer)


def test_another_trl_is_refused_by_name():
    with pytest.raises(ImportError, match=r"trl 1\.17\.0 is not supported.*trl>=1\.16,<1\.17"):
        check_hooks("1.17.0", GRPOTrainer)
    gone = type("GRPOTrainer", (), {})
    with pytest.raises(ImportError, match=r"_generate_single_turn does not exist in trl 1\.16\.3"):
        check_hooks("1.16.3", gone)
    methods = {name: getattr(GRPOTrainer, name) for name in PRIVATE_HOOKS}
    moved = type("GRPOTrainer", (), methods | {"_compute_loss": lambda self, model, batch: None})
    with pytest.raises(ImportError, match="_compute_loss has no argument 'inputs'"):
        check_hooks("1.16.0", moved)


def test_masters_keep_steps_that_bf16_loses():
    weights = torch.linspace(0.5, 1.0, 8)
    half = torch.nn.Parameter(weights.bfloat16())
    exact = torch.nn.Parameter(half.detach().float())
    lossy = torch.nn.Parameter(half.detach().clone())
    optimizers = [torch.optim.SGD([p], lr=1e-4) for p in (half, exact, lossy)]
    keep_masters(optimizers[0])
    for _ in range(30):
        for parameter, optimizer in zip((half, exact, lossy), optimizers, strict=True):
            parameter.sum().backward()
            (2 * parameter).sum().backward()
            optimizer.step()
            parameter.grad = None
    assert torch.equal(half, exact.bfloat16())
    assert torch.equal(lossy, weights.bfloat16())
    saved = optimizers[0].state_dict()
    assert torch.equal(saved["masters"][0], exact)

    other = torch.nn.Parameter(half.detach().clone())
    resumed = torch.optim.SGD([other], lr=1e-4)
    keep_masters(resumed)
    resumed.load_state_dict(saved)
    other.grad = torch.ones(8)
    resumed.step()
    assert torch.equal(other, (exact - 1e-4).bfloat16())
    with pytest.raises(ValueError, match="fp32 masters"):
        optimizers[0].load_state_dict(torch.optim.SGD([lossy], lr=1e-4).state_dict())


def test_a_run_resumes_from_trls_checkpoint(tmp_path):
    whole = trainer(tmp_path / "whole", model=tiny_llama(), max_steps=4)
    whole.train()
    first = trainer(tmp_path / "half", model=tiny_llama(), max_steps=2, save_strategy="steps", save_steps=2)
    first.train()
    second = trainer(tmp_path / "half", model=tiny_llama(), max_steps=4)
    second.train(resume_from_checkpoint=True)
    for (name, ours), other in zip(whole.model.named_parameters(), second.model.parameters(), strict=True):
        assert torch.equal(ours, other), name


@pytest.fixture(scope="module")
def example():
    spec = importlib.util.spec_from_file_location("trl_quads", ROOT / "examples" / "trl_quads.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def numbers(folder):
    """A checkpoint that reads and writes the example's sums: a word a number."""
    words = [str(i) for i in range(100)] + ["What", "is", "+", "?", "Answer", ":", "<unk>", "<s>", "</s>"]
    backend = Tokenizer(models.WordLevel({word: i for i, word in enumerate(words)}, unk_token=words[-3]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    own = {"unk_token": words[-3], "bos_token": words[-2], "eos_token": words[-1], "pad_token": words[-1]}
    PreTrainedTokenizerFast(tokenizer_object=backend, **own).save_pretrained(folder)
    tiny_llama().save_pretrained(folder)
    return folder


def test_the_example_runs(example, tmp_path, capsys):
    gaps = {}
    for learner in ("weights", "bf16"):
        options = ["--model", numbers(tmp_path / "model"), "--steps", 2, "--out", tmp_path, "--residual", 0]
        options += ["--learner", learner, "--rollout", "nvfp4-w4a16"]
        rows = example.main(list(map(str, options))).state.log_history
        gaps[learner] = max(row["mismatch/abs_mean"] for row in rows if "mismatch/abs_mean" in row)
        assert all(0 < row["reward"] < 1 for row in rows if "reward" in row)
    assert gaps["weights"] < 0.01 < 0.1 < gaps["bf16"]
    assert "nvfp4-w4a16, learner weights: mean |learner - sampler|" in capsys.readouterr().out


@pytest.mark.slow
def test_two_processes_train_one_policy(tmp_path):
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--standalone"]
    script = Path(__file__).with_name("two_ranks.py")
    out = subprocess.run(
        [*command, str(script), str(tmp_path)],
        capture_output=True,
        text=True,
        timeout=300,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
    )
    assert out.returncode == 0, out.stderr[-3000:]
    first, second = (json.loads((tmp_path / f"rank{rank}.json").read_text()) for rank in (0, 1))
    assert first["weights"] == second["weights"]
    assert first["tokens"] != second["tokens"], "both ranks sampled the same"
    assert max(first["gap"], second["gap"]) < 0.02
