"""Tests with a real verl: `make test-verl`. Where it is not installed none of them is collected."""

from __future__ import annotations

from importlib.util import find_spec

collect_ignore_glob = [] if find_spec("verl") and find_spec("ray") else ["test_*.py"]
