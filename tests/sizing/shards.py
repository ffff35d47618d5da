"""What one rank of a sharded learner holds after an update, in bytes."""

from __future__ import annotations

import torch

from lowbitrl.quant import Recipe, attachment, prepare
from lowbitrl.trainer import ObjectiveConfig, OptimizerConfig, Trainer, TrainerConfig
from tests.distributed import work


def held(kind: str, optimizer: str) -> dict[str, int]:
    """Masters, their gradients, states and the encoded weights."""
    model = work.model_of("dense" if kind == "llama" else kind)
    prepare(model, Recipe(rollout="nvfp4"), "learner")
    config = OptimizerConfig(name=optimizer)  # type: ignore[arg-type]
    settings = TrainerConfig(micro_batch_tokens=20), ObjectiveConfig(name="grpo"), config
    trainer = Trainer(model, *settings, device=torch.device("cpu"))
    grown: list[torch.Tensor] = []
    step = trainer.optimizer.step

    def noted(norm: torch.Tensor) -> None:
        grown.extend(m.grad for m in trainer.optimizer.masters.values() if m.grad is not None)
        step(norm)

    trainer.optimizer.step = noted  # type: ignore[method-assign]
    trainer.update(work.batch(0), 0)
    states = [t for o in trainer.optimizer.optimizers for s in o.state.values() for t in s.values()]
    encoded = [
        t for g in attachment(model).groups for q in g.encoded().values() for t in q.tensors().values()
    ]
    return {
        "masters": own(trainer.optimizer.masters.values()),
        "gradients": own(grown),
        "optimizer states": own(states),
        "encoded weights": own(encoded),
    }


def own(tensors: object) -> int:
    """Bytes of this rank's parts."""
    return sum((t.to_local() if hasattr(t, "to_local") else t).nbytes for t in tensors)  # type: ignore[attr-defined]
