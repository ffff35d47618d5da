"""Kernels run on CUDA where there is one, else in Triton's interpreter; outputs start poisoned."""

import os

import pytest
import torch

# Triton looks at this when a kernel is defined, so before any *_triton module is imported.
if not torch.cuda.is_available():
    os.environ.setdefault("TRITON_INTERPRET", "1")

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


@pytest.fixture
def device() -> str:
    """Where kernels run here."""
    return DEVICE


@pytest.fixture
def poisoned(monkeypatch):
    """Fresh memory is all ones (NaN, -1, 255), so an element that nothing wrote shows."""
    empty, new_empty = torch.empty, torch.Tensor.new_empty

    def poison(tensor):
        if tensor.numel() and tensor.is_contiguous():
            tensor.view(-1).view(torch.uint8).fill_(0xFF)
        return tensor

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poison(empty(*args, **kwargs)))
    monkeypatch.setattr(
        torch.Tensor, "new_empty", lambda self, *args, **kwargs: poison(new_empty(self, *args, **kwargs))
    )
