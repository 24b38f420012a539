"""The limits of a server, and the answer to a request that it refuses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

RETRY_AFTER = 1  # seconds: a place is free again when the next solve ends


@dataclass(frozen=True, kw_only=True)
class Limits:
    """The limits of a server.

    Args:
        slots: requests that are solved at the same time, where a stream solves them.
        queue: requests that may wait beyond those that are solved.
        max_bytes: size of the body of a request.
        max_pixels: size of an image, read from its header before it is decoded.
        time_limit: seconds for a request, its upload included.
    """

    slots: int = 32
    queue: int = 64
    max_bytes: int = 10_000_000
    max_pixels: int = 25_000_000
    time_limit: float = 30.0


class Refusal(Exception):
    """A request without a result.

    Args:
        status: of HTTP.
        message: what is wrong, and what to do.
    """

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def headers(self) -> dict[str, str]:
        """Return the headers of the answer."""
        return {"Retry-After": str(RETRY_AFTER)} if self.status == 503 else {}


def refuse_size(limits: Limits) -> NoReturn:
    """Refuse a request with too large a body."""
    raise Refusal(413, f"the request is larger than {limits.max_bytes} bytes, the limit here")
