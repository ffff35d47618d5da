"""An objective's module that makes the run which imports it hang, once: a run that goes on finds the marker file.

Only under SABOTAGE_MARKER: a test that checks a recipe with this module imports it too, and must not change."""

import itertools
import os
import threading
from pathlib import Path

from lowbitrl.rollout.embedded import batch

_real, _count = batch.sample, itertools.count()


def _sample(*arguments):
    marker = Path(os.environ["SABOTAGE_MARKER"])
    if next(_count) == int(os.environ["SABOTAGE_AT"]) and not marker.exists():
        marker.touch()
        threading.Event().wait()
    return _real(*arguments)


if "SABOTAGE_MARKER" in os.environ:
    batch.sample = _sample
