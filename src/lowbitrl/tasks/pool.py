"""A pool of processes that call one reward function, each completion within limits.

A completion whose reward breaks a limit, raises, or kills its process costs that completion its reward and no
other: the process is ended with all it started, another one is forked from the template, and the rest of its chunk
goes on. What may be a leftover of earlier completions (memory, open files, a crash) is tried once more in a fresh
process before it counts.
"""

from __future__ import annotations

import os
import pickle
import select
import shutil
import socket
import tempfile
import time
import weakref
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from lowbitrl.tasks.limits import UNREPEATED, Limits, kind_of_end, name_of_end
from lowbitrl.tasks.rewards import Failure, RewardError, where
from lowbitrl.tasks.template import START_SECONDS, Template
from lowbitrl.tasks.worker import LENGTH, outcome_of
from lowbitrl.watch import beat

Work = tuple[str, dict[str, Any]]
"""A completion and the prompt that its reward is given."""
CHECK = -1
CHUNK = 32  # completions handed out at a time, at most
MOST_WORKERS = 8
REBUILDS = 3  # lost templates in one call: more are no accident


@dataclass(eq=False)
class _Worker:
    """A forked process, the items it was given and has not answered, and when the first of them is overdue."""

    pid: int
    channel: socket.socket
    scratch: Path
    given: deque[int] = field(default_factory=deque)
    deadline: float = 0.0
    buffer: bytes = b""
    answers: int = 0

    @property
    def fresh(self) -> bool:
        """Whether it has answered nothing but its check."""
        return self.answers <= 1


@dataclass
class _Round:
    """One call of `score`. `fresh`: items that wait for a process which has served none."""

    work: Sequence[Work]
    chunk: int
    waiting: deque[int]
    fresh: deque[int] = field(default_factory=deque)
    repeated: set[int] = field(default_factory=set)
    results: dict[int, float | Failure] = field(default_factory=dict)


class RewardPool:
    """Calls `package.module:function` in processes of their own.

    Args:
        check: what every new process is called with first: it loads what the function loads late, and may take
            `START_SECONDS`. Called once here.
        workers: most processes at a time; 0 is one a core, at most `MOST_WORKERS`.

    Raises:
        ImportError, ValueError: what `import_reward` raises. RewardError: what `check` fails with.
    """

    def __init__(self, spec: str, limits: Limits, check: Work, workers: int = 0) -> None:
        self.spec, self.limits, self.check = spec, limits, check
        self.size = workers or min(_cores(), MOST_WORKERS)
        self._scratch = tempfile.TemporaryDirectory(prefix="lowbitrl-rewards-")
        self._workers: list[_Worker] = []
        self._template = Template(spec, limits)
        self._finalizer = weakref.finalize(self, _shut, self._template, self._workers, self._scratch)
        try:
            self._template.start()
            self._prove()
        except BaseException:
            self.close()
            raise

    def score(self, work: Sequence[Work]) -> list[float | Failure]:
        """A reward or a failure for each; order and number of processes have no say in them.

        Raises:
            RuntimeError: processes cannot be started any more.
        """
        chunk = max(1, min(CHUNK, len(work) // (2 * self.size)))
        round_ = _Round(work, chunk, deque(range(len(work))))
        rebuilds = 0
        while len(round_.results) < len(work):
            beat()
            try:
                self._hand_out(round_)
                self._listen(round_)
            except ConnectionError as error:
                rebuilds += 1
                if rebuilds > REBUILDS:
                    raise RuntimeError(
                        f"reward {self.spec!r}: its processes end before work: {error}"
                    ) from error
                self._rebuild(round_)
        return [round_.results[index] for index in range(len(work))]

    def close(self) -> None:
        """End every process."""
        self._finalizer()

    def _prove(self) -> None:
        """Start the first process; RewardError with what the check fails with."""
        round_ = _Round((), 1, deque())
        worker = self._fork()
        try:
            while worker.given:
                self._listen(round_)
        except ConnectionError as error:
            raise RewardError(
                error.args[0] if isinstance(error, _CheckFailed) else Failure("crash", str(error))
            ) from error

    def _hand_out(self, round_: _Round) -> None:
        """Give idle processes work, and start as many as there is work for."""
        for worker in [w for w in self._workers if not w.given]:
            if chunk := _next_chunk(round_, worker):
                self._give(worker, chunk, round_)
        starting = sum(CHECK in worker.given for worker in self._workers)
        wanted = len(round_.fresh) + -(-len(round_.waiting) // round_.chunk) - starting
        for _ in range(min(wanted, self.size - len(self._workers))):
            self._fork()

    def _fork(self) -> _Worker:
        ours, theirs = socket.socketpair()
        scratch = Path(tempfile.mkdtemp(dir=self._scratch.name))
        with theirs:
            pid = self._template.ask({"do": "fork", "scratch": str(scratch)}, theirs.fileno())
        ours.settimeout(START_SECONDS)
        worker = _Worker(pid, ours, scratch)
        self._workers.append(worker)
        self._send(worker, [CHECK], [self.check])
        return worker

    def _give(self, worker: _Worker, chunk: list[int], round_: _Round) -> None:
        try:
            self._send(worker, chunk, [round_.work[index] for index in chunk])
        except OSError:
            # It died idle: what it was given goes elsewhere, and blames nobody.
            worker.given.clear()
            round_.waiting.extendleft(reversed(chunk))
            self._lose(worker, round_)

    def _send(self, worker: _Worker, chunk: list[int], work: list[Work]) -> None:
        # One message: prompts that several completions share are pickled once.
        message = pickle.dumps(work)
        worker.given.extend(chunk)
        worker.deadline = time.monotonic() + (START_SECONDS if CHECK in chunk else self.limits.timeout)
        worker.channel.sendall(LENGTH.pack(len(message)) + message)

    def _listen(self, round_: _Round) -> None:
        """Wait for answers until the first of them is overdue."""
        busy = {worker.channel.fileno(): worker for worker in self._workers if worker.given}
        poll = select.poll()
        for descriptor in busy:
            poll.register(descriptor, select.POLLIN)
        left = min(worker.deadline for worker in busy.values()) - time.monotonic()
        for descriptor, _ in poll.poll(max(0.0, left) * 1000 + 1):
            self._hear(busy[descriptor], round_)
        now = time.monotonic()
        for worker in [w for w in self._workers if w.given and w.deadline <= now]:
            self._lose(worker, round_, "timeout")

    def _hear(self, worker: _Worker, round_: _Round) -> None:
        try:
            data = worker.channel.recv(1 << 16)
        except OSError:
            data = b""
        if not data:
            self._lose(worker, round_)
            return
        *lines, worker.buffer = (worker.buffer + data).split(b"\n")
        for line in lines:
            if worker not in self._workers:
                break
            self._take(worker, line, round_)

    def _take(self, worker: _Worker, line: bytes, round_: _Round) -> None:
        try:
            outcome = outcome_of(line, worker.answers)
        except (ValueError, TypeError):
            self._lose(worker, round_, "crash")
            return
        worker.answers += 1
        worker.deadline = time.monotonic() + self.limits.timeout
        index = worker.given[0]
        if isinstance(outcome, Failure) and outcome.kind not in UNREPEATED:
            self._lose(worker, round_, outcome.kind, outcome.message)
            return
        worker.given.popleft()
        if index != CHECK:
            round_.results[index] = outcome
        elif isinstance(outcome, Failure):
            raise _CheckFailed(outcome)

    def _lose(
        self, worker: _Worker, round_: _Round, kind: str | None = None, message: str | None = None
    ) -> None:
        """End a process; the first item it was given has failed, the others go on elsewhere."""
        status = self._template.ask({"do": "end", "pid": worker.pid})
        self._drop(worker)
        if not worker.given:
            return
        index = worker.given.popleft()
        round_.waiting.extendleft(reversed(worker.given))
        kind = kind or kind_of_end(status)
        prompt = (self.check if index == CHECK else round_.work[index])[1]
        failure = Failure(kind, message or f"{where(self.spec, prompt)} {self._words(kind, status)}")
        if index == CHECK:
            raise _CheckFailed(failure)
        if kind not in UNREPEATED and not worker.fresh and index not in round_.repeated:
            round_.repeated.add(index)
            round_.fresh.append(index)
        else:
            round_.results[index] = failure

    def _words(self, kind: str, status: int) -> str:
        limits = self.limits
        return {
            "timeout": f"took more than rewards.timeout = {limits.timeout:g} s",
            "cpu": f"used more than rewards.cpu_seconds = {limits.cpu_seconds} of CPU time",
            "files": f"wrote a file over rewards.file_mb = {limits.file_mb}",
        }.get(kind, name_of_end(status))

    def _drop(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        worker.channel.close()
        shutil.rmtree(worker.scratch, ignore_errors=True)

    def _rebuild(self, round_: _Round) -> None:
        """A new template; what was given out is given out again."""
        for worker in list(self._workers):
            round_.waiting.extendleft(index for index in reversed(worker.given) if index != CHECK)
            self._drop(worker)
        self._template.close()
        self._template.start()


class _CheckFailed(ConnectionError):
    """A new process did not survive its first call; holds the Failure."""


def _next_chunk(round_: _Round, worker: _Worker) -> list[int]:
    """Items for an idle process; one that starts afresh takes what waits for that, alone."""
    if worker.fresh and round_.fresh:
        return [round_.fresh.popleft()]
    return [round_.waiting.popleft() for _ in range(min(round_.chunk, len(round_.waiting)))]


def _shut(template: Template, workers: list[_Worker], scratch: tempfile.TemporaryDirectory[str]) -> None:
    for worker in workers:
        worker.channel.close()
    workers.clear()
    template.close()
    scratch.cleanup()


def _cores() -> int:
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
