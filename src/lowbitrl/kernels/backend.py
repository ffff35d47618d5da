"""Which implementation of an op runs, and why another can't.

    "reference"   torch, in formats/: any device, what the others are compared with
    "triton"      our kernels, on CUDA; on CPU only through Triton's interpreter, which is for tests
    "auto"        the first of an op's implementations that can run; said once in the log
    a library     implementations a library brings; ``register_backend`` makes its name known

A backend that is asked for by name and can't run raises, with the reason. Nothing falls back silently.
"""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Mapping
from importlib.util import find_spec

import torch

AUTO, REFERENCE, TRITON = "auto", "reference", "triton"
OLDEST_CAPABILITY = (8, 0)

_log = logging.getLogger(__name__)
_probes: dict[str, Callable[[torch.device], str | None]] = {}


def register_backend(name: str, why_unavailable: Callable[[torch.device], str | None]) -> None:
    """Make a backend known.

    Args:
        name: what callers pass as ``backend=``.
        why_unavailable: device -> why the backend can't run there at all, None if it can. Asked once a device.
    """
    if name in _probes or name == AUTO:
        raise ValueError(f"backend {name!r} is registered already")
    _probes[name] = why_unavailable


def known_backends() -> list[str]:
    """Every name ``backend=`` takes."""
    return [AUTO, *_probes]


def why_unavailable(name: str, device: torch.device | str | None = None) -> str | None:
    """Why backend ``name`` can't run on ``device`` (None: CUDA where there is one), or None if it can.

    Raises:
        ValueError: no backend has that name.
    """
    if name == AUTO:
        return None
    if name not in _probes:
        raise ValueError(f"unknown backend {name!r}; known: {', '.join(known_backends())}")
    if device is None:
        device = "cuda" if torch.cuda.is_available() else "cpu"
    return _why(name, torch.device(device).type)


def choose(op: str, backend: str, device: torch.device, candidates: Mapping[str, str | None]) -> str:
    """The implementation of ``op`` to run.

    Args:
        op: what messages call it.
        backend: "auto" or a backend's name.
        device: where the tensors are.
        candidates: the op's implementations, best first, each with the reason it can't do this call
            (a format, a shape), or None. ``auto`` takes "triton" only on CUDA.

    Raises:
        ValueError: ``backend`` is unknown, is not among the op's, or can't run; the reason is in the message.
    """
    if backend != AUTO:
        reason = why_unavailable(backend, device) or candidates.get(backend, f"it has no {op}")
        if reason:
            raise ValueError(f"{op}: backend {backend!r} can't run here: {reason}; use backend='auto'")
        return backend
    for name, reason in candidates.items():
        if reason is None and _why(name, device.type) is None and (name != TRITON or device.type == "cuda"):
            _announce(op, device.type, name)
            return name
    raise ValueError(f"{op}: no backend can run here: {_reasons(device, candidates)}")


def is_interpreting() -> bool:
    """Whether Triton kernels run in Triton's interpreter, on CPU tensors."""
    return os.environ.get("TRITON_INTERPRET") == "1"


def _reasons(device: torch.device, candidates: Mapping[str, str | None]) -> str:
    return "; ".join(f"{name}: {why or _why(name, device.type)}" for name, why in candidates.items())


@functools.cache
def _why(name: str, device_type: str) -> str | None:
    return _probes[name](torch.device(device_type))


@functools.cache
def _announce(op: str, device_type: str, name: str) -> None:
    _log.info("%s on %s: backend %s", op, device_type, name)


def _why_not_triton(device: torch.device) -> str | None:
    if find_spec("triton") is None:
        return "triton is not installed (pip install triton)"
    if is_interpreting():
        return None if device.type == "cpu" else "TRITON_INTERPRET=1 runs kernels on CPU tensors only"
    if device.type != "cuda":
        return f"it compiles for CUDA, not {device.type}; TRITON_INTERPRET=1 interprets on CPU, for tests"
    capability = torch.cuda.get_device_capability(device)
    if capability < OLDEST_CAPABILITY:
        return f"compute capability {capability} is older than {OLDEST_CAPABILITY}"
    return None


register_backend(REFERENCE, lambda device: None)
register_backend(TRITON, _why_not_triton)
