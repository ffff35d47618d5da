"""Updates: micro-batches change nothing, old log-probabilities are the learner's, NaN stops first."""

import pytest
import torch

from lowbitrl.objectives import entropy_of
from lowbitrl.quant import Recipe, groups, prepare
from lowbitrl.quant.wearing import attachment
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


def test_weights_are_encoded_once_an_optimizer_step_whatever_the_micro_batches(monkeypatch):
    """A forward, a backward and the publication read the bytes that the step's first use made."""
    encoded = []
    encode = groups.encode_unchecked
    monkeypatch.setattr(
        groups,
        "encode_unchecked",
        lambda w, *args, name=None, **kw: encoded.append(name) or encode(w, *args, **kw),
    )
    trainer = make_trainer(micro_batch_tokens=13, mini_batch=4)
    trainer.update(batch_of(), 0)
    names = [name for group in attachment(trainer.model).groups for name in group.names]
    assert trainer.optimizer.steps == 2
    assert sorted(encoded) == sorted([f"{name}.weight" for name in names] * 2)


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
        ObjectiveConfig(entropy_coef=-0.1)
    with pytest.raises(ValueError, match="eps_hihg"):
        ObjectiveConfig(name="tbpo", parameters={"eps_hihg": 0.1})


def test_dropout_is_refused():
    model = tiny_llama(torch.float32, attention_dropout=0.1)
    prepare(model, Recipe(), "learner")
    with pytest.raises(ValueError, match=r"attention_dropout=0\.1"):
        Trainer(model, TrainerConfig(), ObjectiveConfig(), OptimizerConfig())


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"correction": "tsi"}, "unknown correction 'tsi'; did you mean 'tis'"),
        ({"aggregate": "mean"}, "aggregate='mean' is not one of token-mean"),
        ({"name": "grpo", "correction": "tis", "level": "galaxy"}, "level='galaxy' is not one of token"),
        ({"cap": 2.0}, "correction='none' reads no cap or floor"),
        ({"name": "grpo", "correction": "tis", "cap": -1.0}, "greater than 0"),
        (
            {"name": "grpo", "correction": "mis", "cap": 9.0, "floor": 2.0},
            "the token rejected; give .* floor at most 1",
        ),
        ({"parameters": {"eps_high": "a"}}, "eps_high.* a value of another type is needed"),
        ({"parameters": {"eps_high": float("nan")}}, "the loss is nan"),
        ({"kl_coef": float("inf")}, "finite number"),
    ],
)
def test_what_the_objective_would_refuse_is_refused_before_anything_is_sampled(options, message):
    with pytest.raises(ValueError, match=message):
        ObjectiveConfig(**options)


def test_a_cap_may_be_infinite():
    assert ObjectiveConfig(name="grpo", correction="tis", cap=float("inf")).cap == float("inf")


def test_gradients_that_someone_switched_off_are_on_in_an_update():
    trainer, other = make_trainer(), make_trainer()
    torch.set_grad_enabled(False)
    try:
        metrics = trainer.update(batch_of(), 0)
    finally:
        torch.set_grad_enabled(True)
    assert metrics == other.update(batch_of(), 0)


def test_tokens_left_out_of_the_mask_do_not_train():
    batch, other = batch_of(2), batch_of(2)
    for chosen, logprob in ((batch, -3.0), (other, -900.0)):
        chosen.mask[1, 0] = False
        chosen.rollout_logprobs[1, 0] = logprob
    trainer, twin = make_trainer(), make_trainer()
    assert trainer.update(batch, 0) == twin.update(other, 0)
    assert torch.equal(flat(trainer), flat(twin))


def test_a_model_that_cannot_train_is_refused():
    model = tiny_llama()
    prepare(model, Recipe(rollout="nvfp4"), "rollout")
    with pytest.raises(ValueError, match="no parameter of the model has requires_grad"):
        Trainer(model, TrainerConfig(), ObjectiveConfig(), OptimizerConfig())


@pytest.mark.parametrize(
    ("prompts", "responses", "advantages", "message"),
    [
        ([[5]], [[6], [7]], 2, "1 prompts, 2 responses and 2 advantages"),
        ([[5], [6]], [[6], [7]], 3, "2 prompts, 2 responses and 3 advantages"),
        ([[5], []], [[6], [7]], 2, "prompt 1 is empty"),
        ([[5], [6]], [[6], []], 2, "response 1 has 0 tokens"),
    ],
)
def test_batches_that_fit_nothing_are_refused(prompts, responses, advantages, message):
    with pytest.raises(ValueError, match=message):
        TrainingBatch.build(prompts, responses, [[-1.0] * len(r) for r in responses], torch.zeros(advantages))


@pytest.mark.parametrize(
    "options",
    [
        {"learning_rate": float("inf")},
        {"betas": (1.5, 0.9)},
        {"betas": (0.9, float("nan"))},
        {"eps": float("inf")},
    ],
)
def test_optimizer_settings_outside_their_range_are_refused(options):
    with pytest.raises(ValueError, match=r"finite|less than"):
        OptimizerConfig(**options)


def test_an_entropy_bonus_moves_the_policy_as_autograd_says():
    """Advantages of 0 leave the bonus alone: its step is that of the full matrix's mean entropy."""
    trainer = make_trainer(
        ObjectiveConfig(name="grpo", aggregate="token-mean", entropy_coef=0.5), micro_batch_tokens=13
    )
    plain = make_trainer()
    batch = batch_of()
    batch.advantages.zero_()
    gradients = {}
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda norm: (  # type: ignore[method-assign]
        gradients.update({n: p.grad.clone() for n, p in trainer.model.named_parameters()}),
        step(norm),
    )
    metrics = trainer.update(batch, 0)
    entropies = []
    for prompt, response in zip(batch.prompts, batch.responses, strict=True):
        logits = plain.model(input_ids=torch.tensor([[*prompt, *response]])).logits[0]
        entropies.append(entropy_of(logits[len(prompt) - 1 : -1]))
    mean = torch.cat(entropies).mean()
    (-0.5 * mean).backward()
    assert metrics["actor/entropy"] == pytest.approx(float(mean), rel=1e-4)
    assert metrics["actor/loss"] == pytest.approx(-0.5 * float(mean), rel=1e-4)
    for name, parameter in plain.model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, atol=2e-5, rtol=1e-3, msg=name)


def test_the_constant_of_an_average_is_a_setting():
    options = {"name": "dr_grpo", "aggregate": "seq-mean-token-sum-norm"}
    losses = {
        n: make_trainer(ObjectiveConfig(**options, max_tokens=n)).update(batch_of(), 0)["actor/loss"]
        for n in (5, 10)
    }
    assert losses[5] == pytest.approx(2 * losses[10], rel=1e-5)
    assert losses[5] != 0


@pytest.mark.parametrize("kind", ["k1", "k2", "k3"])
def test_the_kl_of_a_reward_is_that_to_the_start_policy(kind):
    trainer = make_trainer(ObjectiveConfig(name="grpo", kl_coef=0.1, kl_in="reward", kl_kind=kind))
    batch = batch_of()
    start = trainer.score(batch)
    assert not trainer.reference_kl(batch).any()
    metrics = trainer.update(batch, 0)
    assert "actor/kl_loss" not in metrics
    d = trainer.score(batch) - start
    by_kind = {"k1": d, "k2": d**2 / 2, "k3": (-d).exp() + d - 1}
    torch.testing.assert_close(trainer.reference_kl(batch), by_kind[kind].sum(-1))
    assert trainer.reference_kl(batch).abs().max() > 0


def test_a_kl_without_a_reference_is_refused():
    with pytest.raises(ValueError, match="kl_coef=0 keeps no reference"):
        make_trainer().reference_kl(batch_of())


def test_bypass_takes_the_ratio_from_the_rollouts_logprobs():
    trainer = make_trainer(old_logprobs="rollout")
    batch = batch_of()
    ours = trainer.score(batch)
    metrics = trainer.update(batch, 0)
    expected = (ours - batch.rollout_logprobs)[batch.mask].exp().mean()
    assert metrics["actor/ratio_mean"] == pytest.approx(float(expected), rel=1e-4)
    gap = (ours - batch.rollout_logprobs)[batch.mask].abs().mean()
    assert metrics["mismatch/abs_mean"] == pytest.approx(float(gap), rel=1e-4)
    assert make_trainer().update(batch, 0)["actor/ratio_mean"] == pytest.approx(1.0, abs=1e-6)


def test_bypass_refuses_what_it_makes_meaningless():
    with pytest.raises(ValueError, match="correction='tis'"):
        make_trainer(ObjectiveConfig(name="grpo", correction="tis"), old_logprobs="rollout")


def test_masters_in_the_compute_dtype_lose_steps_below_half_an_ulp():
    moved = {}
    for masters in ("float32", "compute"):
        trainer = make_trainer(
            dtype=torch.bfloat16,
            optimizer=OptimizerConfig(learning_rate=1e-5, max_grad_norm=0, masters=masters),
        )
        before = [m.detach().clone() for m in trainer.optimizer.masters.values()]
        trainer.update(batch_of(), 0)
        after = trainer.optimizer.masters.values()
        moved[masters] = sum(int((a != b).sum()) for a, b in zip(after, before, strict=True))
    # A BF16 weight of 0.02 has an ulp of 1.2e-4: AdamW's first step of 1e-5 moves few of them.
    assert moved["compute"] < 0.3 * moved["float32"]
