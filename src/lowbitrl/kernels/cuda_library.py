"""The CUDA C++ kernels: built once by the nvcc at hand, loaded with ctypes, known as backend "cuda".

The source has a plain C interface, so nothing of torch is compiled: seconds, once a machine and version.
What is built is kept in torch's extension folder (TORCH_EXTENSIONS_DIR), named by what made it.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import os
import subprocess
from pathlib import Path

import torch
from torch import Tensor

from .backend import register_backend

CUDA = "cuda"
# mma.sync on BF16 exists from 8.0 on; clusters and distributed shared memory, which the kernel reduces
# through, from 9.0 on.
NEEDED_CAPABILITY = (9, 0)

# Hopper's own products of four warps are in no other architecture.
WITH_GROUPS = "90a"

SOURCES = Path(__file__).parent / "cuda"


@functools.cache
def library(name: str = "w4a16") -> ctypes.CDLL:
    """The loaded library of one source file, built first where it has not been built for this device yet.

    Args:
        name: the file's, without ``.cu``.

    Raises:
        RuntimeError: nvcc fails; the message holds what it said.
    """
    target = _folder() / f"{name}-{_fingerprint()}.so"
    if not target.exists():
        _build(name, target)
    return ctypes.CDLL(str(target))


def address(tensor: Tensor | None) -> ctypes.c_void_p:
    """Where a tensor's data lies, null for None."""
    return ctypes.c_void_p(None if tensor is None else tensor.data_ptr())


def stream(device: torch.device) -> ctypes.c_void_p:
    """The current stream of a device."""
    return ctypes.c_void_p(torch.cuda.current_stream(device).cuda_stream)


def check(code: int, what: str) -> None:
    """Raise RuntimeError for a launch that failed."""
    if code:
        raise RuntimeError(f"{what}: CUDA error {code}" if code > 0 else f"{what}: no such kernel was built")


@functools.cache
def architecture() -> str:
    """What the current device's code is built for."""
    major, minor = torch.cuda.get_device_capability()
    found = f"{major}{minor}"
    return f"{found}a" if f"{found}a" == WITH_GROUPS else found


def _fingerprint() -> str:
    parts = [path.read_bytes() for path in sorted(SOURCES.iterdir())]
    parts.append(f"{architecture()} {torch.version.cuda}".encode())
    return hashlib.sha256(b"\0".join(parts)).hexdigest()[:16]


def _folder() -> Path:
    default = Path.home() / ".cache" / "torch_extensions"
    folder = Path(os.environ.get("TORCH_EXTENSIONS_DIR", default)) / "lowbitrl"
    folder.mkdir(parents=True, exist_ok=True)
    return folder


def _build(name: str, target: Path) -> None:
    arch = architecture()
    groups = ["-DLOWBITRL_GROUPS"] if arch == WITH_GROUPS else []
    # A name of its own until it is whole: another process may build the same at the same time.
    part = target.with_suffix(f".{os.getpid()}")
    command = [
        str(_nvcc()), "-O3", "-std=c++17", f"-gencode=arch=compute_{arch},code=sm_{arch}",
        *groups, "-shared", "-Xcompiler", "-fPIC", "-o", str(part), str(SOURCES / f"{name}.cu"),
    ]  # fmt: skip
    built = subprocess.run(command, capture_output=True, text=True, check=False)
    if built.returncode:
        raise RuntimeError(f"{' '.join(command)} failed:\n{built.stderr}")
    part.rename(target)


def _nvcc() -> Path | None:
    from torch.utils.cpp_extension import CUDA_HOME

    found = Path(CUDA_HOME or "/nonexistent") / "bin" / "nvcc"
    return found if found.exists() else None


def _why_not_cuda(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"it compiles for CUDA, not {device.type}"
    capability = torch.cuda.get_device_capability(device)
    if capability < NEEDED_CAPABILITY:
        return f"compute capability {capability} is older than {NEEDED_CAPABILITY}"
    if _nvcc() is None:
        return "no nvcc found to build it with (install the CUDA toolkit, or set CUDA_HOME)"
    return None


register_backend(CUDA, _why_not_cuda)
