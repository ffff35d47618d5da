"""Logits that are not finite, completions without tokens, bytes that are no UTF-8, groups of equal rewards."""

from __future__ import annotations

import math

import pytest
import torch
from tokenizers import Tokenizer, decoders, models
from transformers import PreTrainedTokenizerFast

from lowbitrl import collect
from lowbitrl.assemble import assemble
from lowbitrl.evaluation import evaluate
from lowbitrl.faults import Faults, count_not_utf8, fault_of, sound
from lowbitrl.loop import train
from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Completion, Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.runs import read_metrics
from lowbitrl.tasks import completion_text, make_task
from tests.conftest import tiny_llama
from tests.tiny_run import config, tokenizer

quiet = lambda line: None  # noqa: E731
PROMPTS = [[5, 6], [7, 8, 9], [10, 11]]
SAMPLING = Sampling(max_tokens=12)


def engine_of(scheduler, residual=0.0):
    model = tiny_llama(torch.float32)
    prepare(model, Recipe(rollout="nvfp4", residual=residual), "rollout")
    return EmbeddedEngine(model, scheduler)


def poison(engine, token):
    """From now on what follows `token` has NaN for its logits, as an overflow would."""

    def after(module, args, kwargs, output):
        ids = kwargs["input_ids"][:, -1]
        logits = output.logits
        logits[:, -1] = torch.where((ids == token)[:, None], torch.nan, logits[:, -1])
        return output

    engine.model.register_forward_hook(after, with_kwargs=True)


@pytest.mark.parametrize("scheduler", ["batch", "graph"])
def test_a_row_of_broken_logits_ends_there_and_leaves_the_others_alone(scheduler):
    engine = engine_of(scheduler)
    healthy = engine.generate(PROMPTS, 6, SAMPLING)
    counts = torch.tensor([t for c in healthy for t in c.token_ids[:-1]]).bincount(minlength=128)
    counts[2] = 0
    bad = int(counts.argmax())
    poison(engine, bad)
    found = engine.generate(PROMPTS, 6, SAMPLING)
    broken = [c for c in found if c.finish_reason == "nonfinite"]
    assert 0 < len(broken) < len(found)
    for before, after in zip(healthy, found, strict=True):
        if bad in before.token_ids[:-1]:
            end = before.token_ids.index(bad) + 1
            assert (after.finish_reason, after.token_ids) == ("nonfinite", before.token_ids[:end])
            assert all(map(math.isfinite, after.rollout_logprobs))
        else:
            assert after == before


@pytest.mark.parametrize("scheduler", ["batch", "graph"])
def test_broken_after_the_prompt_is_a_completion_without_tokens(scheduler):
    engine = engine_of(scheduler)
    poison(engine, PROMPTS[1][-1])
    found = engine.generate(PROMPTS, 2, Sampling(max_tokens=3))
    lost = [c for c in found if c.prompt_index == 1]
    assert [(c.finish_reason, c.token_ids) for c in lost] == [("nonfinite", ())] * 2
    assert all(c.token_ids for c in found if c.prompt_index != 1)


def test_weights_that_break_every_row_are_no_row_s_fault():
    engine = engine_of("batch")
    for token in range(128):
        poison(engine, token)
    with pytest.raises(
        RuntimeError, match="logits of all 6 rows are not finite: the weights of version -1 are broken"
    ):
        engine.generate(PROMPTS, 2, SAMPLING)


def completion(**fields):
    return Completion(**{"prompt_index": 0, "sample_index": 0, "token_ids": (5,), "rollout_logprobs": (-1.0,),
                         "finish_reason": "stop", "version": 0} | fields)  # fmt: skip


@pytest.mark.parametrize(
    ("fields", "kind"),
    [
        ({}, None),
        ({"finish_reason": "length"}, None),
        ({"finish_reason": "nonfinite"}, "nonfinite_logits"),
        ({"rollout_logprobs": (math.nan,)}, "nonfinite_logits"),
        ({"rollout_logprobs": (-math.inf,)}, "nonfinite_logits"),
        ({"finish_reason": "abort"}, "aborted"),
        ({"token_ids": (), "rollout_logprobs": ()}, "empty"),
    ],
)
def test_lost_completions_are_told_apart(fields, kind):
    one = completion(**fields)
    assert fault_of(one) == kind
    faults = Faults()
    kept = sound([completion(), one, completion()], ["p/0"], 0.5, faults)
    assert len(kept) == (3 if kind is None else 2)
    assert sum(faults.metrics().values()) == (kind is not None)


def test_too_many_lost_stop_the_run():
    rows = [completion(), *[completion(finish_reason="nonfinite", sample_index=i) for i in range(3)]]
    with pytest.raises(RuntimeError, match=r"3 of 4 completions of version 0 are lost, rollout\.most_lost is 0\.5: .*"
                       r"faults/nonfinite_logits: sample 0 of prompt 'p/0', after 1 tokens"):  # fmt: skip
        sound(rows, ["p/0"], 0.5, Faults())
    assert len(sound(rows, ["p/0"], 0.75, Faults())) == 1


class Losing:
    """An engine that loses every fourth completion, in one of the three ways."""

    ways = (
        {"finish_reason": "nonfinite"},
        {"finish_reason": "abort"},
        {"token_ids": (), "rollout_logprobs": ()},
    )

    def __init__(self, engine):
        self.engine, self.lost = engine, 0

    def generate(self, *arguments, **options):
        found = self.engine.generate(*arguments, **options)
        for i in range(3, len(found), 4):
            way = self.ways[self.lost % 3]
            found[i] = Completion(**{**vars(found[i]), **way})
            self.lost += 1
        return found


def test_a_run_goes_on_without_them_and_counts_them(tmp_path, monkeypatch):
    def losing(*arguments):
        parts, start = assemble(*arguments)
        parts.sampler = Losing(parts.sampler)
        return parts, start

    monkeypatch.setattr("lowbitrl.loop.assemble", losing)
    said = []
    folder = train(config(tmp_path, evaluation={"every": 0}, trainer={"steps": 3}), say=said.append)
    total = dict.fromkeys(("nonfinite_logits", "aborted", "empty"), 0.0)
    for line in read_metrics(folder)[1:]:
        lost = {kind: line[f"faults/{kind}"] for kind in total}
        assert sum(lost.values()) == 4
        assert line["rollout/batch_filled"] == 12 / 16
        assert line["actor/grad_norm"] > 0
        total = {kind: total[kind] + lost[kind] for kind in total}
    assert all(total.values())
    assert all(sum(f"faults/{kind}: sample 3 of prompt" in line for line in said) == 1 for kind in total)


def test_what_is_left_of_a_group_has_its_own_baseline(tmp_path):
    run = config(tmp_path, rollout={"prompts": 2, "samples": 3})
    rows = [(0, 0, 1.0), (0, 2, 0.0), (1, 0, 2.0), (1, 1, 4.0), (1, 2, 6.0)]
    samples = collect.Samples(
        prompts=[], prompt_ids=[[5], [6]], completions=[completion(prompt_index=p, sample_index=j) for p, j, _ in rows],
        texts=[""] * 5, scores=[{"reward": r} for *_, r in rows], rewards=torch.tensor([r for *_, r in rows]),
    )  # fmt: skip
    batch, metrics = collect.to_batch(run, samples)
    root = math.sqrt(0.5)
    torch.testing.assert_close(
        batch.advantages, torch.tensor([root, -root, -1.0, 0.0, 1.0]), atol=1e-5, rtol=0
    )
    assert metrics["reward/zero_variance_groups"] == 0


def test_broken_logits_in_an_evaluation_are_a_wrong_answer(tmp_path):
    run = config(tmp_path)
    task = make_task(run.task, run.rewards)

    class Half:
        def generate(self, *arguments, **options):
            return [
                completion(prompt_index=p, finish_reason=why)
                for p in range(2)
                for why in ("stop", "nonfinite")
            ]

    result = evaluate(Half(), task, tokenizer(), count=2, n=2, k=2, sampling=None)
    right = task.score_all([(task.prompts("held_out", 0, 1)[0], "w5")])[0].scores["reward"]
    assert result.avg_at_n == pytest.approx(right / 2)
    assert result.aborted == 0
    task.close()


def bytes_tokenizer():
    """One token a byte."""
    backend = Tokenizer(models.BPE({letter: i for i, letter in enumerate(_byte_letters())}, []))
    backend.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=backend)


def _byte_letters():
    from transformers.convert_slow_tokenizer import bytes_to_unicode

    table = bytes_to_unicode()
    return [table[i] for i in range(256)]


@pytest.mark.parametrize(
    "raw", [b"\xff", b"ok \xc3", b"\xe2\x82", b"\xed\xa0\x80", b"\xf8\x88\x80\x80\x80 ok", b"a\x80b"]
)
def test_bytes_that_are_no_utf8_become_a_text_that_says_so(raw, tmp_path):
    text = completion_text(bytes_tokenizer(), list(raw))
    text.encode()  # no half of a surrogate pair either
    faults = Faults()
    count_not_utf8([text, "sound"], faults)
    assert faults.metrics()["faults/not_utf8"] == 1
    run = config(tmp_path)
    task = make_task(run.task, run.rewards)
    assert not task.score_all([(task.prompts("train", 0, 1)[0], text)])[0].failures
    task.close()


def test_utf8_is_not_counted():
    text = completion_text(bytes_tokenizer(), list("sound: \N{EURO SIGN} \N{GRINNING FACE}".encode()))
    faults = Faults()
    count_not_utf8([text], faults)
    assert text.endswith("\N{GRINNING FACE}")
    assert faults.metrics()["faults/not_utf8"] == 0


def test_tokens_beyond_the_vocabulary_decode_to_nothing():
    """Models have more rows of embeddings than tokenizers have words."""
    assert completion_text(tokenizer(), [5, 120_000, 6]) == "w5 w6"


def test_groups_of_equal_rewards_are_counted_and_said_once(tmp_path):
    said = []
    task = {"reward": "tests.tiny_rewards:constant"}
    folder = train(
        config(tmp_path, task=task, trainer={"steps": 2}, evaluation={"every": 0}), say=said.append
    )
    lines = read_metrics(folder)[1:]
    assert all(line["reward/zero_variance_groups"] == 1 for line in lines)
    assert (
        sum("reward/zero_variance_groups: step 1 learns nothing from rewards" in line for line in said) == 1
    )
