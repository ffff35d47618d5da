"""pass@k against brute force, errors against numpy, and a whole evaluation worked out by hand."""

import itertools
import json
import math
from dataclasses import dataclass

import numpy as np
import pytest

from lowbitrl.evaluation import evaluate, mean_and_error, pass_at_k
from lowbitrl.tasks import Prompt, Scored


@pytest.mark.parametrize("n", range(1, 8))
def test_pass_at_k_counts_subsets(n):
    for correct, k in itertools.product(range(n + 1), range(1, n + 1)):
        subsets = list(itertools.combinations([True] * correct + [False] * (n - correct), k))
        assert pass_at_k(n, correct, k) == pytest.approx(sum(map(any, subsets)) / len(subsets), abs=1e-15)


def test_pass_at_k_is_unbiased_where_one_minus_failure_to_the_k_is_not():
    # Over c ~ Binomial(n, p) the mean of the estimate is 1 - (1 - p)^k.
    n, k, p = 8, 4, 0.3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    estimate = sum(w * pass_at_k(n, c, k) for c, w in enumerate(chance))
    plug_in = sum(w * (1 - (1 - c / n) ** k) for c, w in enumerate(chance))
    assert estimate == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert abs(plug_in - estimate) > 0.03


def test_pass_at_k_of_many_samples_stays_exact():
    assert pass_at_k(10_000, 1, 5_000) == 0.5


@pytest.mark.parametrize(("n", "correct", "k"), [(4, 5, 1), (4, -1, 1), (4, 2, 0), (4, 2, 5)])
def test_pass_at_k_refuses_the_impossible(n, correct, k):
    with pytest.raises(ValueError, match=rf"pass@{k} of {n} samples, {correct} correct"):
        pass_at_k(n, correct, k)


def test_error_is_that_of_prompts():
    values = [0.0, 0.25, 1.0, 0.5, 0.5]
    mean, error = mean_and_error(values)
    assert mean == pytest.approx(0.45)
    assert error == pytest.approx(np.std(values, ddof=1) / math.sqrt(5))
    assert math.isnan(mean_and_error([0.3])[1])


@dataclass
class Sampled:
    prompt_index: int
    token_ids: tuple
    finish_reason: str = "stop"


class Letters:
    """A tokenizer whose ids are character codes; 0 is the end token, which decoding drops."""

    def decode(self, ids, **options):
        assert options["skip_special_tokens"]
        return "".join(chr(i) for i in ids if i)


class Task:
    """The answer to prompt i is i; `half` gives half a point to everything."""

    name, scorer, held_out_count = "echo", "exact", 3

    def prompts(self, split, start, count):
        assert (split, start) == ("held_out", 0)
        return [Prompt(id=str(i), text="?", answer=str(i)) for i in range(count)]

    def scores(self, prompt, completion):
        return {"exact": float(completion == prompt.answer), "half": 0.5}

    def score_all(self, pairs):
        return [Scored(self.scores(prompt, completion)) for prompt, completion in pairs]

    def encode(self, tokenizer, prompt):
        return [100 + int(prompt.answer)]


class Engine:
    """Answers from a script of (prompt index, text, finish reason), shuffled as engines may."""

    def __init__(self, script):
        self.script = script
        self.calls = []

    def generate(self, prompts, n, sampling, seeds=None):
        self.calls.append((prompts, n, sampling, seeds))
        done = [
            Sampled(i, (*map(ord, text), 0)[: 1 if why == "length" else None], why)
            for i, text, why in self.script
        ]
        return done[::-1]


SCRIPT = [
    *[(0, "0", "stop"), (0, "0", "stop"), (0, "0", "length"), (0, "7", "stop")],
    *[(1, "1", "stop"), (1, "", "stop"), (1, "2", "stop"), (1, "3", "length")],
    *[(2, "9", "stop"), (2, "9", "stop"), (2, "9", "stop"), (2, "9", "stop")],
]


def test_an_evaluation_by_hand():
    engine = Engine(SCRIPT)
    result = evaluate(engine, Task(), Letters(), n=4, k=2, sampling="as given", seed=50)
    assert engine.calls == [([[100], [101], [102]], 4, "as given", [50, 51, 52])]
    by_prompt = [3 / 4, 1 / 4, 0]
    assert result.pass_at_1 == pytest.approx(1 / 3)
    assert result.pass_at_1_error == pytest.approx(np.std(by_prompt, ddof=1) / math.sqrt(3))
    # Pairs without a correct one: none of 6, 3 of 6, all.
    assert result.pass_at_k == pytest.approx((1 + 1 / 2 + 0) / 3)
    assert result.scores == {"exact": pytest.approx(1 / 3), "half": 0.5}
    assert (result.truncated, result.aborted) == (2 / 12, 0)
    # Ten ended ones of two tokens but one empty of one; two cut at one token.
    assert result.mean_tokens == pytest.approx((9 * 2 + 1 + 2) / 12)


def test_rewards_between_0_and_1_count_in_the_average_and_not_as_correct():
    task = Task()
    task.scorer = "half"
    result = evaluate(Engine(SCRIPT), task, Letters(), n=4, sampling=None)
    assert (result.avg_at_n, result.avg_at_n_error) == (0.5, 0.0)
    assert (result.pass_at_1, result.pass_at_k) == (0.0, 0.0)
    assert evaluate(Engine(SCRIPT), task, Letters(), n=4, sampling=None, success=0.5).pass_at_1 == 1.0


def test_aborted_samples_are_counted_and_left_out():
    script = [(i, text, "abort" if (i, text) == (0, "7") else why) for i, text, why in SCRIPT]
    result = evaluate(Engine(script), Task(), Letters(), n=4, k=2, sampling=None)
    assert (result.aborted, result.pass_at_1) == (1, pytest.approx((1 + 1 / 4) / 3))
    with pytest.raises(ValueError, match=r"aborts left prompt 0 only 3 samples, k = 4"):
        evaluate(Engine(script), Task(), Letters(), n=4, k=4, sampling=None)


def test_metrics_are_flat_and_json():
    metrics = evaluate(Engine(SCRIPT), Task(), Letters(), n=4, k=2, sampling=None).metrics()
    assert metrics["eval/pass@2"] == pytest.approx(0.5)
    assert metrics["eval/score/half"] == 0.5
    assert json.loads(json.dumps(metrics)) == metrics


@pytest.mark.parametrize(
    ("fields", "error", "message"),
    [
        ({"n": 4, "k": 5}, ValueError, r"k = 5, n = 4"),
        ({"n": 0}, ValueError, r"k = 0, n = 0"),
        ({"n": 4, "count": 0}, ValueError, r"count = 0 on 'echo': nothing to evaluate"),
        ({"n": 2}, RuntimeError, r"returned 12 completions for 3 prompts x 2; prompt 0 has 4"),
        ({"n": 4, "count": 2}, RuntimeError, r"returned 12 completions for 2 prompts x 4"),
    ],
)
def test_errors(fields, error, message):
    with pytest.raises(error, match=message):
        evaluate(Engine(SCRIPT), Task(), Letters(), sampling=None, **fields)


def test_a_scorer_is_averaged_over_the_prompts_that_it_applies_to():
    class Mixed(Task):
        def scores(self, prompt, completion):
            scores = super().scores(prompt, completion)
            return scores | {"number": 1.0} if prompt.answer == "2" else scores

    engine = Engine([(i, "1", "stop") for i in range(3)])
    result = evaluate(engine, Mixed(), Letters(), n=1, sampling=None)
    assert result.scores == {"exact": pytest.approx(1 / 3), "half": 0.5, "number": 1.0}
