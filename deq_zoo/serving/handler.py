"""One request to predict: its place, its time, and an answer whatever happens."""

from __future__ import annotations

import asyncio
import logging
import traceback
from collections.abc import Coroutine
from time import monotonic
from typing import Any

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response

from deq_zoo.errors import ZooError
from deq_zoo.log import as_json
from deq_zoo.serving.engine import Engine
from deq_zoo.serving.limits import Limits, Refusal, refuse_size
from deq_zoo.serving.metrics import Metrics
from deq_zoo.serving.reading import open_body
from deq_zoo.serving.service import Field

GONE = 499  # the client left before the answer
_DISCARD = 2.0  # seconds to read on after a refusal, else a sending client misses the answer
_log = logging.getLogger("deq_zoo")


class Handler:
    """Answers requests to predict, at most `places` at a time.

    A place is taken before the body is read, so memory is bounded by places times `max_bytes`.

    Args:
        engine: solves the requests.
        fields: that a request has.
        limits: of the server.
    """

    def __init__(self, engine: Engine, fields: tuple[Field, ...], limits: Limits) -> None:
        self.engine, self.fields, self.limits = engine, fields, limits
        self.metrics = Metrics()
        self.places = engine.slots + limits.queue
        self._inside = 0

    @property
    def waiting(self) -> int:
        """Return the number of requests with a place that are not being solved."""
        return max(0, self._inside - self.engine.busy)

    async def predict(self, request: Request) -> Response:
        """Return the response to a request, whatever it contains."""
        began = monotonic()
        try:
            answer = await self._take_place(request)
            seconds = monotonic() - began
            self.metrics.count_answer(answer, seconds)
            response = json_response(200, answer | {"seconds": seconds})
        except Refusal as refusal:
            response = json_response(refusal.status, {"error": str(refusal)}, refusal.headers)
        except (ZooError, ValueError, TypeError, OverflowError) as error:
            response = json_response(422, {"error": str(error)})
        except ClientDisconnect:
            response = Response(status_code=GONE)
        except Exception as error:
            _log_failure(error)
            response = json_response(500, {"error": "the server failed on this request"})
        self.metrics.responses[response.status_code] += 1
        return response

    async def _take_place(self, request: Request) -> dict[str, Any]:
        if self._inside >= self.places:
            await _discard(request, self.limits.max_bytes)
            raise Refusal(503, f"{self.places} requests are being served: try again later")
        self._inside += 1
        try:
            return await self._serve(request, asyncio.get_running_loop().time())
        finally:
            self._inside -= 1

    async def _serve(self, request: Request, began: float) -> dict[str, Any]:
        """Return the answer to a request within the time limit."""
        seconds = self.limits.time_limit
        try:
            async with asyncio.timeout_at(began + seconds):
                body = await _read_body(request, self.limits)
                read = await open_body(request.headers, body, self.fields, self.limits)
        except TimeoutError:
            raise Refusal(408, f"the request did not arrive within {seconds:g} s") from None
        del body
        self.metrics.accepted += 1
        try:
            async with asyncio.timeout_at(began + seconds):
                return await _unless_gone(request, self.engine.answer(read))
        except TimeoutError:
            raise Refusal(504, f"no answer within {seconds:g} s, the time limit here") from None


def json_response(
    status: int, values: dict[str, Any], headers: dict[str, str] | None = None
) -> Response:
    """Return values as a response; NaN and infinity become null."""
    return Response(as_json(values), status, headers, "application/json")


async def _read_body(request: Request, limits: Limits) -> bytes:
    """Return the body of a request; refuse a large one before it is in memory."""
    length = request.headers.get("content-length", "")
    if length.isdecimal() and int(length[:20]) > limits.max_bytes:
        await _discard(request, limits.max_bytes)
        refuse_size(limits)
    chunks, size, more = [], 0, True
    while more:
        message = await request.receive()
        if message["type"] == "http.disconnect":
            raise ClientDisconnect
        more = message.get("more_body", False)
        chunks.append(message.get("body", b""))
        size += len(chunks[-1])
        if size > limits.max_bytes:
            chunks.clear()
            if more:
                await _discard(request, limits.max_bytes)
            refuse_size(limits)
    return b"".join(chunks)


async def _discard(request: Request, most: int) -> None:
    """Read on and keep nothing, for a moment: closing at once could lose the answer."""
    try:
        async with asyncio.timeout(_DISCARD):
            while most > 0:
                message = await request.receive()
                most -= len(message.get("body", b""))
                if not message.get("more_body"):
                    return
    except TimeoutError:
        return


async def _unless_gone(
    request: Request, answer: Coroutine[Any, Any, dict[str, Any]]
) -> dict[str, Any]:
    """Return an answer; cancel the work and raise `ClientDisconnect` if the client leaves first."""
    work = asyncio.ensure_future(answer)
    gone = asyncio.ensure_future(_wait_until_gone(request))
    try:
        await asyncio.wait({work, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not work.done():
            raise ClientDisconnect
        return work.result()
    finally:
        for task in (work, gone):
            task.cancel()
        await asyncio.gather(work, gone, return_exceptions=True)


async def _wait_until_gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _log_failure(error: Exception) -> None:
    """Log where an error came from, without its message: that may contain the input."""
    cause = error.__cause__ or error
    frame = traceback.extract_tb(cause.__traceback__)[-1:]
    where = f" at {frame[0].filename}:{frame[0].lineno}" if frame else ""
    _log.error("a request failed: %s%s", type(cause).__name__, where)
