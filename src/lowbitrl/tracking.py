"""Where metrics go besides metrics.jsonl: TensorBoard and Weights & Biases, chosen in the recipe.

[tracking]
tensorboard = true
wandb = true          # offline unless mode = "online": `wandb sync RUN/wandb/offline-*` uploads later

A tracker is a function of one record. Step s of a backend's axis is "after s training steps", so the
evaluation before training stands at 0.
"""

from __future__ import annotations

import importlib.util
import secrets
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, model_validator

Tracker = Callable[[Mapping[str, Any]], None]
NEEDS = {"tensorboard": "tensorboard", "wandb": "wandb"}


class TrackingConfig(BaseModel):
    """Which backends a run writes to; metrics.jsonl is always written.

    Attributes:
        tensorboard: event files in RUN/tensorboard.
        wandb: a Weights & Biases run, its files in RUN/wandb.
        project: of W&B; the run is named after its folder.
        mode: "offline" sends nothing; "online" needs a login (`wandb login`).
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    tensorboard: bool = False
    wandb: bool = False
    project: str = "lowbitrl"
    mode: Literal["offline", "online"] = "offline"

    @model_validator(mode="after")
    def _installed(self) -> TrackingConfig:
        for field, package in NEEDS.items():
            if getattr(self, field) and importlib.util.find_spec(package) is None:
                raise ValueError(f"{field} = true, but {package} is not installed: pip install {package}")
        return self


@contextmanager
def trackers(
    config: TrackingConfig, folder: Path, start: int, settings: Mapping[str, Any]
) -> Iterator[list[Tracker]]:
    """Open the chosen backends for the run in `folder`, and close them after.

    Args:
        start: the first step that will be logged; what a resumed run logged from there on is dropped
            (TensorBoard) or overwritten in the same run (W&B online).
        settings: the whole config, shown beside the curves.
    """
    with ExitStack() as stack:
        opened = []
        if config.tensorboard:
            opened.append(stack.enter_context(_tensorboard(folder, start)))
        if config.wandb:
            opened.append(stack.enter_context(_wandb(config, folder, settings)))
        yield opened


@contextmanager
def _tensorboard(folder: Path, start: int) -> Iterator[Tracker]:
    from torch.utils.tensorboard import SummaryWriter

    writer = SummaryWriter(str(folder / "tensorboard"), purge_step=start + 1 if start else None)

    def track(record: Mapping[str, Any]) -> None:
        for name, value in _numbers(record).items():
            writer.add_scalar(name, value, record["step"] + 1)
        writer.flush()

    try:
        yield track
    finally:
        writer.close()


@contextmanager
def _wandb(config: TrackingConfig, folder: Path, settings: Mapping[str, Any]) -> Iterator[Tracker]:
    import wandb  # pyright: ignore[reportMissingImports]  (an extra)

    name = folder.resolve().name
    run = wandb.init(
        project=config.project,
        name=name,
        id=_run_id(folder),
        resume="allow",
        dir=str(folder),
        mode=config.mode,
        config=dict(settings),
    )
    failed = True
    try:
        yield lambda record: run.log(_numbers(record), step=record["step"] + 1)
        failed = False
    finally:
        run.finish(exit_code=int(failed))


def _run_id(folder: Path) -> str:
    """An id that a resumed run finds again, kept in the run folder."""
    file = folder / "wandb-id"
    if not file.is_file():
        file.write_text(secrets.token_hex(8))
    return file.read_text()


def _numbers(record: Mapping[str, Any]) -> dict[str, float]:
    return {
        key: float(value) for key, value in record.items() if key != "step" and isinstance(value, int | float)
    }
