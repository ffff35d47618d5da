"""The CUDA kernels compiled for the CPU: their own source, with CUDA's threads, barriers and tensor cores emulated."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import pytest

from lowbitrl.kernels import cuda_library, w4a16_cuda

HERE = Path(__file__).parent


def build(source, folder):
    """The library of one of this folder's sources, loaded; skips where there is no C++20 compiler."""
    compiler = shutil.which("g++") or shutil.which("clang++")
    if compiler is None:
        pytest.skip("no C++ compiler to build the emulated kernels with")
    target = folder / "emulated.so"
    command = [
        compiler, "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", "-w", f"-I{HERE}",
        f"-I{cuda_library.SOURCES}", "-o", str(target), str(HERE / source),
    ]  # fmt: skip
    subprocess.run(command, check=True)
    return ctypes.CDLL(str(target))


@pytest.fixture(scope="session")
def emulated_library(tmp_path_factory):
    """The loaded library of the 4-bit products."""
    return build("emulated.cpp", tmp_path_factory.mktemp("emulated"))


@pytest.fixture
def emulated(emulated_library, monkeypatch):
    """The launcher's functions reach the emulated kernels."""
    monkeypatch.setattr(w4a16_cuda, "library", lambda: emulated_library)
    monkeypatch.setattr(w4a16_cuda, "stream", lambda device: ctypes.c_void_p(None))
    monkeypatch.setattr(w4a16_cuda, "architecture", lambda: cuda_library.WITH_GROUPS)
