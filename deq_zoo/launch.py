"""Several local processes of one training, for `deq-zoo train NAME --launch N`.

The processes find each other at a free port of this machine. What process 0 prints is passed on;
the others are quiet, and the end of what one of them wrote is shown if it fails. Their own watch
(`deq_zoo.peer_watch`) ends all of them soon after the loss of one. This module only makes sure.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import FrameType

from deq_zoo.errors import ZooError
from deq_zoo.signals import handling

_LOOK = 0.1  # seconds between two looks at the processes
_PATIENCE = 12.0  # seconds that the others have to end by themselves when one has failed
_LAST_WORDS = 5.0  # seconds from SIGTERM to SIGKILL
_SHOWN = 20  # lines of a failed process
_LAUNCHED = ("TORCHELASTIC_RUN_ID", "WORLD_SIZE", "PMI_SIZE", "OMPI_COMM_WORLD_SIZE")


def launch(arguments: Sequence[str], count: int) -> int:
    """Run `deq-zoo` in several processes of one run; return the exit code.

    It is 0, or that of the first process that fails. Ctrl-C and SIGTERM reach all processes, which
    end after the current step with a checkpoint.

    Args:
        arguments: of `deq-zoo`, without `--launch`.
        count: how many processes; see `check_launch`.
    """
    with tempfile.TemporaryDirectory(prefix="deq-zoo-") as folder:
        group = _Group(arguments, count, Path(folder))

        def pass_on(number: int, frame: FrameType | None) -> None:
            group.send(number)

        with handling(pass_on, signal.SIGINT, signal.SIGTERM):
            try:
                group.start()
                return group.wait()
            finally:
                group.kill()


def check_launch(count: int, cpu: bool, environment: Mapping[str, str]) -> None:
    """Raise `ZooError` if so many processes cannot be started from here."""
    found = next((name for name in _LAUNCHED if name in environment), None)
    if found is not None:
        raise ZooError(
            f"--launch starts processes, and a launcher has started this one already ({found} is "
            "set): drop --launch, or start deq-zoo without torchrun, mpirun or accelerate"
        )
    if not cpu:
        _check_devices(count)


def without_launch(words: Sequence[str]) -> list[str]:
    """Return the arguments of `deq-zoo` without `--launch N`."""
    kept, rest = [], iter(words)
    for word in rest:
        if word == "--launch":
            next(rest, None)
        elif not word.startswith("--launch="):
            kept.append(word)
    return kept


def _check_devices(count: int) -> None:
    import torch  # slow to import

    if torch.accelerator.is_available() and count > torch.accelerator.device_count():
        raise ZooError(
            f"--launch {count} needs as many devices, and this machine has "
            f"{torch.accelerator.device_count()}: start fewer, or use --cpu"
        )


class _Group:
    """The processes of one run.

    Args:
        arguments: of `deq-zoo`.
        count: how many processes.
        folder: for what processes other than 0 write.
    """

    def __init__(self, arguments: Sequence[str], count: int, folder: Path) -> None:
        self._command = [sys.executable, "-m", "deq_zoo", *arguments]
        self._count, self._folder = count, folder
        self._processes: list[subprocess.Popen[bytes]] = []
        self._signalled = False

    def start(self) -> None:
        """Start all processes."""
        common = _environment(self._count)
        for rank in range(self._count):
            own = {**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)}
            if rank == 0:
                process = subprocess.Popen(self._command, env=own)
            else:
                with self._errors(rank).open("wb") as errors:
                    process = subprocess.Popen(
                        self._command, env=own, stdout=subprocess.DEVNULL, stderr=errors
                    )
            self._processes.append(process)

    def wait(self) -> int:
        """Wait until all processes have ended; return the exit code of the first that failed."""
        while True:
            codes = [process.poll() for process in self._processes]
            failed = [rank for rank, code in enumerate(codes) if code]
            if failed:
                # One that was killed is the reason why others failed a moment later.
                first = min(failed, key=lambda rank: (codes[rank] or 0) >= 0)
                return self._end_others(first, codes[first] or 0)
            if all(code == 0 for code in codes):
                return 0
            time.sleep(_LOOK)

    def send(self, number: int) -> None:
        """Send a signal to all processes that run."""
        self._signalled = True
        for process in self._processes:
            if process.poll() is None:
                process.send_signal(number)

    def kill(self) -> None:
        """End all processes that run."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()

    def _end_others(self, rank: int, code: int) -> int:
        """Wait for the others, end those that do not, and say what has happened."""
        for patience, end in ((_PATIENCE, "terminate"), (_LAST_WORDS, "kill")):
            until = time.monotonic() + patience
            while self._running() and time.monotonic() < until:
                time.sleep(_LOOK)
            for process in self._running():
                getattr(process, end)()
        if not self._signalled:
            self._explain(rank, code)
        return code if code > 0 else 128 - code

    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes if process.poll() is None]

    def _explain(self, rank: int, code: int) -> None:
        """Print why the run has ended, unless process 0 has done so itself."""
        if code < 0:
            reason = f"was killed by signal {-code} ({signal.Signals(-code).name})"
        elif rank > 0:
            lines = self._errors(rank).read_text(errors="replace").splitlines()[-_SHOWN:]
            print("\n".join(lines), file=sys.stderr)
            reason = f"failed with exit code {code}"
        else:
            return
        print(
            f"deq-zoo: process {rank} of {self._count} {reason}; all others have ended, too",
            file=sys.stderr,
        )

    def _errors(self, rank: int) -> Path:
        return self._folder / f"{rank}.txt"


def _environment(count: int) -> dict[str, str]:
    """Return what all processes need to know; they meet on this machine alone."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    loopback = next((name for _, name in socket.if_nameindex() if name.startswith("lo")), None)
    settings = {
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(_free_port()),
        "WORLD_SIZE": str(count),
        "LOCAL_WORLD_SIZE": str(count),
    }
    defaults = {"OMP_NUM_THREADS": str(max(1, (cores or 1) // count))}
    if loopback is not None:
        defaults["GLOO_SOCKET_IFNAME"] = loopback
    return settings | {k: v for k, v in defaults.items() if k not in os.environ}


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])
