"""Losses for slime, prime-rl and NeMo-RL, called by stand-ins as those frameworks call a loss.

The stand-ins are written from the signatures at the commits that the modules name: what arrives, how it is cut
into micro-batches, and what is divided by what afterwards. The frameworks themselves are not installed.
"""

import enum
import importlib
import pickle
import sys
from argparse import Namespace
from dataclasses import dataclass
from types import ModuleType

import pytest
import torch

from lowbitrl.objectives import policy_loss

VOCABULARY, LENGTHS, PROMPTS = 11, (4, 7, 1, 5), (3, 1, 2, 2)


def stand_in(monkeypatch, name, **members):
    """A module of that name with those members, and the packages above it."""
    parts = name.split(".")
    for depth in range(1, len(parts) + 1):
        monkeypatch.setitem(sys.modules, ".".join(parts[:depth]), ModuleType(parts[depth - 1]))
    for key, value in members.items():
        setattr(sys.modules[name], key, value)


def load(path):
    """As slime's load_function and prime-rl's import_object do."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


@dataclass
class Responses:
    """Four responses of different lengths; the second has a masked token. Lists hold a tensor a response."""

    logits: list
    tokens: list
    old: list
    rollout: list
    masks: list
    advantages: list

    def padded(self, name):
        return torch.nn.utils.rnn.pad_sequence(getattr(self, name), batch_first=True)

    def logprobs(self):
        rows = [
            z[p - 1 : -1].log_softmax(-1).gather(-1, t[p:, None]).squeeze(-1)
            for z, t, p in zip(self.logits, self.tokens, PROMPTS, strict=True)
        ]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


@pytest.fixture
def responses():
    generator = torch.Generator().manual_seed(3)
    draw = lambda *shape: torch.randn(*shape, generator=generator)  # noqa: E731
    totals = [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)]
    made = Responses(
        [draw(t, VOCABULARY).requires_grad_() for t in totals],
        [torch.randint(0, VOCABULARY, (t,), generator=generator) for t in totals],
        [],
        [],
        [torch.ones(n) for n in LENGTHS],
        [torch.full((n,), a) for n, a in zip(LENGTHS, (1.0, -0.5, 0.7, -1.2), strict=True)],
    )
    made.masks[1][2] = 0
    exact = made.logprobs().detach()
    for row, n in enumerate(LENGTHS):
        made.old.append(exact[row, :n] + 0.05 * draw(n))
        made.rollout.append(made.old[row] + 0.1 * draw(n))
    return made


def expected(responses, name, **options):
    """The whole batch's loss and its gradient by logits, by `policy_loss` itself."""
    out = policy_loss(
        name,
        logprobs=responses.logprobs(),
        old_logprobs=responses.padded("old"),
        rollout_logprobs=responses.padded("rollout"),
        advantages=torch.stack([a[0] for a in responses.advantages]),
        mask=responses.padded("masks"),
        **options,
    )
    return out.loss.item(), gradient(out.loss, responses)


def gradient(loss, responses):
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, responses.logits)])


def check(loss, responses, wanted):
    assert loss.item() == pytest.approx(wanted[0], abs=1e-6)
    torch.testing.assert_close(gradient(loss, responses), wanted[1], atol=1e-6, rtol=1e-4)
    assert wanted[1].abs().max() > 1e-3


# ---- slime


def slime_scores(logits, *, args, unconcat_tokens, total_lengths, response_lengths, with_entropy=False):
    """(empty, lists of log-probabilities and entropies) of the packed sequences' responses."""
    rows = logits.squeeze(0).split(total_lengths)
    logprobs, entropy = [], []
    for z, tokens, n in zip(rows, unconcat_tokens, response_lengths, strict=True):
        scaled = (z / args.rollout_temperature)[-n - 1 : -1].log_softmax(-1)
        logprobs.append(scaled.gather(-1, tokens[-n:, None]).squeeze(-1))
        entropy.append(-(scaled.exp() * scaled).sum(-1))
    return torch.empty(0), {"log_probs": logprobs} | ({"entropy": entropy} if with_entropy else {})


def slime_reducer(lengths, masks, per_token):
    sums = [m.sum().clamp(min=1) for m in masks]

    def sum_of_sample_mean(x):
        parts = zip(x.split(lengths), masks, sums, strict=True)
        return sum((part * mask).sum() / (1 if per_token else total) for part, mask, total in parts)

    return sum_of_sample_mean


def slime_batches(responses, size, args):
    """(batch, logits, reducer) of micro-batches of `size` responses."""
    for first in range(0, len(LENGTHS), size):
        cut = slice(first, first + size)
        lengths = list(LENGTHS[cut])
        batch = {
            "advantages": responses.advantages[cut],
            "loss_masks": responses.masks[cut],
            "log_probs": responses.old[cut],
            "rollout_log_probs": responses.rollout[cut],
            "unconcat_tokens": responses.tokens[cut],
            "total_lengths": [p + n for p, n in zip(PROMPTS[cut], lengths, strict=True)],
            "response_lengths": lengths,
        }
        logits = torch.cat(responses.logits[cut]).unsqueeze(0)
        yield batch, logits, slime_reducer(lengths, batch["loss_masks"], args.calculate_per_token_loss)


@pytest.fixture
def slime_args(monkeypatch):
    stand_in(monkeypatch, "slime.backends.megatron_utils.loss", get_log_probs_and_entropy=slime_scores)
    return Namespace(
        calculate_per_token_loss=False,
        use_rollout_logprobs=False,
        use_kl_loss=False,
        entropy_coef=0.0,
        rollout_top_p=1.0,
        rollout_temperature=1.0,
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "per_token"), [("tbpo", False), ("gspo", False), ("dapo", True)])
def test_slime_loss_is_the_objective_however_it_is_cut(name, per_token, size, responses, slime_args):
    slime_args.lowbitrl, slime_args.calculate_per_token_loss = {"objective": {"name": name}}, per_token
    function = load("lowbitrl.integrations.slime.loss")
    parts = [function(slime_args, *b) for b in slime_batches(responses, size, slime_args)]
    divisor = float(sum(m.sum() for m in responses.masks)) if per_token else len(LENGTHS)
    check(sum(loss for loss, _ in parts) / divisor, responses, expected(responses, name))
    logged = sum(metrics["train_rollout_logprob_abs_diff"] for _, metrics in parts) / divisor
    gap = (responses.padded("old") - responses.padded("rollout")).abs()
    weights = responses.padded("masks")
    if per_token or size == 1:
        means = gap.sum() / 17 if per_token else None
        rows = ((gap * weights).sum(-1) / weights.sum(-1)).mean()
        wanted = (gap * weights).sum() / weights.sum() if means is not None else rows
        assert logged.item() == pytest.approx(wanted.item(), rel=1e-5)


def test_slime_takes_the_engines_logprobs_as_old_where_it_says_so(responses, slime_args):
    slime_args.use_rollout_logprobs = True
    slime_args.lowbitrl = {"objective": {"name": "grpo"}}
    (batch,) = slime_batches(responses, 4, slime_args)
    loss, _ = load("lowbitrl.integrations.slime.loss")(slime_args, *batch)
    responses.old = responses.rollout
    check(loss / len(LENGTHS), responses, expected(responses, "grpo"))


def test_slime_without_scored_logprobs_is_on_policy(responses, slime_args):
    ((batch, *rest),) = slime_batches(responses, 4, slime_args)
    loss, metrics = load("lowbitrl.integrations.slime.loss")(slime_args, batch | {"log_probs": None}, *rest)
    responses.old = list(map(torch.Tensor.clone, responses.old))
    for row, exact in enumerate(responses.logprobs().detach()):
        responses.old[row] = exact[: LENGTHS[row]]
    check(loss / len(LENGTHS), responses, expected(responses, "tbpo"))
    assert metrics["actor/ratio_mean"].item() == pytest.approx(4.0)  # slime divides by the 4 responses


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"use_kl_loss": True}, "--use-kl-loss"),
        ({"rollout_top_p": 0.9}, "--rollout-top-p 0.9"),
        ({"lowbitrl": {"objective": {"name": "tbpo", "entropy_coef": 0.1}}}, "--entropy-coef"),
        ({"lowbitrl": {"objective": {"name": "grpo", "correction": "rejection"}}}, "count_rejected=true"),
        ({"lowbitrl": {"objectives": {}}}, "lowbitrl.objectives is unknown"),
        ({"lowbitrl": {"objective": {"name": "tpbo"}}}, "did you mean 'tbpo'"),
    ],
)
def test_slime_settings_that_would_do_nothing_are_refused(change, text, responses, slime_args):
    (batch,) = slime_batches(responses, 4, slime_args)
    with pytest.raises(ValueError, match=text):
        load("lowbitrl.integrations.slime.loss")(Namespace(**(vars(slime_args) | change)), *batch)


def test_slime_refuses_split_responses_and_advantages_a_token(responses, slime_args):
    ((batch, *rest),) = slime_batches(responses, 4, slime_args)
    function = load("lowbitrl.integrations.slime.loss")
    halves = [row[: len(row) // 2] for row in responses.old]
    with pytest.raises(ValueError, match="context parallel"):
        function(slime_args, batch | {"log_probs": halves}, *rest)
    with pytest.raises(ValueError, match="differ within a response"):
        function(slime_args, batch | {"advantages": [torch.arange(float(n)) for n in LENGTHS]}, *rest)


@pytest.mark.parametrize(
    "options", [{"correction": "tis", "cap": 1.05}, {"correction": "mis", "level": "token", "cap": 1.1}]
)
def test_slime_tis_weighs_slimes_own_loss(options, responses, slime_args):
    slime_args.lowbitrl = {"tis": options}
    (batch,) = slime_batches(responses, 4, slime_args)
    batch = batch[0]
    pg_loss = torch.randn(sum(LENGTHS))
    weighed, masks, metrics = load("lowbitrl.integrations.slime.tis")(
        slime_args,
        pg_loss=pg_loss,
        train_log_probs=batch["log_probs"],
        rollout_log_probs=batch["rollout_log_probs"],
        loss_masks=batch["loss_masks"],
        total_lengths=batch["total_lengths"],
        response_lengths=batch["response_lengths"],
    )
    ratio = (torch.cat(responses.old) - torch.cat(responses.rollout)).exp()
    loss_mask = torch.cat(responses.masks)
    kept = ratio <= options["cap"] if options["correction"] == "mis" else torch.ones_like(ratio)
    wanted = pg_loss * (ratio * kept).clamp(max=options["cap"])
    torch.testing.assert_close(weighed * loss_mask, wanted * loss_mask)
    torch.testing.assert_close(torch.cat(masks), loss_mask * kept)
    assert [len(m) for m in masks] == list(LENGTHS)
    assert metrics["tis_rejected"].sum() == (1 - kept.float())[loss_mask.bool()].sum()
    assert 0 < (ratio > options["cap"]).sum() < len(ratio)


# ---- prime-rl


@dataclass
class LossInputs:
    trainer_logprobs: torch.Tensor
    inference_logprobs: torch.Tensor
    ref_logprobs: torch.Tensor | None
    advantages: torch.Tensor
    loss_mask: torch.Tensor
    loss_weights: torch.Tensor | None = None


@dataclass
class LossOutputs:
    loss: torch.Tensor
    metrics: dict


def prime_rl(monkeypatch, responses, weights=None, **kwargs):
    """(loss, metrics) as compute_loss gives them for one packed batch with a custom loss."""
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    function = load("lowbitrl.integrations.prime_rl.loss")
    total, logged, logprobs = 0.0, {}, responses.logprobs()
    for row, n in enumerate(LENGTHS):
        mask = responses.masks[row].bool()
        inputs = LossInputs(
            logprobs[row, :n],
            responses.rollout[row],
            None,
            responses.advantages[row],
            mask if weights is None else mask & (weights[row] != 0),
            None if weights is None else weights[row],
        )
        out = function(inputs, **kwargs)
        assert out.loss.ndim == 0
        total = total + out.loss
        for key, value in out.metrics.items():
            logged.setdefault(key, []).append(value)
    scale = int(sum(m.sum() for m in responses.masks))
    return total / scale, {key: torch.stack(values) for key, values in logged.items()}


@pytest.mark.parametrize("name", ["tbpo", "dapo", "cispo"])
@pytest.mark.parametrize("old", ["trainer", "inference"])
def test_prime_rl_loss_is_the_objective_averaged_over_tokens(name, old, responses, monkeypatch):
    loss, metrics = prime_rl(monkeypatch, responses, objective=name, old=old)
    exact = responses.logprobs().detach()
    responses.old = (
        [exact[row, :n] for row, n in enumerate(LENGTHS)] if old == "trainer" else responses.rollout
    )
    check(loss, responses, expected(responses, name, aggregate="token-mean"))
    assert metrics["mismatch/abs_mean"].shape == (4,)
    assert (metrics["mismatch/abs_mean"] > 0).all()


def test_prime_rl_weights_scale_a_tokens_loss(responses, monkeypatch):
    weights = [torch.full((n,), 2.0) for n in LENGTHS]
    loss, _ = prime_rl(monkeypatch, responses, weights, objective="dapo")
    plain, _ = prime_rl(monkeypatch, responses, objective="dapo")
    assert loss.item() == pytest.approx(2 * plain.item(), rel=1e-5)


def test_prime_rl_without_a_token_has_a_loss_to_go_back_through(responses, monkeypatch):
    responses.masks = [torch.zeros(n) for n in LENGTHS]
    stand_in(monkeypatch, "prime_rl.trainer.rl.loss", LossOutputs=LossOutputs)
    logprobs = responses.logprobs()[0, :4]
    inputs = LossInputs(logprobs, responses.rollout[0], None, responses.advantages[0], torch.zeros(4).bool())
    out = load("lowbitrl.integrations.prime_rl.loss")(inputs)
    assert out.loss.item() == 0
    out.loss.backward()


@pytest.mark.parametrize(
    ("kwargs", "text"),
    [
        ({"aggregate": "seq-mean-token-mean"}, "divides by the batch's"),
        ({"old": "rollout"}, "neither 'trainer' nor 'inference'"),
        ({"objective": "grpo", "old": "inference", "correction": "tis"}, "makes equal"),
        ({"parameters": {"tis_capp": 2.0}}, "did you mean 'tis_cap'"),
    ],
)
def test_prime_rl_settings_that_would_do_nothing_are_refused(kwargs, text, responses, monkeypatch):
    with pytest.raises(ValueError, match=text):
        prime_rl(monkeypatch, responses, **kwargs)


# ---- NeMo-RL


class LossType(enum.Enum):
    TOKEN_LEVEL = "token_level"
    SEQUENCE_LEVEL = "sequence_level"


class LossInputType(enum.Enum):
    LOGPROB = "logprob"


class MetricNormalizer(enum.Enum):
    TOKENS = "tokens"
    SEQUENCES = "sequences"
    NONE = "none"


@pytest.fixture
def nemo(monkeypatch):
    names = {"LossType": LossType, "LossInputType": LossInputType, "MetricNormalizer": MetricNormalizer}
    stand_in(monkeypatch, "nemo_rl.algorithms.loss.interfaces", **names)
    return load("lowbitrl.integrations.nemo_rl.PolicyLossFn")


def nemo_batch(responses):
    """(next-token log-probabilities (B, S - 1), the batch's (B, S) tensors): prompts are masked."""
    width = max(p + n for p, n in zip(PROMPTS, LENGTHS, strict=True))
    spread = {"old": "prev_logprobs", "rollout": "generation_logprobs"}
    spread |= {"advantages": "advantages", "masks": "token_mask"}
    data = {key: torch.zeros(4, width) for key in spread.values()} | {"sample_mask": torch.ones(4)}
    for name, key in spread.items():
        for row, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
            data[key][row, p : p + n] = getattr(responses, name)[row]
    logprobs, exact = torch.zeros(4, width - 1), responses.logprobs()
    for row, (p, n) in enumerate(zip(PROMPTS, LENGTHS, strict=True)):
        logprobs = logprobs.index_put((torch.tensor(row), torch.arange(p - 1, p + n - 1)), exact[row, :n])
    return logprobs, data


def nemo_call(function, logprobs, data, sequences, tokens):
    """As NeMo-RL's wrappers do, by keyword."""
    return function(
        data=data, global_valid_seqs=sequences, global_valid_toks=tokens, next_token_logprobs=logprobs
    )


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize("name", ["tbpo", "gspo", "dapo"])
def test_nemo_loss_is_the_objective_however_it_is_cut(name, size, responses, nemo):
    function = nemo(name)
    logprobs, data = nemo_batch(responses)
    counts = data["sample_mask"].sum(), data["token_mask"].sum()
    parts = []
    for first in range(0, 4, size):
        micro = {key: value[first : first + size] for key, value in data.items()}
        parts.append(nemo_call(function, logprobs[first : first + size], micro, *counts))
    check(sum(loss for loss, _ in parts), responses, expected(responses, name))
    summed = {key: sum(metrics[key] for _, metrics in parts) for key in parts[0][1]}
    gap = (data["prev_logprobs"] - data["generation_logprobs"]).abs()
    wanted = (gap.exp() * data["token_mask"]).sum() / data["token_mask"].sum()
    assert summed["token_mult_prob_error"] == pytest.approx(wanted.item(), rel=1e-5)
    assert summed["num_valid_samples"] == 4
    assert all(isinstance(value, float) for _, metrics in parts for value in metrics.values())
    assert function.metric_normalizations["token_mult_prob_error"] is MetricNormalizer.TOKENS
    assert function.input_type is LossInputType.LOGPROB
    assert function.loss_type is (LossType.TOKEN_LEVEL if name == "dapo" else LossType.SEQUENCE_LEVEL)


def test_nemo_leaves_masked_samples_out(responses, nemo):
    logprobs, data = nemo_batch(responses)
    data["sample_mask"][3] = 0
    loss, metrics = nemo_call(nemo("tbpo"), logprobs, data, data["sample_mask"].sum(), torch.tensor(11.0))
    responses.masks[3] = torch.zeros(LENGTHS[3])
    check(loss, responses, expected(responses, "tbpo"))
    assert metrics["num_valid_samples"] == 3


def test_nemo_names_what_the_batch_lacks(responses, nemo):
    logprobs, data = nemo_batch(responses)
    del data["prev_logprobs"]
    with pytest.raises(ValueError, match=r"'prev_logprobs'.*force_on_policy_ratio=false"):
        nemo_call(nemo(), logprobs, data, torch.tensor(4), torch.tensor(16))
    with pytest.raises(ValueError, match="entropies do not reach"):
        nemo(entropy_coef=0.1)


def test_nemo_sends_its_loss_to_workers(responses, nemo):
    logprobs, data = nemo_batch(responses)
    there = pickle.loads(pickle.dumps(nemo("gspo", correction="tis", cap=2.0)))
    loss, _ = nemo_call(there, logprobs, data, torch.tensor(4), torch.tensor(16))
    check(loss, responses, expected(responses, "gspo", correction="tis", cap=2.0))


def test_nemo_weighs_the_mismatch(responses, nemo):
    options = {"correction": "icepop", "cap": 1.05, "floor": 0.5}
    logprobs, data = nemo_batch(responses)
    loss, metrics = nemo_call(nemo("grpo", **options), logprobs, data, torch.tensor(4), torch.tensor(16))
    check(loss, responses, expected(responses, "grpo", **options))
    assert loss != nemo_call(nemo("grpo"), logprobs, data, torch.tensor(4), torch.tensor(16))[0]
    assert not any(torch.isnan(torch.tensor(value)) for value in metrics.values())
