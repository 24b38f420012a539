"""Which process, on which machine: for locks and for processes that work together."""

from __future__ import annotations

import os
import socket
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessId:
    """A process that others can look for.

    Args:
        host: name of the machine.
        space: the space in which `pid` counts: containers on one machine have their own.
        pid: number of the process.
        started: when it started, in ticks of the machine: numbers of processes are used again.
    """

    host: str
    space: str
    pid: int
    started: str

    @classmethod
    def own(cls) -> ProcessId:
        """Return the id of this process."""
        return cls(socket.gethostname(), _pid_space(), os.getpid(), _start_of(os.getpid()) or "")

    def is_alive(self) -> bool | None:
        """Return whether the process runs; None if it is on another machine."""
        if (self.host, self.space) != (socket.gethostname(), _pid_space()):
            return None
        if Path("/proc/self/stat").exists():
            return _start_of(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except OSError:  # it exists and belongs to somebody else
            return True
        return True


def _pid_space() -> str:
    with suppress(OSError):
        return os.readlink("/proc/self/ns/pid")
    return ""


def _start_of(pid: int) -> str | None:
    """Return when a process started; None if it has ended, also if nobody has waited for it."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces
    return None if fields[0] in "ZX" else fields[19]
