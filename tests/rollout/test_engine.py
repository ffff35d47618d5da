"""The embedded engine: seeds, stops, order, log-probabilities, refusals."""

import copy

import pytest
import torch

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine, prompt_seed
from lowbitrl.rollout.embedded.engine import _chunks
from lowbitrl.sync.publisher import publish
from tests.conftest import tiny_llama

PROMPTS = [[5, 6, 7], [8, 9, 10, 11], [3], [20, 21, 22]]


def engine_of(rollout="bf16", dtype=torch.float32, **options):
    model = tiny_llama(dtype)
    residual = 0.5 if rollout == "nvfp4" else 0.0
    prepare(model, Recipe(rollout=rollout, residual=residual), "rollout")
    return EmbeddedEngine(model, **options)


def tokens(completions):
    return [c.token_ids for c in completions]


def test_completions_come_by_prompt_then_sample():
    out = engine_of().generate(PROMPTS, 3, Sampling(max_tokens=4))
    assert [(c.prompt_index, c.sample_index) for c in out] == [(p, s) for p in range(4) for s in range(3)]
    assert all(1 <= len(c.token_ids) <= 4 and len(c.rollout_logprobs) == len(c.token_ids) for c in out)


@pytest.mark.parametrize("rollout", ["bf16", "nvfp4-w4a16"])
@pytest.mark.parametrize("max_batch", [1, 3, 5, 256])
def test_batch_size_order_and_company_change_nothing(rollout, max_batch):
    seeds = [11, 12, 13, 14]
    whole = engine_of(rollout).generate(PROMPTS, 4, Sampling(max_tokens=5), seeds)
    split = engine_of(rollout, max_batch=max_batch).generate(PROMPTS, 4, Sampling(max_tokens=5), seeds)
    assert tokens(split) == tokens(whole)
    backwards = engine_of(rollout).generate(PROMPTS[::-1], 4, Sampling(max_tokens=5), seeds[::-1])
    assert tokens(backwards)[-4:] == tokens(whole)[:4]
    alone = engine_of(rollout).generate(PROMPTS[1:2], 4, Sampling(max_tokens=5), seeds[1:2])
    assert tokens(alone) == tokens(whole)[4:8]
    for a, b in zip(alone, whole[4:8], strict=True):
        assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-5)


def test_same_seed_same_samples_and_another_seed_others():
    engine = engine_of("nvfp4", torch.bfloat16)
    first, again, other = (
        tokens(engine.generate(PROMPTS, 4, Sampling(max_tokens=6), [seed] * 4)) for seed in (1, 1, 2)
    )
    assert first == again
    assert first != other


def test_samples_of_one_prompt_differ():
    out = engine_of().generate([[5, 6]], 16, Sampling(max_tokens=6))
    assert len(set(tokens(out))) > 8


@pytest.mark.parametrize("rollout", ["bf16", "nvfp4-w4a16"])
def test_logprobs_are_those_of_a_plain_forward(rollout):
    engine = engine_of(rollout)
    out = engine.generate(PROMPTS, 4, Sampling(max_tokens=5, temperature=0.7))
    for c in out:
        sequence = torch.tensor([[*PROMPTS[c.prompt_index], *c.token_ids]])
        with torch.no_grad():
            logits = engine.model(input_ids=sequence).logits.float() / 0.7
        exact = logits.log_softmax(-1)[0, -len(c.token_ids) - 1 : -1]
        assert c.rollout_logprobs == pytest.approx(
            exact.gather(-1, sequence[0, -len(c.token_ids) :, None]).squeeze(-1).tolist(), abs=2e-5
        )


def test_score_is_decode_on_the_same_tokens():
    engine = engine_of("nvfp4-w4a16")
    out = engine.generate(PROMPTS, 2, Sampling(max_tokens=5))
    scores = engine.score([[*PROMPTS[c.prompt_index], *c.token_ids] for c in out])
    for c, row in zip(out, scores, strict=True):
        assert c.rollout_logprobs == pytest.approx(row[-len(c.token_ids) :].tolist(), abs=2e-5)


def test_stop_token_ends_a_row_is_kept_and_is_not_truncation():
    engine = engine_of()
    # An id the model cannot produce: nothing stops these.
    free = engine.generate([[5, 6, 7]], 32, Sampling(max_tokens=8, stop_token_ids=(9999,)))
    stop = free[0].token_ids[2]
    out = engine.generate([[5, 6, 7]], 32, Sampling(max_tokens=8, stop_token_ids=(stop,)))
    assert any(c.finish_reason == "stop" for c in out)
    for before, c in zip(free, out, strict=True):
        cut = before.token_ids.index(stop) + 1 if stop in before.token_ids else 8
        assert c.token_ids == before.token_ids[:cut]
        assert c.finish_reason == ("stop" if stop in before.token_ids else "length")
        assert c.truncated == (stop not in before.token_ids)


def test_finished_rows_leave_the_residuals_channels_alone():
    """A row that has stopped is fed on for a while; it must not move what the others compute."""
    engine = engine_of("nvfp4", torch.bfloat16)
    site = engine.model.model.layers[0].mlp.down_proj.site
    seen = []
    original = site._real
    site._real = lambda x: seen.append(site.tokens.real.sum().item()) or original(x)
    out = engine.generate([[5, 6, 7]], 8, Sampling(max_tokens=6, stop_token_ids=tuple(range(40))))
    alive = [sum(len(c.token_ids) > step for c in out) for step in range(1, 6)]
    assert seen == [3, *(n for n in alive if n)]


def test_a_quantized_head_counts_the_positions_it_is_given():
    model = tiny_llama(tie_word_embeddings=False)
    prepare(model, Recipe(rollout="nvfp4", residual=0.5, keep=()), "rollout")
    engine, site, seen = EmbeddedEngine(model, "batch"), model.lm_head.site, []
    original = site._real
    site._real = lambda x: seen.append((tuple(x.shape[:2]), site.tokens.real.tolist())) or original(x)
    out = engine.generate([[5, 6, 7], [8]], 2, Sampling(max_tokens=3, stop_token_ids=(127,)))
    assert [len(c.token_ids) for c in out] == [3] * 4
    assert seen == [((2, 1), [[True]] * 2), *[((4, 1), [[True]] * 4)] * 2]
    assert model.lm_head._forward_pre_hooks == {}


def test_greedy_decoding_is_certain_under_both_schedulers():
    for scheduler in ("batch", "continuous"):
        out = engine_of(scheduler=scheduler).generate(PROMPTS, 1, Sampling(max_tokens=4, temperature=0.0))
        assert {logprob for c in out for logprob in c.rollout_logprobs} == {0.0}
        assert tokens(out) == tokens(
            engine_of().generate(PROMPTS, 1, Sampling(max_tokens=4, temperature=1e-4))
        )


def test_continuous_scheduler_agrees_with_its_own_scores():
    engine = engine_of("nvfp4-w4a16", scheduler="continuous")
    out = engine.generate(PROMPTS, 3, Sampling(max_tokens=5, temperature=0.8), [1, 2, 3, 4])
    scores = engine.score([[*PROMPTS[c.prompt_index], *c.token_ids] for c in out], temperature=0.8)
    assert len(out) == 12
    for c, row in zip(out, scores, strict=True):
        assert c.rollout_logprobs == pytest.approx(row[-len(c.token_ids) :].tolist(), abs=2e-5)
    assert tokens(out) == tokens(
        engine.generate(PROMPTS, 3, Sampling(max_tokens=5, temperature=0.8), [1, 2, 3, 4])
    )
    assert engine.model.config._attn_implementation == "sdpa"


def test_auto_pages_only_ragged_batches():
    engine = engine_of()
    assert engine._choose([[1] * 10, [1] * 8]) == "batch"
    assert engine._choose([[1] * 40, [1], [1], [1]]) == "continuous"


def test_nothing_to_do_and_impossible_requests():
    engine = engine_of()
    assert engine.generate([], 4, Sampling()) == []
    for call, message in [
        (lambda: engine.generate([[5]], 0, Sampling()), "n=0"),
        (lambda: engine.generate([[5], []], 1, Sampling(max_tokens=5)), "prompt 1 is empty"),
        (lambda: engine.generate([[5]], 1, Sampling(max_tokens=5), [1, 2]), "2 seeds for 1 prompts"),
        (lambda: engine.generate([[5] * 60], 1, Sampling(max_tokens=5)), "passes the model's 64 positions"),
    ]:
        with pytest.raises(ValueError, match=message):
            call()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_p": 0.9}, "use top_p=1, top_k=0"),
        ({"top_k": 50}, "use top_p=1, top_k=0"),
        ({"max_tokens": 0}, "max_tokens=0"),
        ({"temperature": -1.0}, "temperature=-1.0"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"temperature": float("inf")}, "temperature=inf"),
        ({"temperature": 1e-45}, "temperature=1e-45 must be .* at least 1e-05, or 0"),
    ],
)
def test_sampling_that_breaks_the_contract_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        Sampling(**options)


def test_the_learner_is_no_engine(tiny):
    prepare(tiny, Recipe(rollout="nvfp4"), "learner")
    with pytest.raises(ValueError, match="side='rollout'"):
        EmbeddedEngine(tiny)
    with pytest.raises(ValueError, match="wears no plan"):
        EmbeddedEngine(tiny_llama())


def test_generation_leaves_the_global_generator_alone():
    for scheduler in ("batch", "continuous"):
        engine = engine_of(scheduler=scheduler)
        before = torch.get_rng_state()
        engine.generate(PROMPTS, 2, Sampling(max_tokens=3))
        assert torch.equal(torch.get_rng_state(), before)


def test_chunks_cover_every_sample_once_within_the_limit():
    for lengths, n, limit in [([3, 1, 2], 4, 5), ([1] * 7, 10, 4), ([2, 2], 1, 100)]:
        seen = []
        for chunk, first, count in _chunks(lengths, n, limit):
            assert len(chunk) * count <= limit
            seen += [(p, first + j) for p in chunk for j in range(count)]
        assert sorted(seen) == [(p, j) for p in range(len(lengths)) for j in range(n)]


def test_prompt_seeds_differ_and_fit():
    seeds = {prompt_seed(0, step, f"p{i}") for step in range(20) for i in range(20)}
    assert len(seeds) == 400
    assert all(0 <= s < 2**63 for s in seeds)


def test_engine_copies_share_nothing():
    engine = engine_of("nvfp4", torch.bfloat16)
    twin = EmbeddedEngine(copy.deepcopy(engine.model))
    assert tokens(twin.generate(PROMPTS, 2, Sampling(max_tokens=4))) == tokens(
        engine.generate(PROMPTS, 2, Sampling(max_tokens=4))
    )


@pytest.mark.parametrize("rollout", ["bf16", "nvfp4-w4a16", "nvfp4"])
def test_fixed_buffers_sample_what_a_growing_cache_does(rollout):
    seeds, sampling = [11, 12, 13, 14], Sampling(max_tokens=21, stop_token_ids=(1, 2, 3))
    grown = engine_of(rollout, scheduler="batch").generate(PROMPTS, 4, sampling, seeds)
    engine = engine_of(rollout, scheduler="graph", max_batch=256)
    for _ in range(2):
        fixed = engine.generate(PROMPTS, 4, sampling, seeds)
        assert tokens(fixed) == tokens(grown)
        assert [c.finish_reason for c in fixed] == [c.finish_reason for c in grown]
        for a, b in zip(fixed, grown, strict=True):
            assert a.rollout_logprobs == pytest.approx(b.rollout_logprobs, abs=1e-5)
    assert {c.finish_reason for c in grown} == {"stop", "length"}


def prepared(model, side):
    prepare(model, Recipe(rollout="nvfp4", residual=0.5), side)
    return model


def other_llama():
    """The tiny model with other weights."""
    model = tiny_llama(torch.float32)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    return model


def test_fixed_buffers_serve_a_new_version_from_the_same_addresses():
    engine, other = engine_of("nvfp4", scheduler="graph"), other_llama()
    learner = publish(prepared(other_llama(), "learner"), 1)
    before = {name: p.data_ptr() for name, p in engine.model.named_parameters()}
    engine.generate(PROMPTS, 2, Sampling(max_tokens=4))
    engine.update(learner.stream(), learner.manifest)
    assert {name: p.data_ptr() for name, p in engine.model.named_parameters()} == before
    fresh = EmbeddedEngine(prepared(other, "rollout"), "batch")
    assert tokens(engine.generate(PROMPTS, 2, Sampling(max_tokens=6))) == tokens(
        fresh.generate(PROMPTS, 2, Sampling(max_tokens=6))
    )


def test_fixed_buffers_refuse_broken_logits_and_models_they_cannot_serve():
    engine = engine_of(scheduler="graph")
    with torch.no_grad():
        engine.model.model.norm.weight.fill_(float("nan"))
    with pytest.raises(RuntimeError, match="logits of all 1 rows are not finite: the weights of version"):
        engine.generate([[5, 6]], 1, Sampling(max_tokens=4))
    model = prepared(tiny_llama(torch.float32), "rollout")
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="use 'batch'"):
        EmbeddedEngine(model, "graph")
