"""Runs a command in a session of its own, and ends all of it when its own standard input ends: its owner is gone.

A script of the standard library alone: `python keeper.py COMMAND ...`. `GENTLY` before the end means SIGTERM, and
SIGKILL after `PATIENCE` seconds; nothing before it means SIGKILL at once.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading

GENTLY = b"gently"
PATIENCE = 20.0


def keep(command: list[str]) -> int:
    """Run `command`; its exit status."""
    process = subprocess.Popen(command, stdin=subprocess.DEVNULL, start_new_session=True)
    threading.Thread(target=_obey, args=(process,), daemon=True).start()
    code = process.wait()
    _signal(process.pid, signal.SIGKILL)
    return code


def _obey(process: subprocess.Popen[bytes]) -> None:
    if sys.stdin.buffer.read() == GENTLY:
        _signal(process.pid, signal.SIGTERM)
        try:
            process.wait(PATIENCE)
            return
        except subprocess.TimeoutExpired:
            pass
    _signal(process.pid, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    try:
        os.killpg(group, number)
    except ProcessLookupError:  # all of it has ended
        return


if __name__ == "__main__":
    sys.exit(keep(sys.argv[1:]))
