"""A watch over the other processes of a run: the loss of one ends all, with a message.

A collective operation raises an error when the connection to a peer is closed. The watch, a thread,
knows why, and notices a loss also while no collective operation runs, e.g. in a long evaluation.
Each process watches the next one. The first to notice a loss announces it in the store through
which the processes found each other, where all of them look.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import asdict
from datetime import timedelta
from itertools import count

import torch.distributed as dist
from torch.distributed.distributed_c10d import PrefixStore, Store

from deq_zoo.errors import ZooError
from deq_zoo.process_id import ProcessId

_PERIOD = 1.0  # seconds between two looks
_SILENCE = 25.0  # seconds without a sign of life after which a peer on another machine is lost
_GRACE = 5.0  # seconds that the main thread has to end by itself
_watches = count()  # all processes of a run count alike


class PeerWatch:
    """A thread that ends this process soon after another one of its run is lost.

    Args:
        rank: the number of this process.
        world: how many processes there are.
        explain: makes the whole message from the reason for the end.
    """

    def __init__(self, rank: int, world: int, explain: Callable[[str], str]) -> None:
        self.rank, self.world = rank, world
        self._explain = explain
        self._lost: str | None = None
        self._noticed, self._stop = threading.Event(), threading.Event()
        self._neighbour = (rank + 1) % world
        self._neighbours_id: ProcessId | None = None
        self._beat, self._heard = b"", time.monotonic()  # the neighbour's last sign of life
        self._store = _connect()
        self._thread = threading.Thread(target=self._watch, daemon=True)

    def start(self) -> None:
        """Start to watch."""
        if self._store is not None:
            self._store.set(f"process/{self.rank}", json.dumps(asdict(ProcessId.own())))
            self._thread.start()

    def stop(self) -> None:
        """Stop to watch, and let the process that watches this one know."""
        self._stop.set()
        if self._store is None:
            return
        self._thread.join(_GRACE)  # a thread inside the store must not outlive the interpreter
        if self._lost is None:
            with suppress(RuntimeError):  # the store is gone: so are those who would read
                self._store.set(f"done/{self.rank}", "")

    def announce(self, reason: str) -> None:
        """Let the other processes know why this one ends; the first reason counts."""
        if self._store is not None and self._lost is None:
            text = f"process {self.rank} of {self.world} failed: {reason}"
            with suppress(RuntimeError):
                self._store.compare_set("failure", "", text)

    def reason(self, patience: float = 3.0) -> str | None:
        """Return why the run must end; wait a moment for the watch to notice."""
        self._noticed.wait(patience if self._store is not None else 0)
        return self._lost

    def _watch(self) -> None:
        assert self._store is not None
        while not self._stop.wait(_PERIOD):
            try:
                self._lost = self._look(self._store)
            except RuntimeError:
                self._lost = "the process that coordinates the run is gone"
            if self._lost is not None:
                self._noticed.set()
                if not self._stop.wait(_GRACE):
                    print(f"deq-zoo: {self._explain(self._lost)}", file=sys.stderr, flush=True)
                    os._exit(2)  # the main thread may wait in a call that cannot be interrupted
                return

    def _look(self, store: Store) -> str | None:
        """Give a sign of life, and look for others'; return why the run must end, if it must."""
        if self._neighbour == 0 and self._is_dead() and "TORCHELASTIC_RUN_ID" not in os.environ:
            return self._describe_loss()  # with it, the store
        store.set(f"beat/{self.rank}", str(time.monotonic()))
        if store.check(["failure"]):
            return store.get("failure").decode()
        if store.check([f"done/{self._neighbour}"]):
            return None
        if self._neighbours_id is None and store.check([f"process/{self._neighbour}"]):
            self._neighbours_id = ProcessId(**json.loads(store.get(f"process/{self._neighbour}")))
        if not self._is_dead() and not self._is_silent(store):
            return None
        store.compare_set("failure", "", self._describe_loss())
        return self._describe_loss()

    def _is_dead(self) -> bool:
        return self._neighbours_id is not None and self._neighbours_id.is_alive() is False

    def _is_silent(self, store: Store) -> bool:
        """Return whether a neighbour on another machine has given no sign of life for long."""
        key, now = f"beat/{self._neighbour}", time.monotonic()
        beat = store.get(key) if store.check([key]) else b""
        if beat != self._beat:
            self._beat, self._heard = beat, now
        here = self._neighbours_id is not None and self._neighbours_id.is_alive()
        return not here and now - self._heard > _SILENCE

    def _describe_loss(self) -> str:
        process = self._neighbours_id
        where = "" if process is None else f" (process id {process.pid} on {process.host})"
        return (
            f"process {self._neighbour} of {self.world}{where} is gone: it was killed, e.g. for "
            "want of memory, or its machine failed"
        )


def _connect() -> Store | None:
    """Return the store of the run's processes by a connection of its own; None without a store."""
    host, port = os.environ.get("MASTER_ADDR"), os.environ.get("MASTER_PORT")
    if not host or not port:
        return None
    try:
        store = dist.TCPStore(  # type: ignore[attr-defined]
            host, int(port), is_master=False, timeout=timedelta(seconds=30)
        )
    except (RuntimeError, ValueError) as error:
        raise ZooError(f"the run's processes cannot meet at {host}:{port}: {error}") from None
    attempt = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"deq_zoo/{attempt}/{next(_watches)}", store)
