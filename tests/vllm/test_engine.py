"""A real vLLM on a CPU under our plan: active, fed live, atomic, at the floor of fp32 arithmetic."""

from __future__ import annotations

import copy
import dataclasses
import statistics
from contextlib import contextmanager

import pytest
import torch
from transformers import AutoModelForCausalLM

pytest.importorskip("vllm", reason="vLLM has an environment of its own: make test-vllm")

from lowbitrl.quant import Recipe, prepare
from lowbitrl.rollout.types import Sampling
from lowbitrl.rollout.vllm.engine import VllmEngine
from lowbitrl.rollout.vllm.sealed import manifest_data
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer.logprobs import response_logprobs
from tests.vllm.tiny import dense, moe

PROMPTS = [[5, 6, 7], [(7 * i) % 120 + 3 for i in range(70)]]
# fp32 on both sides: what is left is the order of sums, in attention and norms above all.
FLOOR = 2e-5
SMALL = {"max_model_len": 96, "max_num_seqs": 16, "kv_cache_memory_bytes": 1 << 26, "block_size": 32}


@contextmanager
def both_sides(folder, recipe, **options):
    learner = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    plan = prepare(learner, recipe, "learner")
    engine = VllmEngine(folder, plan, dtype="float32", **(SMALL | options))
    try:
        yield learner, engine
    finally:
        engine.close()


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return dense(tmp_path_factory.mktemp("dense"))


@pytest.fixture(scope="module")
def moe_folder(tmp_path_factory):
    return moe(tmp_path_factory.mktemp("moe"))


@pytest.fixture(scope="module")
def pair(folder):
    with both_sides(folder, Recipe(rollout="nvfp4-w4a16")) as sides:
        yield sides


@torch.no_grad()
def train(learner, scale=0.02):
    """Stands for an optimizer step."""
    for parameter in learner.parameters():
        parameter.add_(torch.randn_like(parameter) * scale)


def push(learner, engine, version):
    published = publish(learner, version)
    engine.update(published.stream(), published.manifest)
    return published


@torch.no_grad()
def gap(learner, engine, temperature=1.0):
    """Mean absolute difference of the log-probabilities of what the engine samples."""
    done = engine.generate(PROMPTS, 3, Sampling(max_tokens=12, temperature=temperature))
    prompts = [PROMPTS[c.prompt_index] for c in done]
    scores, _ = response_logprobs(
        learner, prompts, [list(c.token_ids) for c in done], temperature=temperature
    )
    rows = zip(scores, (torch.tensor(c.rollout_logprobs) for c in done), strict=True)
    return float(torch.cat([(ours[: len(theirs)] - theirs).abs() for ours, theirs in rows]).mean()), done


@pytest.mark.parametrize(
    ("kind", "recipe"),
    [
        ("dense", Recipe(rollout="bf16")),
        ("dense", Recipe(rollout="int4")),
        ("moe", Recipe(rollout="nvfp4-w4a16")),
        ("moe", Recipe(rollout="bf16")),
    ],
    ids=lambda value: value if isinstance(value, str) else value.rollout,
)
def test_weight_only_recipes_are_at_the_floor_after_an_update(kind, recipe, folder, moe_folder):
    with both_sides(folder if kind == "dense" else moe_folder, recipe) as (learner, engine):
        push(learner, engine, 0)
        train(learner)
        push(learner, engine, 1)
        assert gap(learner, engine)[0] < FLOOR


@pytest.mark.parametrize(
    "recipe",
    [
        Recipe(rollout="fp8"), Recipe(rollout="int8"), Recipe(rollout="int4-fp8"), Recipe(rollout="nvfp4"),
        Recipe(rollout="nvfp4", residual=0.5), Recipe(rollout="nvfp4", residual=1.0),
    ],
    ids=lambda r: f"{r.rollout}-{r.residual}",
)  # fmt: skip
def test_low_bit_activations_are_active(recipe, tmp_path):
    """Codes flip between kernels, so parity is statistical: far closer to the same arithmetic than to none."""
    full = dataclasses.replace(recipe, learner="full", residual_scope="token" if recipe.residual else None)
    with both_sides(dense(tmp_path, num_key_value_heads=4), full) as (learner, engine):
        push(learner, engine, 0)
        assert all(row[1] == recipe.precision.activation for row in engine.report["modules"].values())
        assert gap(learner, engine)[0] < 0.2


def test_low_bit_activations_of_experts_are_active(moe_folder):
    with both_sides(moe_folder, Recipe(rollout="nvfp4", residual=0.5)) as (learner, engine):
        push(learner, engine, 0)
        assert engine.report["modules"]["model.layers.0.mlp.experts"] == [
            "nvfp4",
            "nvfp4-token",
            0.5,
            "grouped, decoded, activations emulated",
        ]
        assert engine.report["watched"]
        _, done = gap(learner, engine)
        assert all(c.version == 0 for c in done)


def test_the_plugin_is_active_and_says_where(pair):
    _, engine = pair
    assert engine.report["digest"] == engine.plan.digest
    served = {name: row for name, row in engine.report["modules"].items() if row[0]}
    assert len(served) == 2 * 4, "qkv, o, gate_up and down of two layers"
    assert set(map(tuple, served.values())) == {("nvfp4", None, 0.0, "decoded")}


def test_three_updates_each_at_the_floor_with_its_version(pair):
    learner, engine = pair
    for version in range(3):
        train(learner)
        push(learner, engine, version)
        for temperature in (1.0, 0.7):
            mean, done = gap(learner, engine, temperature)
            assert mean < FLOOR
            assert {c.version for c in done} == {version}


def test_scores_are_the_learners(pair):
    learner, engine = pair
    push(learner, engine, 3)
    with torch.no_grad():
        for temperature in (1.0, 0.7):
            ours, _ = response_logprobs(
                learner, [p[:1] for p in PROMPTS], [p[1:] for p in PROMPTS], temperature=temperature
            )
            for row, prompt, theirs in zip(ours, PROMPTS, engine.score(PROMPTS, temperature), strict=True):
                assert (row[: len(prompt) - 1] - theirs).abs().mean() < FLOOR


def test_a_seed_fixes_a_completion_whatever_shares_its_batch(pair):
    learner, engine = pair
    push(learner, engine, 4)
    together = engine.generate(PROMPTS, 3, Sampling(max_tokens=8), seeds=[11, 12])
    alone = engine.generate(PROMPTS[1:], 2, Sampling(max_tokens=8), seeds=[12])
    assert [c.token_ids for c in alone] == [c.token_ids for c in together[3:5]]
    assert len({c.token_ids for c in together[3:]}) > 1


def test_one_and_many_buckets_give_the_same_state(pair):
    learner, engine = pair
    train(learner)
    before = engine.state()
    push(learner, engine, 5)
    once = engine.state()
    assert once != before
    train(learner)
    push(learner, engine, 6)
    assert engine.state() != once
    with torch.no_grad():
        published = publish(learner, 7)
    engine.bucket_bytes = 1
    engine.update(published.stream(), published.manifest)
    many = engine.state()
    engine.bucket_bytes = 1 << 30
    engine.update(published.stream(), published.manifest)
    assert engine.state() == many


def test_storage_keeps_its_addresses_over_updates(pair):
    learner, engine = pair
    addresses = engine.llm.apply_model(_addresses)
    train(learner)
    push(learner, engine, 8)
    assert engine.llm.apply_model(_addresses) == addresses


def _addresses(model):
    return {name: parameter.data_ptr() for name, parameter in model.named_parameters()}


def test_an_update_killed_half_way_leaves_the_old_version_serving(pair):
    learner, engine = pair
    push(learner, engine, 9)
    state, (_, done) = engine.state(), gap(learner, engine)
    after = copy.deepcopy(learner)
    train(after)
    published = publish(after, 10)
    # What a publisher that dies leaves behind: an open update, some buckets of it, no manifest.
    engine.llm.start_weight_update()
    half = dict(list(published.stream())[: len(published.tensors) // 2])
    engine.llm.update_weights({"update_info": {"tensors": half}})
    assert engine.state() == state
    assert gap(learner, engine)[1] == done
    with pytest.raises(RuntimeError, match="never sealed"):
        engine.llm.finish_weight_update()
    assert engine.state() == state
    engine.update(published.stream(), published.manifest)
    assert gap(after, engine)[0] < FLOOR


def without(published, name):
    return {n: t for n, t in published.tensors.items() if n != name}


def flipped(published, name):
    other = published.tensors[name].clone()
    other.view(-1)[5] ^= 1
    return published.tensors | {name: other}


CODES = "model.layers.1.mlp.up_proj.qdata"


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        (lambda p: without(p, CODES), f"incomplete: {CODES} never arrived"),
        (lambda p: flipped(p, CODES), f"{CODES} of version .* arrived as"),
        (lambda p: p.tensors | {"model.norm.bias": torch.zeros(3)}, "model.norm.bias is not part of"),
    ],
    ids=["missing", "checksum", "unexpected"],
)
def test_a_damaged_version_is_refused_with_its_name(pair, tensors, message):
    learner, engine = pair
    push(learner, engine, 11)
    state = engine.state()
    train(learner)
    published = publish(learner, 12)
    with pytest.raises(ValueError, match=message):
        engine.update(tensors(published).items(), published.manifest)
    assert engine.state() == state
    assert engine.version == 11
    engine.update(published.stream(), published.manifest)
    assert engine.version == 12


def test_sleep_keeps_a_version_or_asks_for_a_new_one(pair):
    """On a CPU vLLM has no memory to give; what an engine may sample from afterwards is the same."""
    learner, engine = pair
    push(learner, engine, 12)
    done = gap(learner, engine)[1]
    engine.sleep(1)
    engine.wake()
    assert gap(learner, engine)[1] == done
    engine.sleep(2)
    engine.wake()
    with pytest.raises(ValueError, match="no version"):
        engine.generate(PROMPTS, 1, Sampling(max_tokens=1))
    push(learner, engine, 12)
    assert gap(learner, engine)[1] == done


def test_another_plans_version_is_refused(pair):
    learner, engine = pair
    published = publish(learner, 13)
    other = dataclasses.replace(published.manifest, plan_digest="0" * 16)
    with pytest.raises(ValueError, match="under plan 0000000000000000"):
        engine.update(published.stream(), other)
    with pytest.raises(ValueError, match="the learner wears plan abc"):
        engine.llm.init_weight_transfer_engine({"init_info": {"digest": "abc"}})
    assert manifest_data(published.manifest)["version"] == 13


def test_nothing_is_sampled_before_the_first_update(folder):
    with (
        both_sides(folder, Recipe(rollout="nvfp4")) as (_, engine),
        pytest.raises(ValueError, match="no version"),
    ):
        engine.generate(PROMPTS, 1, Sampling(max_tokens=1))


def test_a_plan_of_another_model_is_refused(folder, moe_folder):
    learner = AutoModelForCausalLM.from_pretrained(moe_folder, dtype=torch.float32)
    plan = prepare(learner, Recipe(rollout="nvfp4"), "learner")
    with pytest.raises(ValueError, match=r"mlp\.gate_proj, which the plan does not know"):
        VllmEngine(folder, plan, dtype="float32", **SMALL)


def test_memory_is_flat_over_updates(pair):
    """Resident memory over 30 updates, after 10 to settle, in steps that no leak of a version could hide in."""
    import psutil

    learner, engine = pair
    sizes = []
    for version in range(14, 54):
        push(learner, engine, version)
        sizes.append(psutil.Process().memory_info().rss)
    version_bytes = sum(t.nbytes for t in publish(learner, 54).tensors.values())
    assert statistics.median(sizes[-5:]) - statistics.median(sizes[10:15]) < 5 * version_bytes
