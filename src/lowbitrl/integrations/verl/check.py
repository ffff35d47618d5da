"""`lowbitrl verl check`: is every piece of ours active in verl, and if not, why and what to do.

verl loads plugins on import and swallows their failures, so nothing is taken from what we registered
ourselves: verl is imported, then its own registries are asked.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from importlib import metadata
from importlib.util import find_spec
from typing import Any

from packaging.requirements import Requirement

from lowbitrl.integrations.verl.settings import PREFIX
from lowbitrl.objectives import objective_names

PLUGIN = "lowbitrl.integrations.verl.plugin"
SUPPORTED = Requirement("verl>=0.9,<0.11")
VENDOR = "lowbitrl"


@dataclass(frozen=True)
class Finding:
    """One piece: active or not, and the remedy where it is not. `needed`: without it a run of ours cannot be."""

    piece: str
    active: bool
    detail: str
    needed: bool = True

    def line(self) -> str:
        """As printed."""
        return f"{'ok ' if self.active else 'no '} {self.piece}: {self.detail}"


def check() -> list[Finding]:
    """Every piece, after importing verl as one of its workers would under `VERL_ENGINE_VENDOR=lowbitrl`.

    Imports verl into this process: run it in one of its own.
    """
    os.environ["VERL_ENGINE_VENDOR"] = VENDOR
    found = list(_installed())
    if all(finding.active for finding in found):
        importlib.import_module("verl")
        found += _registered()
    return [*found, *_rollouts()]


def _installed() -> Iterator[Finding]:
    try:
        version = metadata.version("verl")
    except metadata.PackageNotFoundError:
        yield Finding("verl", False, "not installed; pip install 'lowbitrl[verl]'")
        return
    fits = SUPPORTED.specifier.contains(version, prereleases=True)
    yield Finding(
        "verl", fits, version if fits else f"{version} is outside {SUPPORTED.specifier}; install one inside"
    )
    try:
        yield Finding("TransferQueue", True, metadata.version("TransferQueue"))
    except metadata.PackageNotFoundError:
        remedy = "not installed, and verl's trainer (trainer.use_v1) imports it; pip install TransferQueue"
        yield Finding("TransferQueue", False, remedy)
    points = [e for e in metadata.entry_points(group="verl.plugins") if e.value.partition(":")[0] == PLUGIN]
    remedy = "this lowbitrl is not an installed distribution (PYTHONPATH alone has no entry points); pip install it"
    yield Finding("entry point verl.plugins", bool(points), points[0].name if points else remedy)
    policy = os.environ.get("VERL_USE_EXTERNAL_PLUGINS", "auto").strip().lower()
    allowed = policy == "auto" or "lowbitrl" in [name.strip() for name in policy.split(",")]
    detail = f"VERL_USE_EXTERNAL_PLUGINS={policy}"
    yield Finding(
        "plugins allowed", allowed, detail if allowed else f"{detail} leaves lowbitrl out; unset it"
    )


def _registered() -> Iterator[Finding]:
    from verl.trainer.ppo.core_algos import POLICY_LOSS_REGISTRY as LOSSES
    from verl.workers.engine import EngineRegistry
    from verl.workers.rollout.base import _ROLLOUT_REGISTRY as ADAPTERS
    from verl.workers.rollout.replica import RolloutReplicaRegistry

    names = ["tbpo", *(f"{PREFIX}{name}" for name in objective_names())]
    engines = EngineRegistry._engines.get("language_model", {})
    asked = "with VERL_ENGINE_VENDOR=lowbitrl"
    pieces: list[tuple[str, Callable[[], Any], str]] = [
        ("policy losses", lambda: [LOSSES[name] for name in names], ", ".join(names)),
        ("engine fsdp2", lambda: engines["fsdp2"]["cuda", VENDOR], asked),
        (
            "rollout server",
            lambda: RolloutReplicaRegistry._registry[VENDOR],
            f"rollout.name={VENDOR}, {asked}",
        ),
        ("rollout adapter", lambda: ADAPTERS[VENDOR, "async"], f"rollout.name={VENDOR}, {asked}"),
        ("config of the engine", lambda: _import("config").LowbitEngineConfig, "a _target_ of the overrides"),
        ("config of the loss", lambda: _import("config").LowbitPolicyLoss, "a _target_ of the overrides"),
    ]
    findings = [_of(piece, ask, detail) for piece, ask, detail in pieces]
    # Asked first: importing the plugin here would register what verl left out.
    reason = "" if all(finding.active for finding in findings) else f"; {_why_not_loaded()}"
    for finding in findings:
        yield finding if finding.active else replace(finding, detail=finding.detail + reason)


def _of(piece: str, ask: Callable[[], Any], detail: str) -> Finding:
    try:
        ask()
    except (KeyError, ImportError, AttributeError) as error:
        return Finding(piece, False, f"not registered ({type(error).__name__}: {error})")
    return Finding(piece, True, detail)


def _why_not_loaded() -> str:
    """What importing the plugin raises here; verl would not have shown it."""
    try:
        importlib.import_module(PLUGIN)
    except Exception as error:  # whatever it is, it is the answer
        return f"the plugin fails with {type(error).__name__}: {error}"
    return "the plugin loads here, so verl's registries have moved: this verl is newer than what we run with"


def _rollouts() -> Iterator[Finding]:
    piece, without = "vLLM rollout", "rollout.engine='embedded' needs none"
    if find_spec("vllm") is None:
        yield Finding(piece, False, f"vLLM is not installed; {without}", needed=False)
        return
    try:
        worker = _import("vllm_worker").LowbitWorker
    except Exception as error:  # vLLM's import fails in as many ways as it has dependencies
        yield Finding(piece, False, f"{type(error).__name__}: {error}; {without}", needed=False)
        return
    points = [e for e in metadata.entry_points(group="vllm.general_plugins") if e.name == VENDOR]
    detail = f"worker {worker.__module__}, " + (
        f"plugin {points[0].value}" if points else "plugin not installed"
    )
    yield Finding(piece, bool(points), detail, needed=False)


def _import(module: str) -> Any:
    return importlib.import_module(f"lowbitrl.integrations.verl.{module}")
