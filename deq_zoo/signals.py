"""Ctrl-C and SIGTERM: collected until a training step ends, or handled by a function."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType

_REPEATED = 1.0  # seconds within which a launcher passes on a signal that came to all processes
_ANSWER = b"\ndeq-zoo: stopping after this step, with a checkpoint; another Ctrl-C stops at once\n"


@contextmanager
def interruptible(quiet: bool = False) -> Iterator[list[int]]:
    """Collect Ctrl-C and SIGTERM within a block; a second Ctrl-C interrupts at once.

    Args:
        quiet: do not answer the first one, on stderr.
    """
    received: list[int] = []
    first = 0.0

    def note(number: int, frame: FrameType | None) -> None:
        nonlocal first
        if not received:
            received.append(number)
            first = time.monotonic()
            if not quiet:
                os.write(2, _ANSWER)  # a handler may have interrupted a print
        elif number == signal.SIGINT and time.monotonic() - first > _REPEATED:
            raise KeyboardInterrupt

    with handling(note, signal.SIGINT, signal.SIGTERM):
        yield received


@contextmanager
def handling(
    handler: Callable[[int, FrameType | None], object], *numbers: signal.Signals
) -> Iterator[None]:
    """Handle signals by a function within a block; only the main thread can."""
    try:
        former = {number: signal.signal(number, handler) for number in numbers}
    except ValueError:  # signals arrive in the main thread, and this is another
        yield
        return
    try:
        yield
    finally:
        for number, each in former.items():
            signal.signal(number, each)
