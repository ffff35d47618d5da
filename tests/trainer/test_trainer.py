"""Updates: micro-batches change nothing, old log-probabilities are the learner's, NaN stops first."""

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.trainer import (
    NonFiniteError,
    ObjectiveConfig,
    OptimizerConfig,
    Trainer,
    TrainerConfig,
    TrainingBatch,
)
from tests.conftest import tiny_llama


def make_trainer(objective=None, dtype=torch.float32, recipe=None, optimizer=None, **config):
    model = tiny_llama(dtype)
    prepare(model, recipe or Recipe(rollout="nvfp4-w4a16"), "learner")
    return Trainer(
        model,
        TrainerConfig(**config),
        objective or ObjectiveConfig(name="grpo"),
        optimizer or OptimizerConfig(learning_rate=1e-3, max_grad_norm=0),
    )


def batch_of(count=8, offset=0.0):
    generator = torch.Generator().manual_seed(3)
    prompts = [torch.randint(3, 120, (1 + i % 3,), generator=generator).tolist() for i in range(count)]
    responses = [torch.randint(3, 120, (1 + i % 5,), generator=generator).tolist() for i in range(count)]
    return TrainingBatch.build(
        prompts, responses, [[-3.0 - offset] * len(r) for r in responses], torch.linspace(-1, 1, count)
    )


def flat(trainer):
    return torch.cat([p.detach().flatten() for p in trainer.model.parameters()])


@pytest.mark.parametrize("objective", ["grpo", "tbpo", "dapo"])
@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_micro_batches_and_layouts_give_the_same_step(objective, layout):
    whole = make_trainer(ObjectiveConfig(name=objective))
    split = make_trainer(ObjectiveConfig(name=objective), layout=layout, micro_batch_tokens=13)
    metrics = [t.update(batch_of(), 0) for t in (whole, split)]
    torch.testing.assert_close(flat(split), flat(whole), atol=2e-5, rtol=1e-4)
    for name in ("actor/loss", "actor/grad_norm", "mismatch/abs_mean", "actor/entropy"):
        assert metrics[1][name] == pytest.approx(metrics[0][name], rel=1e-3, abs=1e-6), name


def test_one_step_a_batch_needs_no_second_pass_and_several_do(monkeypatch):
    counts = {}
    for name, config in {"one": {}, "two": {"mini_batch": 4}, "epochs": {"epochs": 2}}.items():
        trainer = make_trainer(**config)
        calls = []
        forward = trainer._forward
        monkeypatch.setattr(trainer, "_forward", lambda *a, f=forward, c=calls: c.append(1) or f(*a))
        trainer.update(batch_of(), 0)
        counts[name] = len(calls)
        assert trainer.optimizer.steps == {"one": 1, "two": 2, "epochs": 2}[name]
    assert counts == {"one": 1, "two": 3, "epochs": 3}


def test_old_logprobs_of_later_mini_batches_are_from_before_the_first():
    trainer = make_trainer(mini_batch=4, epochs=2, optimizer=OptimizerConfig(learning_rate=0.05))
    batch = batch_of()
    old = trainer.score(batch)
    metrics = trainer.update(batch, 0)
    expected = (old - batch.rollout_logprobs).abs()[batch.mask].mean()
    assert metrics["mismatch/abs_mean"] == pytest.approx(float(expected), rel=1e-5)
    assert metrics["actor/ratio_mean"] != pytest.approx(1.0, abs=1e-3)


def test_every_response_is_seen_once_an_epoch_in_an_order_of_the_seed():
    trainer = make_trainer(mini_batch=2, epochs=2)
    first, again, later = (list(trainer._mini_batches(8, step)) for step in (0, 0, 1))
    assert first == again != later
    assert sorted(i for rows in first[:4] for i in rows) == list(range(8))


def test_learning_raises_what_is_rewarded():
    trainer = make_trainer(ObjectiveConfig(name="reinforce"), optimizer=OptimizerConfig(learning_rate=3e-3))
    batch = batch_of()
    before = trainer.score(batch)
    for step in range(5):
        trainer.update(batch, step)
    gain = ((trainer.score(batch) - before) * batch.mask).sum(1)
    assert gain[-2:].min() > 0
    assert gain[:2].max() < 0


@pytest.mark.parametrize("where", ["weights", "rollout"])
def test_nothing_is_stepped_on_nan(where):
    trainer, batch = make_trainer(ObjectiveConfig(name="tbpo")), batch_of()
    if where == "weights":
        with torch.no_grad():
            trainer.model.model.norm.weight[0] = torch.nan
            trainer.optimizer.masters["model.norm.weight"][0] = torch.nan
    else:
        batch.advantages[2] = torch.inf
    before = flat(trainer)
    with pytest.raises(NonFiniteError, match="at step 7, in a batch of"):
        trainer.update(batch, 7)
    assert torch.equal(flat(trainer).nan_to_num(9), before.nan_to_num(9))
    assert trainer.optimizer.steps == 0
    assert all(m.grad is None for m in trainer.optimizer.masters.values())


def test_kl_to_the_start_is_zero_at_the_start_and_grows():
    objective = ObjectiveConfig(name="grpo", kl_coef=0.1)
    trainer = make_trainer(objective, optimizer=OptimizerConfig(learning_rate=0.01))
    values = [trainer.update(batch_of(), step)["actor/kl_loss"] for step in range(3)]
    assert values[0] == pytest.approx(0.0, abs=1e-6)
    assert values[2] > 1e-4
    assert make_trainer().reference is None


def test_gradient_checkpointing_changes_nothing():
    plain = make_trainer(recipe=Recipe(rollout="nvfp4", learner="full", residual=0.5))
    saving = make_trainer(
        recipe=Recipe(rollout="nvfp4", learner="full", residual=0.5), gradient_checkpointing=True
    )
    for trainer in (plain, saving):
        trainer.update(batch_of(), 0)
    torch.testing.assert_close(flat(saving), flat(plain), atol=0, rtol=0)


def test_rejecting_corrections_see_old_logprobs():
    objective = ObjectiveConfig(name="grpo", correction="rejection", level="token", floor=0.5, cap=2.0)
    trainer = make_trainer(objective)
    metrics = trainer.update(batch_of(offset=-20.0), 0)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == 1.0
    assert metrics["actor/loss"] == 0.0


def test_batches_that_cannot_train_are_refused():
    with pytest.raises(ValueError, match="response 1 has 0 tokens"):
        TrainingBatch.build([[1], [2]], [[3], []], [[-1.0], []], torch.zeros(2))
    with pytest.raises(ValueError, match="entropy_coef"):
        ObjectiveConfig(entropy_coef=0.1)
    with pytest.raises(ValueError, match="eps_hihg"):
        ObjectiveConfig(name="tbpo", parameters={"eps_hihg": 0.1})


def test_dropout_is_refused():
    model = tiny_llama(torch.float32, attention_dropout=0.1)
    prepare(model, Recipe(), "learner")
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        Trainer(model, TrainerConfig(), ObjectiveConfig(), OptimizerConfig())
