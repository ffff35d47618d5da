"""What every test with a real vLLM shares."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

from tests.conftest import _process

os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
# Usage statistics leave the machine otherwise.
os.environ.setdefault("VLLM_NO_USAGE_STATS", "1")

# vLLM sets its workers' environment in this process, and has its process group while an engine lives.
VLLMS = ("environment", "group")


@pytest.fixture(autouse=True)
def _process_as_before() -> Iterator[None]:
    """All but vLLM's own is put back: threads, types, signals."""
    before = _rest()
    yield
    assert _rest() == before


def _rest() -> dict[str, object]:
    return {name: value for name, value in _process().items() if name not in VLLMS}
