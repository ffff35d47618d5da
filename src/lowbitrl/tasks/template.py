"""The pool's end of the template process: started, asked to fork and to end workers, started again when it is lost."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from dataclasses import asdict
from typing import Any

from lowbitrl.tasks.limits import Limits
from lowbitrl.tasks.worker import LENGTH

START_SECONDS = 120.0  # Importing a reward may load much, and so may its first call.
# -P: a file in the working folder must not hide a module of the standard library.
_COMMAND = (
    sys.executable,
    "-P",
    "-c",
    "from lowbitrl.tasks.worker import template_main as m; import sys; m(int(sys.argv[1]))",
)


class Template:
    """A process that has imported one reward function."""

    def __init__(self, spec: str, limits: Limits) -> None:
        self.spec, self.limits = spec, limits
        self._control: socket.socket | None = None
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the process and let it import.

        Raises:
            ImportError, ValueError: what `import_reward` raises there; an import that ends its process or hangs.
        """
        self._control, theirs = socket.socketpair()
        self._control.settimeout(START_SECONDS)
        with theirs:
            descriptor = theirs.fileno()
            # A session of its own: Ctrl-C is the run's to handle.
            self._process = subprocess.Popen(
                [*_COMMAND, str(descriptor)],
                pass_fds=[descriptor],
                stdin=subprocess.DEVNULL,
                start_new_session=True,
                env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)} | _quiet_threads(),
            )
        order = json.dumps({"spec": self.spec, "limits": asdict(self.limits)}).encode()
        try:
            self._control.sendall(LENGTH.pack(len(order)) + order)
            error = self._answer()["error"]
        except ConnectionError as lost:
            self.close()
            raise ImportError(f"reward {self.spec!r}: importing it failed: {lost}") from lost
        if error is not None:
            self.close()
            raise (ImportError if error[0] == "ImportError" else ValueError)(error[1])

    def ask(self, order: dict[str, Any], descriptor: int | None = None) -> int:
        """Have an order carried out. Raises ConnectionError if the process is gone."""
        if self._control is None:
            raise ConnectionError("the pool is closed")
        socket.send_fds(
            self._control, [json.dumps(order).encode()], [] if descriptor is None else [descriptor]
        )
        return self._answer()

    def close(self) -> None:
        """End the process, and with it its workers."""
        if self._control is not None:
            self._control.close()
        if self._process is not None:
            try:
                self._process.wait(5)
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        self._control = self._process = None

    def _answer(self) -> Any:
        assert self._control is not None
        line = b""
        while not line.endswith(b"\n"):
            try:
                part = self._control.recv(1 << 16)
            except TimeoutError as error:
                raise ConnectionError(f"no answer in {START_SECONDS:g} s") from error
            if not part:
                raise ConnectionError("its process ended")
            line += part
        return json.loads(line)


def _quiet_threads() -> dict[str, str]:
    """One thread a process, unless the user says otherwise: threads neither survive a fork nor help here."""
    return {
        name: os.environ.get(name, "1")
        for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
    }
