import pytest
import torch

from lowbitrl import collect
from lowbitrl.collect import Samples
from lowbitrl.rollout import Completion
from lowbitrl.tasks import Prompt, Scored
from tests.tiny_run import config


@pytest.mark.parametrize("order", [(0, 1), (1, 0)])
def test_a_scorer_that_applies_to_some_prompts_is_averaged_over_those(tmp_path, order):
    run = config(tmp_path, rollout={"prompts": 2, "samples": 2})
    scores = [[{"reward": 1.0}, {"reward": 0.0}], [{"first-number": 1.0, "reward": 0.0}] * 2]
    samples = Samples(
        prompts=[Prompt(id=str(i), text="?") for i in range(2)],
        prompt_ids=[[5], [6]],
        completions=[Completion(p, s, (7,), (-1.0,), "stop", 0) for p in range(2) for s in range(2)],
        texts=[""] * 4,
        scores=[score for i in order for score in scores[i]],
        rewards=torch.tensor([1.0, 0.0, 0.0, 0.0]),
    )
    _, metrics = collect.to_batch(run, samples)
    assert (metrics["reward/reward"], metrics["reward/first-number"]) == (0.25, 1.0)


class Words:
    """An engine whose completion of sample j of a prompt is `lengths(prompt id, j)` tokens long."""

    def __init__(self, lengths):
        self.lengths, self.calls = lengths, []

    def generate(self, prompts, n, sampling, seeds=None):
        self.calls.append((list(prompts), list(seeds)))
        rows = []
        for p, prompt in enumerate(prompts):
            for j in range(n):
                count = self.lengths(prompt[0], j)
                reason = "length" if count == sampling.max_tokens else "stop"
                rows.append(Completion(p, j, (7,) * count, (-1.0,) * count, reason, 0))
        return rows


class Numbered:
    """A task whose prompt i is the token i, rewarded by the completion's number of words."""

    scorer = "reward"

    def prompts(self, split, start, count):
        return [Prompt(id=str(i), text="?") for i in range(start, start + count)]

    def encode(self, tokenizer, prompt):
        return [int(prompt.id)]

    def score_all(self, pairs):
        return [Scored({"reward": float(len(text.split()))}) for _, text in pairs]


class Speller:
    all_special_ids = ()

    def decode(self, ids, **options):
        return " ".join("w" for _ in ids)


def drawn(tmp_path, lengths, start=0, step=0, **sections):
    run = config(tmp_path, **sections)
    engine = Words(lengths)
    return run, engine, collect.sample(run, engine, Numbered(), Speller(), step, start)


EVERY_THIRD_DIFFERS = lambda i, j: 1 + (i % 3 == 0) * j  # noqa: E731


def test_dynamic_sampling_draws_on_until_the_batch_is_full(tmp_path):
    sections = {
        "rollout": {"prompts": 4, "samples": 2, "resample": 9},
        "objective": {"drop_uninformative": True},
    }
    run, engine, samples = drawn(tmp_path, EVERY_THIRD_DIFFERS, start=100, **sections)
    # 102, 105, 108, 111 differ: the fourth is of the third round.
    assert [prompts for prompts, _ in engine.calls] == [
        [[i] for i in range(a, a + 4)] for a in (100, 104, 108)
    ]
    assert (samples.rounds, samples.consumed) == (3, 112)
    batch, metrics = collect.to_batch(run, samples)
    assert batch.prompts == tuple((i,) for i in (102, 102, 105, 105, 108, 108, 111, 111))
    assert metrics["rollout/rounds"] == 3
    assert metrics["rollout/batch_filled"] == 1
    assert metrics["reward/zero_variance_groups"] == pytest.approx(8 / 12)
    assert metrics["reward/mean"] == pytest.approx((8 * 1 + 4 * 1.5) / 12)
    seeds = [seed for _, round_seeds in engine.calls for seed in round_seeds]
    assert len(set(seeds)) == len(seeds)


def test_dynamic_sampling_stops_at_its_limit_and_says_how_full_the_batch_is(tmp_path):
    sections = {
        "rollout": {"prompts": 4, "samples": 2, "resample": 1},
        "objective": {"drop_uninformative": True},
    }
    run, _, samples = drawn(tmp_path, EVERY_THIRD_DIFFERS, **sections)
    batch, metrics = collect.to_batch(run, samples)
    assert samples.rounds == 2
    assert batch.prompts == ((0,), (0,), (3,), (3,), (6,), (6,))
    assert metrics["rollout/batch_filled"] == 0.75


def test_what_is_over_a_full_batch_is_not_trained_on(tmp_path):
    sections = {
        "rollout": {"prompts": 2, "samples": 2, "resample": 3},
        "objective": {"drop_uninformative": True},
    }
    run, _, samples = drawn(tmp_path, lambda i, j: 1 + (i > 0) * j, **sections)
    assert samples.rounds == 2
    assert collect.to_batch(run, samples)[0].prompts == ((1,), (1,), (2,), (2,))


def test_cut_off_responses_do_not_train_but_count_in_the_baseline(tmp_path):
    sections = {
        "rollout": {"prompts": 1, "samples": 3, "max_tokens": 3},
        "objective": {"overlong_filter": True, "advantage_scale": "none"},
    }
    run, _, samples = drawn(tmp_path, lambda i, j: 1 + j, **sections)
    batch, metrics = collect.to_batch(run, samples)
    assert [len(r) for r in batch.responses] == [1, 2]
    assert batch.advantages.tolist() == [-1.0, 0.0]
    assert metrics["rollout/overlong_filtered"] == pytest.approx(1 / 3)


def test_the_soft_overlong_penalty_goes_off_the_reward_before_the_baseline(tmp_path):
    sections = {
        "rollout": {"prompts": 1, "samples": 4, "max_tokens": 4},
        "objective": {"overlong_buffer": 2, "overlong_coef": 3.0, "advantage_scale": "none"},
    }
    run, _, samples = drawn(tmp_path, lambda i, j: 1 + j, **sections)
    batch, metrics = collect.to_batch(run, samples)
    shaped = torch.tensor([1.0, 2.0, 3.0 - 1.5, 4.0 - 3.0])
    torch.testing.assert_close(batch.advantages, shaped - shaped.mean())
    assert metrics["reward/overlong_penalty"] == pytest.approx(4.5 / 4)
    assert metrics["reward/mean"] == 2.5


def test_the_kl_goes_off_the_reward_and_makes_no_group_informative(tmp_path):
    sections = {
        "rollout": {"prompts": 2, "samples": 2},
        "objective": {"kl_coef": 0.5, "kl_in": "reward", "advantage_scale": "none"},
    }
    run, _, samples = drawn(tmp_path, lambda i, j: 1 + i * j, **sections)
    kl = lambda batch: torch.arange(len(batch), dtype=torch.float)  # noqa: E731
    batch, metrics = collect.to_batch(run, samples, kl)
    assert batch.advantages.tolist() == [0.25, -0.25, -0.25, 0.25]
    assert metrics["reward/kl"] == 1.5
    assert metrics["reward/zero_variance_groups"] == 0.5
    dropping = run.model_copy(
        update={"objective": run.objective.model_copy(update={"drop_uninformative": True})}
    )
    assert collect.to_batch(dropping, samples, kl)[0].prompts == ((1,), (1,))
