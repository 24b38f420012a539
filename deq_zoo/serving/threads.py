"""Threads that an event loop waits for."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any, TypeVar

T = TypeVar("T")


class Threads:
    """A few threads. A call that is cancelled before it runs leaves the queue, with its arguments.

    A running call cannot be interrupted: its thread is busy until it ends.

    Args:
        count: of the threads.
    """

    def __init__(self, count: int) -> None:
        self._pool = ThreadPoolExecutor(count, thread_name_prefix="deq-zoo-serve")
        self._free = asyncio.Semaphore(count)
        self.running = 0

    async def run(self, call: Callable[[], T]) -> T:
        """Return the result of a call in one of the threads."""
        loop = asyncio.get_running_loop()
        await self._free.acquire()
        self.running += 1

        def ended(_: Future[Any]) -> None:
            with suppress(RuntimeError):  # the loop is closed: nobody waits any more
                loop.call_soon_threadsafe(self._release)

        future = self._pool.submit(call)
        future.add_done_callback(ended)
        return await asyncio.wrap_future(future)

    def _release(self) -> None:
        self.running -= 1
        self._free.release()

    def close(self) -> None:
        """Accept no more calls."""
        self._pool.shutdown(wait=False, cancel_futures=True)
