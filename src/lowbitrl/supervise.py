"""`train --restarts N`: the run in a process of its own, started again when it was killed or hung.

killed (SIGKILL, a segmentation fault, ...) or hung (`watch.HUNG`)   again with --resume, N times at most
ended with any other code, by Ctrl-C or by SIGTERM                   that is the end
"""

from __future__ import annotations

import signal
import subprocess
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from lowbitrl.watch import HUNG

ASKED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def supervise(command: Sequence[str], folder: Path, restarts: int, say: Callable[[str], None]) -> int:
    """Run `command`, again with --resume for each of at most `restarts` losses; its last exit code, 0 to 255.

    Args:
        folder: the run's; a run that was lost before it wrote its settings there is started from the beginning.
    """
    words = list(command)
    while True:
        process = subprocess.Popen(words)
        with _passing_on(process):
            code = process.wait()
        lost = code == HUNG or (code < 0 and -code not in ASKED)
        if not lost or restarts == 0:
            return code if code >= 0 else 128 - code
        restarts -= 1
        how = "hung" if code == HUNG else f"was ended by {signal.Signals(-code).name}"
        say(f"the run {how}; going on from its last checkpoint ({restarts} more restarts)")
        words = [word for word in command if word != "--resume"]
        if (folder / "config.json").is_file():
            words.append("--resume")


@contextmanager
def _passing_on(process: subprocess.Popen[bytes]) -> Iterator[None]:
    """Signals that ask for an end reach the run, which ends in its own way."""

    def handler(number: int, frame: object) -> None:
        # A terminal sends Ctrl-C to the run as well; the second one would stop it at once.
        if number != signal.SIGINT:
            process.send_signal(number)

    before = {number: signal.signal(number, handler) for number in ASKED}
    try:
        yield
    finally:
        for number, was in before.items():
            signal.signal(number, was)
