"""The lock of a run folder: one process writes to it.

The lock is a file that names its owner. An owner on this machine is looked up among the processes;
one on another machine renews the file's time, and counts as gone when the time is old.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path

from deq_zoo.errors import ZooError
from deq_zoo.process_id import ProcessId

_RENEWED = 20.0  # seconds between two renewals
_OLD = 300.0  # seconds after which an owner on another machine counts as gone


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """Hold a lock file within a block; raise `ZooError` if a living process holds it."""
    text = _acquire(path)
    stop = threading.Event()
    thread = threading.Thread(target=_renew, args=(path, stop), daemon=True)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()
        with suppress(OSError):
            if path.read_text() == text:
                path.unlink()


def _acquire(path: Path) -> str:
    """Write the lock file and return its content."""
    text = json.dumps({**asdict(ProcessId.own()), "since": time.time()})
    for _ in range(3):
        try:
            with path.open("x") as file:
                file.write(text)
            return text
        except FileExistsError:
            _remove_stale(path)
        except OSError as error:
            raise ZooError(f"cannot write to the run folder {path.parent}: {error}") from None
    raise ZooError(f"{path.parent} is locked by several processes in turn: try again later")


def _remove_stale(path: Path) -> None:
    """Remove a lock whose owner is gone; raise `ZooError` if it is not."""
    try:
        text, renewed = path.read_text(), path.stat().st_mtime
    except OSError:  # its owner has just removed it
        return
    owner = _read(text)
    alive = None if owner is None else owner.is_alive()
    if alive or (alive is None and time.time() - renewed < _OLD):
        raise ZooError(_refusal(path, owner, text))
    aside = path.with_name(f"{path.name}.{os.getpid()}")
    with suppress(OSError):
        path.rename(aside)
        if aside.read_text() != text:  # another process was faster, and this is its lock
            os.link(aside, path)
        aside.unlink()


def _read(text: str) -> ProcessId | None:
    try:
        data = json.loads(text)
        return ProcessId(data["host"], data["space"], int(data["pid"]), data["started"])
    except (ValueError, KeyError, TypeError):  # killed while it wrote the lock
        return None


def _refusal(path: Path, owner: ProcessId | None, text: str) -> str:
    if owner is None:
        return f"{path} was written a moment ago: another process starts a run in this folder"
    since = json.loads(text).get("since", 0)
    when = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(since))
    return (
        f"process {owner.pid} on {owner.host} has been training in {path.parent} since {when}: "
        "wait for it, stop it, or choose another folder with --out"
    )


def _renew(path: Path, stop: threading.Event) -> None:
    while not stop.wait(_RENEWED):
        with suppress(OSError):
            os.utime(path)
