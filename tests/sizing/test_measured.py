"""What `plan --size` says of tiny models is what they hold: counted in their tensors after a real step."""

import copy

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from lowbitrl.config import unnamed_run
from lowbitrl.quant import Recipe, attachment, prepare, resolve
from lowbitrl.quant.recipe import PRECISIONS
from lowbitrl.rollout import Sampling
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.embedded.batch import cache_argument
from lowbitrl.sizing import SizeRequest, estimate, shape_of
from lowbitrl.sizing.memory import activation_bytes
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig, TrainingBatch
from lowbitrl.trainer.logprobs import response_logprobs
from tests.conftest import tiny_llama
from tests.distributed.processes import run_ranks
from tests.moe_models import KINDS, tiny_moe
from tests.sizing import shards

# Every side a multiple of 128: all formats fit.
WIDE = dict.fromkeys(("hidden_size", "intermediate_size", "moe_intermediate_size"), 128)
WIDE |= {"shared_expert_intermediate_size": 128, "head_dim": 32}
LENGTH, PROMPT = 24, 4


def build(kind, dtype=torch.bfloat16, **overrides):
    return tiny_llama(dtype, **overrides) if kind == "llama" else tiny_moe(kind, dtype, **overrides)


def plan_of(model, plan, **overrides):
    request = SizeRequest.of(config=unnamed_run([f"--{k}={v}" for k, v in overrides.items()]))
    config = copy.deepcopy(model.config)
    config._experts_implementation = "eager"  # transformers 5.5 takes no name of ours from a config
    with torch.device("meta"):
        skeleton = AutoModelForCausalLM.from_config(config, dtype=model.dtype)
    return estimate(skeleton, shape_of(skeleton, "tiny"), plan, request)


def items(parts):
    return {item.name: item.bytes for item in parts}


def storage(tensors):
    """Bytes of the distinct storages of some tensors."""
    found = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors if t.numel()}
    return sum(found.values())


def batch(count=4):
    draw = lambda n: torch.randint(3, 120, (n,)).tolist()  # noqa: E731
    responses = [draw(LENGTH - PROMPT) for _ in range(count)]
    zeros = [[-1.0] * len(r) for r in responses]
    return TrainingBatch.build([draw(PROMPT) for _ in range(count)], responses, zeros, torch.randn(count))


@pytest.mark.parametrize("kind", ["llama", *KINDS])
@pytest.mark.parametrize("rollout", PRECISIONS)
def test_a_version_has_the_bytes_that_are_planned(kind, rollout):
    model = build(kind, **WIDE)
    plan = prepare(model, Recipe(rollout=rollout), "learner")
    published = publish(model, 1)
    sized = plan_of(model, plan)
    assert sized.published == sum(t.nbytes for t in published.tensors.values())
    assert items(sized.step)["published"] == sized.published
    assert sized.unquantized == sum(2 * p.numel() for p in model.parameters())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
@pytest.mark.parametrize("masters", ["float32", "compute"])
def test_a_learner_holds_what_is_planned(kind, optimizer, masters):
    model = build(kind)
    fresh = copy.deepcopy(model)
    plan = prepare(model, Recipe(rollout="nvfp4"), "learner")
    config = OptimizerConfig(name=optimizer, masters=masters)
    trainer = Trainer(model, TrainerConfig(micro_batch_tokens=LENGTH), ObjectiveConfig(name="grpo"), config)
    grown = []
    step = trainer.optimizer.step
    trainer.optimizer.step = lambda norm: (
        grown.extend(m.grad for m in trainer.optimizer.masters.values()),
        step(norm),
    )
    trainer.update(batch(), 0)
    planned = items(
        plan_of(fresh, plan, **{"optimizer.name": optimizer, "optimizer.masters": masters}).learner
    )

    states = [t for o in trainer.optimizer.optimizers for s in o.state.values() for t in s.values()]
    assert planned["optimizer states"] == sum(t.nbytes for t in states)
    assert planned["gradients"] == sum(t.nbytes for t in grown)
    assert planned["weights in the compute dtype"] == storage(model.parameters())
    held = storage(trainer.optimizer.masters.values())
    assert planned.get("masters", 0) == (0 if masters == "compute" else held)
    published = publish(model, 1)
    encoded = [
        t for g in attachment(model).groups for q in g.encoded().values() for t in q.tensors().values()
    ]
    assert planned["encoded weights"] == sum(t.nbytes for t in encoded)
    copied = {n: t for n, t in published.tensors.items() if n in dict(model.named_parameters())}
    assert planned["published copy of what is not encoded"] == sum(t.nbytes for t in copied.values())


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "gpt_oss"])
@pytest.mark.parametrize("rollout", ["bf16", "fp8", "int4", "nvfp4"])
@pytest.mark.parametrize("decoded", [False, True])
def test_an_engine_holds_the_weights_that_are_planned(kind, rollout, decoded):
    model = build(kind)
    fresh = copy.deepcopy(model)
    plan = prepare(model, Recipe(rollout=rollout), "rollout", keep_decoded_experts=decoded)
    stacks = attachment(model).stacks.values()
    low = [q for stack in stacks for q in stack.encoded().values()]
    low += [m.encoded for m in model.modules() if getattr(m, "encoded", None) is not None]
    kept = [stack._decoded for stack in stacks if stack._decoded is not None]
    held = storage([*model.parameters(), *kept]) + sum(q.nbytes for q in low)
    assert plan_of(fresh, plan, **{"rollout.keep_decoded_experts": str(decoded).lower()}).served == held


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
def test_a_cache_holds_what_is_planned(kind):
    model = build(kind)
    cache = DynamicCache(config=model.config)
    model(input_ids=torch.randint(3, 120, (5, 17)), **{cache_argument(type(model)): cache}, use_cache=True)
    held = sum(t.nbytes for layer in cache.layers for t in (layer.keys, layer.values))
    assert 5 * shape_of(model, kind).cache_bytes(17, 2) == held


def test_a_sliding_window_bounds_a_cache():
    shape = shape_of(
        build("gpt_oss", layer_types=["full_attention", "sliding_attention"], sliding_window=8), "x"
    )
    assert shape.cache_bytes(20, 2) == 2 * shape.keys * 2 * (20 + 8)


def test_an_engine_decodes_as_many_sequences_at_once_as_are_planned(monkeypatch):
    model = tiny_llama()
    fresh = copy.deepcopy(model)
    plan = prepare(model, Recipe(rollout="bf16"), "rollout")
    caches = []
    monkeypatch.setattr(
        "lowbitrl.rollout.embedded.batch.DynamicCache",
        lambda **k: caches.append(DynamicCache(**k)) or caches[-1],
    )
    engine = EmbeddedEngine(model, "batch", max_batch=6)
    engine.generate([[5] * 9] * 2, 3, Sampling(max_tokens=7, temperature=1.0, stop_token_ids=(127,)))
    options = {"prompts": 2, "samples": 3, "max_tokens": 7, "max_batch": 6}
    overrides = {f"rollout.{k}": v for k, v in options.items()}
    request = SizeRequest.of(
        prompt_tokens=9, config=unnamed_run([f"--{k}={v}" for k, v in overrides.items()])
    )
    planned = estimate(fresh, shape_of(fresh, "x"), plan, request).cache
    held = sum(t.nbytes for cache in caches for layer in cache.layers for t in (layer.keys, layer.values))
    # The last token is sampled and never fed.
    assert held == planned * (9 + 7 - 1) / (9 + 7)


FAMILIES = {
    "llama": {},
    "qwen3": {},
    "qwen3_moe": KINDS["qwen3_moe"],
    "mixtral": KINDS["mixtral"],
    "qwen2_moe": KINDS["qwen2_moe"],
}


@pytest.mark.parametrize("kind", FAMILIES)
@pytest.mark.parametrize(("width", "tokens"), [(64, 64), (128, 160)])
def test_activations_are_those_that_autograd_keeps(kind, width, tokens):
    sizes = {"vocab_size": 128, "hidden_size": width, "intermediate_size": 3 * width, "head_dim": 32}
    sizes |= {"num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "eos_token_id": 2}
    config = AutoConfig.for_model(kind, **(sizes | FAMILIES[kind]))
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).eval()
    prepare(model, Recipe(rollout="nvfp4"), "learner")
    encoded = [
        t for g in attachment(model).groups for q in g.encoded().values() for t in q.tensors().values()
    ]
    own = {t.untyped_storage().data_ptr() for t in [*model.parameters(), *model.buffers(), *encoded]}
    kept = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        response_logprobs(model, [[5] * 4] * 3, [[7] * (tokens - 4)] * 3)
    held = storage([t for t in kept if t.untyped_storage().data_ptr() not in own])
    planned = activation_bytes(shape_of(model, kind), 3 * tokens, 2, checkpointing=False)
    assert planned == pytest.approx(held, rel=0.04)


def test_checkpointing_keeps_the_inputs_of_layers_and_one_layer():
    shape = shape_of(tiny_llama(num_hidden_layers=6), "x")
    whole, some = (activation_bytes(shape, 100, 2, checkpointing) for checkpointing in (False, True))
    head = activation_bytes(shape.model_copy(update={"num_hidden_layers": 0}), 100, 2, False)
    layer = (whole - head) / 6
    assert some == head + layer + 100 * 6 * 2 * shape.hidden_size


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize("kind", ["llama", "qwen3_moe"])
@pytest.mark.parametrize("optimizer", ["adamw", "muon"])
def test_the_fullest_rank_holds_what_is_planned(tmp_path, kind, ranks, optimizer):
    held = run_ranks(ranks, tmp_path, shards.held, kind, optimizer)
    model = build(kind)
    plan = resolve(Recipe(rollout="nvfp4"), model)
    request = SizeRequest.of(ranks=ranks, config=unnamed_run([f"--optimizer.name={optimizer}"]))
    planned = items(estimate(model, shape_of(model, kind), plan, request).learner)
    for name in ("masters", "gradients", "optimizer states", "encoded weights"):
        assert planned[name] == max(rank[name] for rank in held), name
