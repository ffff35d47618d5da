"""Backends are chosen in the open: asked for and impossible raises, auto says what it took."""

import logging

import pytest
import torch

from lowbitrl.kernels import backend as backends
from lowbitrl.kernels.backend import choose, known_backends, register_backend, why_unavailable

CPU = torch.device("cpu")


@pytest.fixture
def library(monkeypatch):
    """A backend that exists for one test and runs on CPU only."""
    monkeypatch.setattr(backends, "_probes", dict(backends._probes))
    backends._why.cache_clear()
    register_backend("lib", lambda device: None if device.type == "cpu" else "it is a CPU library")
    yield "lib"
    backends._why.cache_clear()


def test_reference_runs_everywhere():
    assert why_unavailable("reference", "cpu") is None
    assert why_unavailable("reference", "meta") is None


def test_an_unknown_backend_is_named():
    with pytest.raises(ValueError, match=r"unknown backend 'trition'.*reference"):
        why_unavailable("trition")
    with pytest.raises(ValueError, match="registered already"):
        register_backend("reference", lambda device: None)


def test_asked_for_and_impossible_raises_with_the_reason(library):
    with pytest.raises(ValueError, match=r"op: backend 'lib' can't run here: K is odd"):
        choose("op", library, CPU, {library: "K is odd", "reference": None})
    with pytest.raises(ValueError, match="it is a CPU library"):
        choose("op", library, torch.device("meta"), {library: None, "reference": None})
    with pytest.raises(ValueError, match="it has no op"):
        choose("op", library, CPU, {"reference": None})


def test_auto_takes_the_first_that_can_and_says_so_once(library, caplog):
    caplog.set_level(logging.INFO, logger="lowbitrl.kernels")
    backends._announce.cache_clear()
    for _ in range(3):
        assert choose("some op", "auto", CPU, {"lib": None, "reference": None}) == library
    assert choose("some op", "auto", CPU, {"lib": "not this shape", "reference": None}) == "reference"
    assert [r.getMessage() for r in caplog.records if "backend lib" in r.getMessage()] == [
        "some op on cpu: backend lib"
    ]


def test_auto_never_interprets(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert choose("op", "auto", CPU, {"triton": None, "reference": None}) == "reference"


def test_auto_with_nothing_that_runs_lists_every_reason(library):
    with pytest.raises(ValueError, match=r"lib: it is a CPU library; reference: no such grid"):
        choose("op", "auto", torch.device("meta"), {"lib": None, "reference": "no such grid"})


def test_known_backends_start_with_auto():
    assert known_backends()[:3] == ["auto", "reference", "triton"]
