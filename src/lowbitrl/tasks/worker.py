"""The processes of contained rewards: a template that has imported the function, and workers forked from it.

    pool --- control socket ---> template      "fork" (with a worker's socket), "end PID"
    pool --- a socket each ----> workers       a chunk: pickled [(completion, prompt), ...]
                                               answers: a line of JSON each, [count, value] or
                                               [count, kind, message]

Forking makes a new worker in milliseconds, however long the import took; the template reaps its workers, so that
no number of a process is used again while the pool may still end it. What workers say is read as JSON: it comes from
where sampled text may have run.
"""

from __future__ import annotations

import ctypes
import json
import os
import pickle
import signal
import socket
import struct
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from lowbitrl.tasks.limits import KINDS, Limits, wipe
from lowbitrl.tasks.rewards import LARGEST, Failure, Reward, RewardError, call_reward, import_reward, where

LENGTH = struct.Struct("!Q")
_PR_SET_PDEATHSIG = 1


def template_main(descriptor: int) -> None:
    """Import the function that the pool names, then fork and end workers until the pool is gone."""
    control = socket.socket(fileno=descriptor)
    order = json.loads(next(_messages(control)))
    spec, limits = order["spec"], Limits(**order["limits"])
    try:
        function = import_reward(spec)
    except (ImportError, ValueError) as error:
        _say(control, {"error": [type(error).__name__, str(error)]})
        return
    _say(control, {"error": None})
    _obey(control, spec, function, limits)


def _obey(control: socket.socket, spec: str, function: Reward, limits: Limits) -> None:
    workers: set[int] = set()
    while True:
        text, descriptors, _, _ = socket.recv_fds(control, 4096, 1)
        if not text:
            break
        order = json.loads(text)
        if order["do"] == "fork":
            pid = os.fork()
            if pid == 0:
                control.close()
                _worker_main(socket.socket(fileno=descriptors[0]), spec, function, limits, order["scratch"])
            os.close(descriptors[0])
            workers.add(pid)
            _say(control, pid)
        else:
            workers.discard(order["pid"])
            _say(control, _end(order["pid"]))
    for pid in workers:
        _end(pid)


def _end(pid: int) -> int:
    """Kill a worker with all that it started; its exit status."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:  # it died before it had a group of its own
        os.kill(pid, signal.SIGKILL)
    return os.waitpid(pid, 0)[1]


def _worker_main(channel: socket.socket, spec: str, function: Reward, limits: Limits, scratch: str) -> None:
    """Serve chunks until the pool closes the channel; never returns."""
    try:
        os.setsid()
        _die_with_parent()
        _move_to(Path(scratch))
        limits.apply()
        _serve(channel, spec, function, limits, Path(scratch))
    finally:
        # Whatever happened: a fork must not run on as a second template.
        os._exit(0)


def _serve(channel: socket.socket, spec: str, function: Reward, limits: Limits, scratch: Path) -> None:
    count = 0
    for message in _messages(channel):
        for completion, prompt in pickle.loads(message):
            limits.allow_cpu()
            answer = _attempt(spec, function, completion, prompt, limits, scratch)
            channel.sendall(json.dumps([count, *answer]).encode() + b"\n")
            count += 1


def _attempt(
    spec: str, function: Reward, completion: str, prompt: dict[str, Any], limits: Limits, scratch: Path
) -> list[Any]:
    """[reward], or [kind, message] of the failure; the scratch folder is empty afterwards."""
    try:
        value = call_reward(spec, function, completion, prompt)
    except RewardError as error:
        return [error.failure.kind, error.failure.message]
    except MemoryError:  # met while the first one was put into words
        return ["memory", f"{where(spec, prompt)} ran out of memory"]
    finally:
        excess = limits.excess(scratch)
        wipe(scratch)
    return [value] if excess is None else ["files", f"{where(spec, prompt)} {excess}"]


def _move_to(scratch: Path) -> None:
    """Work in a folder of one's own; what is printed is dropped: thousands of completions a step would bury a log."""
    os.chdir(scratch)
    os.environ["TMPDIR"] = tempfile.tempdir = str(scratch)
    nowhere = os.open(os.devnull, os.O_RDWR)
    for standard in (0, 1, 2):
        os.dup2(nowhere, standard)


def _die_with_parent() -> None:
    """A worker whose template was killed would wait for nobody, or hang on."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _messages(channel: socket.socket) -> Iterator[bytes]:
    """Messages with their length before them, until the other side is gone."""
    while len(head := _read(channel, LENGTH.size)) == LENGTH.size:
        yield _read(channel, LENGTH.unpack(head)[0])


def _read(channel: socket.socket, count: int) -> bytes:
    parts = bytearray()
    while len(parts) < count and (part := channel.recv(min(count - len(parts), 1 << 20))):
        parts += part
    return bytes(parts)


def _say(control: socket.socket, answer: Any) -> None:
    control.sendall(json.dumps(answer).encode() + b"\n")


def outcome_of(line: bytes, count: int) -> float | Failure:
    """What a worker's answer number `count` says.

    Raises:
        ValueError, TypeError: it is no such answer: the function wrote into the channel.
    """
    number, *answer = json.loads(line)
    if number != count:
        raise ValueError(f"answer {number} where {count} was due")
    if len(answer) == 2:
        return Failure(KINDS[KINDS.index(answer[0])], str(answer[1]))
    (value,) = answer
    if not abs(value) <= LARGEST:
        raise ValueError(f"{value} is no reward")
    return float(value)
