"""What a contained reward may use, as limits of the kernel on its process, and how their breach is told apart.

    wall time       the pool's clock: the process group is killed
    CPU time        RLIMIT_CPU, renewed for every completion: SIGXCPU
    memory          RLIMIT_AS over what the process maps when it starts: MemoryError, or whatever a library makes of it
    size of a file  RLIMIT_FSIZE: OSError EFBIG
    open files      RLIMIT_NOFILE: OSError EMFILE

They hold accidents, not attackers: a reward may still read what its user may, write small files by absolute path,
and use the network.
"""

from __future__ import annotations

import errno
import math
import os
import resource
import shutil
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

KINDS = ("timeout", "cpu", "memory", "files", "crash", "error", "value")
"""How a reward fails: wall time, CPU time, memory, files, its process died, it raised, it returned no finite number."""
UNREPEATED = {"timeout", "cpu", "error", "value"}
"""Failures that are the completion's own; others may be what earlier completions left behind in the process."""
_FILES = {errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOSPC, errno.EDQUOT}
_SIGNALS: dict[int, str] = {signal.SIGXCPU: "cpu", signal.SIGXFSZ: "files"}
_MIB = 1 << 20


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Of one completion: seconds of wall and CPU time, MiB of memory (0: none) and of each file, number of files."""

    timeout: float
    cpu_seconds: int
    memory_mb: int
    file_mb: int
    files: int

    def apply(self) -> None:
        """Limit this process, for good; CPU time is `allow_cpu`'s."""
        _limit(resource.RLIMIT_CORE, 0)
        _limit(resource.RLIMIT_FSIZE, self.file_mb * _MIB)
        _limit(resource.RLIMIT_NOFILE, len(os.listdir("/dev/fd")) + self.files)
        # Only Linux says how much is mapped, and only there the limit is enforced.
        if self.memory_mb and sys.platform == "linux":
            _limit(resource.RLIMIT_AS, _mapped() + self.memory_mb * _MIB)

    def allow_cpu(self) -> None:
        """`cpu_seconds` more from now on; the kernel counts whole seconds."""
        hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
        resource.setrlimit(resource.RLIMIT_CPU, (math.ceil(time.process_time()) + self.cpu_seconds, hard))

    def excess(self, folder: Path) -> str | None:
        """What is too much of the files left in `folder`, if anything is."""
        count = size = 0
        for place, folders, files in os.walk(folder):
            count += len(folders) + len(files)
            size += sum(os.lstat(os.path.join(place, name)).st_size for name in files)
        if count > self.files:
            return f"left {count} files, rewards.files is {self.files}"
        if size > self.file_mb * _MIB:
            return f"left {size} bytes in files, rewards.file_mb is {self.file_mb}"
        return None


def kind_of_error(error: BaseException) -> str:
    """Which limit an exception speaks of; "error" for any other."""
    if isinstance(error, MemoryError):
        return "memory"
    return "files" if isinstance(error, OSError) and error.errno in _FILES else "error"


def kind_of_end(status: int) -> str:
    """Which limit ended a process, from what `waitpid` says."""
    return _SIGNALS.get(os.WTERMSIG(status), "crash") if os.WIFSIGNALED(status) else "crash"


def name_of_end(status: int) -> str:
    """How a process ended, in words."""
    if os.WIFSIGNALED(status):
        return f"its process was ended by {signal.Signals(os.WTERMSIG(status)).name}"
    return f"its process ended with code {os.waitstatus_to_exitcode(status)}"


def wipe(folder: Path) -> None:
    """Empty a folder."""
    for entry in os.scandir(folder):
        if entry.is_dir(follow_symlinks=False):
            shutil.rmtree(entry.path, ignore_errors=True)
        else:
            os.unlink(entry.path)


def _limit(which: int, value: int) -> None:
    hard = resource.getrlimit(which)[1]
    value = value if hard == resource.RLIM_INFINITY else min(value, hard)
    resource.setrlimit(which, (value, value))


def _mapped() -> int:
    """Bytes of address space of this process."""
    return int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
