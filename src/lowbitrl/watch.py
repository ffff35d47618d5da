"""A watch over calls that nothing inside the process can interrupt: an engine that hangs in a kernel or in a lock.

While a call is watched, whatever moves (a token step, an answered reward) says `beat`. When no beat came for too long,
every thread's stack is written down and the process ends with code `HUNG`: what hangs holds memory, locks and maybe
the device, and only the end of the process gives them back. `lowbitrl train --restarts` then goes on from the last
checkpoint.
"""

from __future__ import annotations

import faulthandler
import os
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

HUNG = 3
"""Exit code of a process that a watch ended."""
_STDERR = 2
_LATE = 2.0  # times the limit after which the interpreter's own timer acts, where the watching thread cannot

_watches: list[Watch] = []


def beat() -> None:
    """A sign of life; does nothing where nothing is watched."""
    for watch in _watches:
        watch.beat()


class Watch:
    """Ends the process when a watched call gives no sign of life.

    Args:
        seconds: longest silence; 0 watches nothing.
        report: file for the threads' stacks.
    """

    def __init__(self, seconds: float, report: Path) -> None:
        self.seconds, self.report = seconds, report
        self._last = self._armed = 0.0

    @contextmanager
    def over(self, what: str) -> Iterator[None]:
        """Watch the block, which `what` names in the message."""
        if not self.seconds:
            yield
            return
        self._last = time.monotonic()
        done = threading.Event()
        thread = threading.Thread(target=self._look, args=(what, done), daemon=True)
        self._arm()
        _watches.append(self)
        thread.start()
        try:
            yield
        finally:
            _watches.remove(self)
            done.set()
            faulthandler.cancel_dump_traceback_later()
            thread.join()

    def beat(self) -> None:
        """A sign of life of the watched call."""
        self._last = time.monotonic()
        if self._last - self._armed > self.seconds / 2:
            self._arm()

    def _arm(self) -> None:
        """Have the interpreter's timer end the process (with code 1): it needs no lock that a hanging call may hold."""
        self._armed = time.monotonic()
        faulthandler.dump_traceback_later(self.seconds * _LATE, exit=True, file=_STDERR)

    def _look(self, what: str, done: threading.Event) -> None:
        while not done.wait(min(1.0, self.seconds / 4)):
            if time.monotonic() - self._last > self.seconds and not done.is_set():
                with suppress(OSError), self.report.open("w") as file:
                    faulthandler.dump_traceback(file)
                print(
                    f"error: {what} gave no sign of life for rollout.timeout = {self.seconds:g} s; where every thread "
                    f"stood is in {self.report}. The process ends: go on from the last checkpoint with --resume",
                    file=sys.stderr,
                    flush=True,
                )
                os._exit(HUNG)
