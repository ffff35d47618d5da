"""What this machine can run: devices, formats, engines, extras, each with the reason where it can't."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterator
from importlib import metadata
from importlib.util import find_spec

import torch

from lowbitrl.formats import known_formats
from lowbitrl.kernels import known_backends, why_unavailable
from lowbitrl.kernels.backend import AUTO
from lowbitrl.models import DEMO, demo_gguf
from lowbitrl.quant.recipe import PRECISIONS

NATIVE_FP4 = (10, 0)
NATIVE_FP8 = (8, 9)


def diagnose_machine() -> Iterator[str]:
    """One line a fact; "ok" or "no" first, then what and why."""
    yield f"ok  python {platform.python_version()}, torch {torch.__version__}, {os.cpu_count()} cores"
    yield f"ok  transformers {metadata.version('transformers')} (supported: 5.5.3 to 5.24)"
    yield from _devices()
    yield from _kernels()
    yield from _precisions()
    yield from _extras()


def _devices() -> Iterator[str]:
    yield f"ok  cpu: reference kernels, BF16 products {'with AVX512_BF16/AMX' if _fast_bf16() else 'in software'}"
    if not torch.cuda.is_available():
        yield "no  cuda: torch finds no CUDA device"
        return
    name, capability = torch.cuda.get_device_name(), torch.cuda.get_device_capability()
    yield f"ok  cuda: {name}, sm{capability[0]}{capability[1]}"
    yield f"{_mark(capability >= NATIVE_FP8)} FP8 tensor cores (sm89 and newer)"
    yield (
        f"{_mark(capability >= NATIVE_FP4)} FP4 tensor cores (sm100 and newer); W4A4 runs emulated either way: "
        "the native product (backend 'native') is written and has not been run on hardware"
    )


def _kernels() -> Iterator[str]:
    for name in known_backends():
        if name != AUTO:
            reason = why_unavailable(name)
            yield f"{_mark(reason is None)} kernels, backend {name}: {reason or 'can run'}"


def _precisions() -> Iterator[str]:
    known = set(known_formats())
    for name, precision in PRECISIONS.items():
        missing = [f for f in (precision.weight, precision.activation) if f and f not in known]
        reason = f"format {missing[0]} is not implemented" if missing else "reference arithmetic, emulated"
        yield f"{_mark(not missing)} rollout precision {name}: {'BF16' if name == 'bf16' else reason}"


def _extras() -> Iterator[str]:
    try:
        yield f"ok  model {DEMO}: {demo_gguf().name}"
    except (ImportError, FileNotFoundError) as error:
        yield f"no  model {DEMO}: {error}"
    for package in ("vllm", "verl", "trl"):
        found = find_spec(package) is not None
        yield f"{_mark(found)} {package}: {'installed' if found else 'not installed'}"


def _mark(fine: bool) -> str:
    return "ok " if fine else "no "


def _fast_bf16() -> bool:
    # Private in torch, and only asked for a line of text: absent means unknown, so no.
    probe = getattr(torch.cpu, "_is_avx512_bf16_supported", lambda: False)
    return bool(probe())
