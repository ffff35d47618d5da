"""An objective's module that makes the run which imports it hang, once: a run that goes on finds the marker file."""

import itertools
import os
import threading
from pathlib import Path

from lowbitrl.rollout.embedded import batch

_real, _count = batch.sample, itertools.count()


def _sample(*arguments):
    marker, at = Path(os.environ["SABOTAGE_MARKER"]), int(os.environ["SABOTAGE_AT"])
    if next(_count) == at and not marker.exists():
        marker.touch()
        threading.Event().wait()
    return _real(*arguments)


batch.sample = _sample
