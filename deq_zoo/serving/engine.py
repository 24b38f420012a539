"""Engines: how a server solves the requests that it has accepted."""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from functools import partial
from typing import Any

import torch

from deq_zoo.serving.limits import Limits, Refusal
from deq_zoo.serving.service import Prepared, Service, Values
from deq_zoo.serving.threads import Threads
from torchdeq.stream import Result, Stream, StreamClosed, StreamFull

_READERS = 2  # threads that decode inputs and write answers of a stream

Read = Callable[[], Values]


class Engine(ABC):
    """What solves requests.

    Attributes:
        slots: requests that are solved at the same time, at most.
        threads: read the requests; those of a queue solve them, too.
    """

    slots: int
    threads: Threads

    @property
    @abstractmethod
    def busy(self) -> int:
        """Return the number of requests that are being solved."""

    @abstractmethod
    async def answer(self, read: Read) -> dict[str, Any]:
        """Return the answer to a request. Cancelling this frees the place of the request.

        Args:
            read: returns the values of the request; a thread calls it.
        """

    def close(self) -> bool:
        """End all work; return whether no thread is left that computes."""
        self.threads.close()
        return self.threads.running == 0


class StreamEngine(Engine):
    """Requests as rows of one batch, which enter and leave while the others go on.

    Args:
        service: of a model.
        stream: that of the service.
        slots: of the stream.
    """

    def __init__(self, service: Service[Any], stream: Stream, slots: int) -> None:
        self._service, self._stream, self.slots = service, stream, slots
        self.threads = Threads(_READERS)

    @property
    def busy(self) -> int:
        return self._stream.busy

    async def answer(self, read: Read) -> dict[str, Any]:
        prepared = await self.threads.run(partial(self._prepare, read))
        try:
            future = self._stream.submit(prepared.request, timeout=0)
            result = await asyncio.wrap_future(future)
        except (StreamFull, StreamClosed) as error:
            raise Refusal(503, str(error)) from None
        if result.error is not None:
            raise RuntimeError("f raised an error") from result.error
        return await self.threads.run(partial(self._finish, result, prepared.context))

    @torch.no_grad()
    def _prepare(self, read: Read) -> Prepared:
        return self._service.prepare(read())

    @torch.no_grad()
    def _finish(self, result: Result, context: Any) -> dict[str, Any]:
        return self._service.finish(result, context)

    def close(self) -> bool:
        self._stream.close(drain=False, timeout=5.0)
        return super().close()


class QueueEngine(Engine):
    """Requests one after the other, for models whose requests have solves of their own.

    Args:
        service: of a model.
    """

    slots = 1

    def __init__(self, service: Service[Any]) -> None:
        self._service, self.threads = service, Threads(1)

    @property
    def busy(self) -> int:
        return self.threads.running

    async def answer(self, read: Read) -> dict[str, Any]:
        return await self.threads.run(lambda: self._service.answer(read()))


def make_engine(service: Service[Any], limits: Limits) -> Engine:
    """Return a stream if one can solve the requests of a service, else a queue."""
    stream = service.open_stream(limits)
    if stream is None:
        return QueueEngine(service)
    return StreamEngine(service, stream, limits.slots)
