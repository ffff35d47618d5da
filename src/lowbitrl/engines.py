"""The rollout side of a run: where it computes, which engine samples, what the engine wears."""

from __future__ import annotations

import tempfile
from collections.abc import Callable

import torch
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from lowbitrl.config import RunConfig
from lowbitrl.distributed import ranks
from lowbitrl.models import DEMO, load_model
from lowbitrl.quant import (
    Plan,
    Recipe,
    describe_products,
    prepare,
)
from lowbitrl.rollout.embedded import EmbeddedEngine, stop_tokens
from lowbitrl.rollout.vllm.engine import VllmEngine
from lowbitrl.rollout.vllm.process import flags
from lowbitrl.rollout.vllm.server import VllmServer, VllmServerEngine

Say = Callable[[str], None]


Engines = EmbeddedEngine | VllmEngine | VllmServerEngine


def make_engine(
    config: RunConfig,
    plan: Plan,
    learner: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    device: torch.device,
    say: Say,
) -> Engines:
    """The rollout side; it serves nothing before the first update."""
    options = config.rollout
    if options.engine == "vllm" and ranks.joined():
        raise ValueError(
            "rollout.engine='vllm' joins vLLM to the process that trains, and torchrun started processes that are "
            "joined already; use 'vllm-server', which gives each a vLLM beside it, or 'embedded'"
        )
    if options.engine == "embedded":
        rollout, _ = load_model(config.model.name, config.model.dtype, device)
        prepare_rollout(config, rollout, plan, say)
        return EmbeddedEngine(rollout, options.scheduler, options.max_batch, options.record_routing)
    source, folder = config.model.name, tempfile.TemporaryDirectory()
    if source == DEMO:
        source = folder.name
        learner.save_pretrained(source)
        tokenizer.save_pretrained(source)
    if options.engine == "vllm":
        engine = VllmEngine(source, plan, config.model.dtype, **options.vllm)
    else:
        engine = _server(config, plan, learner, source)
    # As long as the engine: a server reads it again when it is restarted.
    engine.source = folder
    say(engine.summary())
    return engine


def _server(config: RunConfig, plan: Plan, learner: PreTrainedModel, source: str) -> VllmServerEngine:
    options = config.rollout
    gpus = ranks.local_gpus(options.vllm_devices)
    devices = {} if gpus is None else {"CUDA_VISIBLE_DEVICES": gpus}
    server = VllmServer(source, plan, config.model.dtype, flags(options.vllm), environment=devices)
    # 0 waits for ever, which a socket calls None.
    seconds = options.timeout or None
    return VllmServerEngine(server, plan, stop_tokens(learner), seconds=seconds, restarts=options.restarts)


def prepare_rollout(config: RunConfig, model: PreTrainedModel, recipe: Recipe | Plan, say: Say) -> Plan:
    options = config.rollout
    plan = prepare(
        model,
        recipe,
        "rollout",
        keep_decoded_experts=options.keep_decoded_experts,
        kernels=options.kernels,
    )
    say(describe_products(model))
    return plan


def pick_device(name: str) -> torch.device:
    """The device "auto" stands for here, or the one named; of several processes each gets a GPU of its own.

    Raises:
        ValueError: the named device is not there, or is one for several processes.
    """
    available = "cuda" if torch.cuda.is_available() else "cpu"
    device = torch.device(available if name == "auto" else name)
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ValueError(f"model.device={name!r}, but torch finds no CUDA device here; use 'auto' or 'cpu'")
    if ranks.joined() and device.index is not None:
        raise ValueError(
            f"model.device={name!r} is one GPU, and torchrun gives each process its own; use 'cuda'"
        )
    return ranks.local_device(device.type) if ranks.joined() else device
