"""What the processes of these tests do."""

from __future__ import annotations

import itertools
import sys
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.tensor import DTensor

from lowbitrl.distributed import ranks
from lowbitrl.distributed.sharding import DistributedConfig, shard
from lowbitrl.distributed.shipping import ship
from lowbitrl.distributed.split import SplitSampler
from lowbitrl.quant import Recipe, attachment, prepare, whole
from lowbitrl.rollout.embedded import EmbeddedEngine
from lowbitrl.rollout.types import Sampling
from lowbitrl.sync.publisher import publish
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig, TrainingBatch
from lowbitrl.trainer.logprobs import response_logprobs
from tests.conftest import tiny_llama
from tests.moe_models import tiny_moe

ROWS = 12


def model_of(kind: str, dtype: torch.dtype = torch.bfloat16) -> Any:
    return tiny_llama(dtype) if kind == "dense" else tiny_moe(kind, dtype)


def batch(seed: int) -> TrainingBatch:
    """Twelve responses of 2 to 7 tokens, advantages of both signs."""
    draw = torch.Generator().manual_seed(seed)
    number = lambda low, high: int(torch.randint(low, high, (1,), generator=draw))  # noqa: E731
    prompts = [[number(3, 128) for _ in range(1 + i % 3)] for i in range(ROWS)]
    responses = [[number(3, 128) for _ in range(number(2, 8))] for _ in range(ROWS)]
    logprobs = [[-4.0 - 0.1 * (i % 3) for i, _ in enumerate(r)] for r in responses]
    return TrainingBatch.build(prompts, responses, logprobs, torch.randn(ROWS, generator=draw))


def train(kind: str, recipe: dict[str, Any], options: dict[str, Any]) -> dict[str, Any]:
    """Three updates on fixed batches: what was scored before any, each step's metrics, the weights at the end."""
    torch.manual_seed(0)
    model = model_of(kind, options.get("dtype", torch.bfloat16))
    prepare(model, Recipe(**recipe))
    trainer = Trainer(
        model,
        TrainerConfig(**{"micro_batch_tokens": 20} | options.get("trainer", {})),
        ObjectiveConfig(**{"name": "grpo"} | options.get("objective", {})),
        OptimizerConfig(**{"learning_rate": 1e-3, "eps": 1e-8} | options.get("optimizer", {})),
        distributed=DistributedConfig(**options.get("distributed", {})),
        device=torch.device("cpu"),
    )
    first = scores(trainer, batch(0))
    steps, published = [], []
    for step in range(3):
        steps.append(trainer.update(batch(step), step))
        published.append(publish(model, step).tensors)
    attached = attachment(model)
    return {
        "first": first,
        "last": scores(trainer, batch(9)),
        "dealt": trainer.score(batch(9)),
        "steps": steps,
        "published": published,
        "masters": {
            n: whole(m, torch.float32, attached.device) for n, m in trainer.optimizer.masters.items()
        },
        "held": {
            n: (m.to_local() if hasattr(m, "to_local") else m).numel()
            for n, m in trainer.optimizer.masters.items()
        },
    }


@torch.no_grad()
def scores(trainer: Trainer, batch: TrainingBatch) -> torch.Tensor:
    """Log-probabilities (B, T), four rows a pass whatever the number of ranks: the same passes on both sides."""
    parts = [
        response_logprobs(trainer.model, batch.prompts[i : i + 4], batch.responses[i : i + 4])[0]
        for i in range(0, len(batch), 4)
    ]
    return torch.cat([torch.nn.functional.pad(p, (0, batch.mask.shape[1] - p.shape[1])) for p in parts])


def sample(kind: str, recipe: dict[str, Any]) -> list[Any]:
    """Completions of seven prompts, by all ranks together."""
    model = model_of(kind)
    learner = model_of(kind)
    plan = prepare(learner, Recipe(**recipe))
    prepare(model, plan, "rollout")
    engine = EmbeddedEngine(model, "batch")
    published = publish(learner, 0)
    engine.update(published.stream(), published.manifest)
    sampler = engine if ranks.size() == 1 else SplitSampler(engine)
    prompts = [[3 + i, 4, 5][: 1 + i % 3] for i in range(7)]
    return sampler.generate(prompts, 3, Sampling(max_tokens=8), [100 + i for i in range(7)])


def shipped(kind: str, recipe: dict[str, Any], distributed: dict[str, Any]) -> dict[str, Any]:
    """Versions 0 and 1 on their way to the engine: what is served, what was held of the pieces, what changed."""
    learner, model = model_of(kind), model_of(kind)
    plan = prepare(learner, Recipe(**recipe))
    prepare(model, plan, "rollout")
    engine = EmbeddedEngine(model, "batch")
    trainer = Trainer(
        learner,
        TrainerConfig(),
        ObjectiveConfig(name="grpo"),
        OptimizerConfig(learning_rate=1e-3, eps=1e-8),
        distributed=DistributedConfig(**distributed),
        device=torch.device("cpu"),
    )
    for scale in attachment(learner).scales.values():
        scale.observe(torch.ones(1, 1))
    changes, held, manifests = [], [], []
    for version in range(2):
        if ranks.joined():
            manifest, changed = ship(learner, engine, version)
        else:
            published = publish(learner, version)
            engine.update(published.stream(), published.manifest)
            manifest, changed = published.manifest, 0.0
        changes.append(changed)
        manifests.append(manifest)
        held.append(sum(bool(group._bytes) for group in attachment(learner).groups))
        trainer.update(batch(version), version)
    served = {name: tensor.clone() for name, tensor in engine.served().items()}
    return {"served": served, "manifests": manifests, "changes": changes, "held": held}


def shipping_peaks() -> tuple[dict[str, int], int]:
    """Most bytes of gathered weights that lived at once, by what gathers them; and those of the largest group."""
    learner, model = (tiny_llama(num_hidden_layers=4) for _ in range(2))
    plan = prepare(learner, Recipe(rollout="nvfp4-w4a16", residual=0.0))
    prepare(model, plan, "rollout")
    engine = EmbeddedEngine(model, "batch")
    shard(learner, DistributedConfig(keep_bytes=False), torch.device("cpu"))
    groups = attachment(learner).groups
    peaks = {
        "ship": gathered_peak(lambda: ship(learner, engine, 0)),
        "all groups": gathered_peak(lambda: [group.weights() for group in groups]),
    }
    return peaks, max(sum(w.nbytes for w in group.weights().values()) for group in groups)


def gathered_peak(work: Callable[[], Any]) -> int:
    """Most bytes of whole weights alive at once during `work`."""
    alive: dict[int, int] = {}
    peak, real, number = 0, DTensor.full_tensor, itertools.count()

    def full_tensor(shard: DTensor, **options: Any) -> torch.Tensor:
        nonlocal peak
        full, key = real(shard, **options), next(number)
        alive[key] = full.nbytes
        weakref.finalize(full, alive.pop, key)
        peak = max(peak, sum(alive.values()))
        return full

    DTensor.full_tensor = full_tensor
    try:
        work()
    finally:
        DTensor.full_tensor = real
    return peak


def run(config: Any, resume: bool = False) -> list[str]:
    """A whole run; what this rank said."""
    from lowbitrl.loop import train as train_run

    said: list[str] = []
    train_run(config, resume, say=said.append)
    return said


def served(config: Any, fake: Path, folder: Path) -> tuple[list[str], int]:
    """As `run`, with a stand-in for vLLM on every rank, which obeys orders-RANK.json; also how many started."""
    from lowbitrl.rollout.vllm.process import Server

    servers: list[Server] = []

    def server(source: str, plan: Any, *_: Any, **__: Any) -> Server:
        command = [sys.executable, "-S", str(fake), plan.digest, str(folder / f"orders-{ranks.rank()}.json")]
        servers.append(Server(lambda port: [*command, "--port", str(port)], 20))
        return servers[-1]

    pytest.MonkeyPatch().setattr("lowbitrl.engines.VllmServer", server)
    said = run(config)
    return said, sum(s.starts for s in servers)


def fail_on(rank: int, folder: Path) -> None:
    """One rank raises while the others wait for it."""
    if ranks.rank() == rank:
        raise ValueError(f"rank {rank} fails")
    ranks.gather(None)
