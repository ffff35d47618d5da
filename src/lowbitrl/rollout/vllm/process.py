"""A server process of ours: started, waited for, killed with all it started, started again; never outliving us."""

from __future__ import annotations

import json
import os
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from lowbitrl.rollout.vllm import keeper

Command = Callable[[int], Sequence[str]]
"""The command line of a server that listens on a port of this host."""
OF_TORCHRUN = re.compile(
    r"(LOCAL_|GROUP_|ROLE_)?(RANK|WORLD_SIZE)|ROLE_NAME|MASTER_(ADDR|PORT)|TORCHELASTIC_\w+"
)
HEALTH_SECONDS = 5.0
END_SECONDS = 30.0


class Server:
    """A process that answers HTTP on a port of this host.

    A keeper stands between: it ends the server, with every process that the server started, when it is told to and
    when this process is gone, however it went.

    Args:
        seconds: how long a start may take.
        environment: variables beside this process's own.

    Raises:
        RuntimeError: it ends, or does not answer in time; the end of its log is in the message.
    """

    def __init__(
        self, command: Command, seconds: float, environment: Mapping[str, str] | None = None
    ) -> None:
        self.seconds, self.environment = seconds, dict(environment or {})
        self._command = command
        self._scratch = tempfile.TemporaryDirectory(prefix="lowbitrl-serve-")
        self.log = Path(self._scratch.name) / "log.txt"
        self.starts = 0
        self.url = ""
        self._start()

    def restart(self) -> None:
        """Kill it, whatever it does, and start another, on another port."""
        self._stop(at_once=True)
        self._start()

    def runs(self) -> bool:
        """Whether its process lives."""
        return self._process.poll() is None

    def close(self) -> None:
        """End the process."""
        self._stop(at_once=False)
        self._scratch.cleanup()

    def _start(self) -> None:
        port = free_port()
        self.url = f"http://127.0.0.1:{port}"
        with self.log.open("a") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-P", keeper.__file__, *self._command(port)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
                start_new_session=True,
                env=_inherited() | self.environment,
            )
        self._finalizer = weakref.finalize(self, _stop, self._process, True)
        self.starts += 1
        try:
            self._wait()
        except BaseException:
            self._stop(at_once=True)
            raise

    def _wait(self) -> None:
        last = time.monotonic() + self.seconds
        while not is_healthy(self.url):
            if not self.runs() or time.monotonic() > last:
                state = "runs but does not answer" if self.runs() else "ended"
                tail = self.log.read_text(errors="replace")[-3000:]
                raise RuntimeError(
                    f"the server {state} after at most {self.seconds:.0f} s; the end of its log:\n{tail}"
                )
            time.sleep(0.1)

    def _stop(self, at_once: bool) -> None:
        self._finalizer.detach()
        _stop(self._process, at_once)


def _inherited() -> dict[str, str]:
    """This process's variables but for torchrun's: the server is no rank of the run."""
    return {name: value for name, value in os.environ.items() if not OF_TORCHRUN.fullmatch(name)}


def _stop(process: subprocess.Popen[bytes], at_once: bool) -> None:
    assert process.stdin is not None
    if process.stdin.closed:
        return
    try:
        process.stdin.write(b"" if at_once else keeper.GENTLY)
        process.stdin.close()
    except OSError:  # the keeper is gone, and the server before it
        pass
    try:
        process.wait(END_SECONDS + keeper.PATIENCE)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


def is_healthy(url: str) -> bool:
    """Whether a server answers and says that its engine lives."""
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=HEALTH_SECONDS) as answer:
            return answer.status == 200
    except OSError:
        return False


def flags(options: Mapping[str, object]) -> list[str]:
    """Options as a command line has them: {"max_model_len": 96, "x": True} to --max-model-len 96 --x."""
    words: list[str] = []
    for name, value in options.items():
        flag = name.replace("_", "-")
        if isinstance(value, bool):
            words.append(f"--{flag}" if value else f"--no-{flag}")
        else:
            words += [f"--{flag}", value if isinstance(value, str) else json.dumps(value)]
    return words


def free_port() -> int:
    """A TCP port of this host that nothing listens on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return free.getsockname()[1]
