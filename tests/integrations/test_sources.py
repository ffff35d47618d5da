"""The loss code of slime, prime-rl and NeMo-RL itself, from source, around our functions.

    git clone https://github.com/THUDM/slime && git -C slime checkout 624b824                       # and so on
    LOWBITRL_SOURCES=FOLDER pytest tests/integrations/test_sources.py

FOLDER holds checkouts slime, prime-rl and RL. Their loss modules run as they are; what those import besides (Megatron,
Ray, configs, data containers) is mocked, so this proves signatures, cuts and divisors, and no whole run. prime-rl's
needs jaxtyping and beartype.
"""

import importlib
import os
import pickle
import sys
from argparse import Namespace
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import pytest
import torch

from tests.integrations.test_dotted_paths import (
    LENGTHS,
    PROMPTS,
    check,
    expected,
    load,
    nemo_batch,
    responses,  # noqa: F401  (a fixture)
    slime_batches,
)

SOURCES = os.environ.get("LOWBITRL_SOURCES")
pytestmark = pytest.mark.skipif(SOURCES is None, reason="LOWBITRL_SOURCES names no folder of checkouts")


@pytest.fixture(autouse=True)
def _forget_modules():
    """Theirs hold what a test mocked."""
    yield
    for name in [m for m in sys.modules if m.partition(".")[0] in ("slime", "prime_rl", "nemo_rl")]:
        sys.modules.pop(name)


def packages(monkeypatch, root, *names):
    """Packages whose modules are read from a checkout, without running their __init__."""
    for name in names:
        module = ModuleType(name)
        module.__path__ = [str(root / "/".join(name.split(".")[1:]))]
        monkeypatch.setitem(sys.modules, name, module)


def source(*parts):
    return Path(SOURCES or "", *parts)


@pytest.mark.parametrize("name", ["tbpo", "dapo", "gspo", "cispo"])
def test_prime_rl(name, responses, monkeypatch):  # noqa: F811
    names = ("prime_rl", "prime_rl.trainer", "prime_rl.trainer.rl", "prime_rl.utils", "prime_rl.configs")
    packages(monkeypatch, source("prime-rl", "src", "prime_rl"), *names)
    custom = type("CustomLossConfig", (SimpleNamespace,), {})
    others = {n: type(n, (), {}) for n in ("DefaultLossConfig", "IPOLossConfig", "LossConfig")}
    stand_ins = {"prime_rl.configs.trainer": SimpleNamespace(CustomLossConfig=custom, **others)}
    stand_ins["prime_rl.utils.utils"] = SimpleNamespace(import_object=load)
    for module, value in stand_ins.items():
        monkeypatch.setitem(sys.modules, module, value)
    theirs = importlib.import_module("prime_rl.trainer.rl.loss")
    config = custom(import_path="lowbitrl.integrations.prime_rl.loss", kwargs={"objective": name})
    function = theirs.setup_rl_loss_fn(config)
    logprobs = responses.logprobs()
    rows = [logprobs[row, :n] for row, n in enumerate(LENGTHS)]
    masks = [mask.bool() for mask in responses.masks]
    count = int(sum(mask.sum() for mask in masks))
    streams = (responses.rollout, None, responses.advantages, masks, None, None, None)
    loss, _ = theirs.compute_loss(rows, *streams, function, count, 1, 1)
    responses.old = [row.detach() for row in rows]
    check(loss, responses, expected(responses, name, aggregate="token-mean"))


@pytest.fixture
def slime(monkeypatch):
    """slime's loss module on one rank, whose vocabulary is whole."""
    names = ("slime", "slime.backends", "slime.backends.megatron_utils", "slime.utils")
    packages(monkeypatch, source("slime", "slime"), *names)
    packages(monkeypatch, source(), "megatron")
    core = MagicMock()
    for size in ("get_context_parallel_world_size", "get_data_parallel_world_size"):
        getattr(core.mpu, size).return_value = 1
    core.mpu.get_context_parallel_rank.return_value = 0
    mocked = dict.fromkeys(("ray", "httpx", "slime.utils.types", "slime.utils.distributed_utils"))
    for module in mocked:
        monkeypatch.setitem(sys.modules, module, MagicMock())
    monkeypatch.setitem(sys.modules, "megatron.core", core)
    theirs = importlib.import_module("slime.backends.megatron_utils.loss")

    def scores(logits, tokens, group, with_entropy=False, **options):
        logprobs = logits.log_softmax(-1)
        entropy = -(logprobs.exp() * logprobs).sum(-1) if with_entropy else None
        return logprobs.gather(-1, tokens[:, None]), entropy

    monkeypatch.setattr(theirs, "calculate_log_probs_and_entropy", scores)
    return theirs


def slime_args(**changes):
    off = (
        "allgather_cp",
        "use_rollout_logprobs",
        "use_kl_loss",
        "true_on_policy_mode",
        "use_opsm",
        "keep_old_actor",
    )
    off += ("get_mismatch_metrics", "use_tis", "recompute_loss_function", "calculate_per_token_loss")
    plain = {"entropy_coef": 0.0, "rollout_top_p": 1.0, "rollout_temperature": 1.0, "qkv_format": "thd"}
    plain |= {"log_probs_chunk_size": -1, "loss_type": "custom_loss"}
    plain["custom_loss_function_path"] = "lowbitrl.integrations.slime.loss"
    return Namespace(**(dict.fromkeys(off, False) | plain | changes))


def slime_total(theirs, responses, args, size):  # noqa: F811
    """What a step divides out of its micro-batches' losses."""
    total, batches = 0.0, list(slime_batches(responses, size, args))
    for batch, logits, _ in batches:
        batch["rollout_mask_sums"] = torch.stack([mask.sum() for mask in batch["loss_masks"]])
        loss, *_ = theirs.loss_function(args, batch, len(batches), len(LENGTHS), logits)
        total = total + loss / (1 if args.calculate_per_token_loss else len(batches))
    return total / sum(mask.sum() for mask in responses.masks) if args.calculate_per_token_loss else total


@pytest.mark.parametrize("size", [1, 2, 4])
@pytest.mark.parametrize(("name", "per_token"), [("tbpo", False), ("gspo", False), ("dapo", True)])
def test_slime_loss(name, per_token, size, responses, slime):  # noqa: F811
    settings = {"calculate_per_token_loss": per_token, "recompute_loss_function": size == 2}
    args = slime_args(lowbitrl={"objective": {"name": name}}, **settings)
    check(slime_total(slime, responses, args, size), responses, expected(responses, name))


def test_slime_tis(responses, slime):  # noqa: F811
    options = {"correction": "tis", "cap": 1.02}
    args = slime_args(
        loss_type="policy_loss",
        calculate_per_token_loss=True,
        use_tis=True,
        custom_tis_function_path="lowbitrl.integrations.slime.tis",
        lowbitrl={"tis": options},
        advantage_estimator="grpo",
        eps_clip=0.2,
        eps_clip_high=0.2,
        eps_clip_c=None,
    )
    wanted = expected(responses, "grpo", level="token", aggregate="token-mean", **options)
    check(slime_total(slime, responses, args, 4), responses, wanted)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ["tbpo", "gspo", "dapo"])
def test_nemo_rl(name, packed, responses, monkeypatch):  # noqa: F811
    names = ("nemo_rl", "nemo_rl.algorithms", "nemo_rl.algorithms.loss", "nemo_rl.distributed")
    packages(monkeypatch, source("RL", "nemo_rl"), *names)

    class Batch(dict):
        def __class_getitem__(cls, kind):
            return cls

        def slice(self, first, stop):
            return Batch({key: value[first:stop] for key, value in self.items()})

    container = SimpleNamespace(BatchedDataDict=Batch)
    monkeypatch.setitem(sys.modules, "nemo_rl.distributed.batched_data_dict", container)
    monkeypatch.setitem(sys.modules, "nemo_rl.algorithms.loss.loss_functions", MagicMock())
    wrapper = importlib.import_module("nemo_rl.algorithms.loss.wrapper")
    function = pickle.loads(pickle.dumps(load("lowbitrl.integrations.nemo_rl.PolicyLossFn")(name)))
    logprobs, data = nemo_batch(responses)
    counts = data["sample_mask"].sum(), data["token_mask"].sum()
    cut = slice(None, -1) if packed else slice(None)
    prepare = lambda logits, data, **_: ({"next_token_logprobs": logits[:, cut]}, data)  # noqa: E731
    if packed:
        lengths = [p + n for p, n in zip(PROMPTS, LENGTHS, strict=True)]
        ends = torch.tensor([0, *lengths]).cumsum(0)
        rows = [torch.cat([row[: n - 1], torch.zeros(1)]) for row, n in zip(logprobs, lengths, strict=True)]
        whole = wrapper.SequencePackingLossWrapper(
            function, prepare, cu_seqlens_q=ends, cu_seqlens_q_padded=None
        )
        loss, _ = whole(torch.cat(rows)[None], Batch(data), *counts)
    else:
        wrap = wrapper.wrap_loss_fn_with_input_preparation
        loss, _ = wrap(logprobs, Batch(data), *counts, function, prepare)
    check(loss, responses, expected(responses, name))
