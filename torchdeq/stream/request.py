"""What enters a stream and what leaves it: requests, results and how a request ended."""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from torchdeq.pytree import State
from torchdeq.stopping import Status, StopRule


class StreamStatus(IntEnum):
    """How a request ended. The first five are those of `Status`, with the same numbers."""

    CONVERGED = 0
    MAX_ITER = 1
    STALLED = 2
    DIVERGED = 3
    NONFINITE = 4
    HALTED = 5
    TIME_LIMIT = 6
    FAILED = 7

    @property
    def sentence(self) -> str:
        """Return what the status means, as a sentence."""
        return _SENTENCES.get(self) or Status(self).sentence

    @property
    def failed(self) -> bool:
        """Return whether the state of the result is unreliable, or missing."""
        return self not in (StreamStatus.CONVERGED, StreamStatus.STALLED, StreamStatus.HALTED)


_SENTENCES = {
    StreamStatus.HALTED: "the halting rule of the caller ended the request",
    StreamStatus.TIME_LIMIT: "the time limit of the request passed; its state so far is kept",
    StreamStatus.FAILED: "an error ended the request; the result carries it",
}

#: Endings after which a request starts again from another point, if the stream has restarts.
UNSOLVED = (StreamStatus.MAX_ITER, StreamStatus.DIVERGED, StreamStatus.NONFINITE)


class StreamClosed(RuntimeError):
    """The error of a request that a closed stream did not finish, or does not accept."""


class StreamFull(RuntimeError):
    """The error of a request for which the queue of a stream had no room in time."""


@dataclass(frozen=True, eq=False)
class Request:
    """One sample to solve. No tensor of a request has a batch dimension.

    Args:
        z0: the start: a tensor, or a tuple, list or dict of tensors.
        args: further arguments of `f` for this sample: tensors, in tuples, lists and dicts.
        id: whatever tells the caller which request a result belongs to.
        stop: a stop rule of its own; None for that of the stream.
        time_limit: seconds from the moment at which the stream accepts the request; None for the
            limit of the stream.
    """

    z0: State
    args: tuple[Any, ...] = ()
    id: Any = None
    stop: StopRule | None = None
    time_limit: float | None = None


@dataclass(frozen=True, eq=False)
class Result:
    """What became of a request.

    Args:
        id: that of the request.
        status: how the request ended.
        z: the state, in the structure of the start and without a batch dimension; None for a
            request that failed.
        residual: $|f(z) - z|$ at the returned state, in the norm of the stop rule; infinity if `f`
            was not evaluated or gave no finite value.
        relative: this divided by $|f(z)|$.
        evaluations: evaluations of `f` for this request, of all attempts.
        steps: evaluations up to the returned state, in its attempt.
        aux: with `has_aux`, what `f` returned beside the state, for this sample.
        attempts: starts that were tried.
        error: the error that ended a request that failed.
        seconds: time from the acceptance of the request to its end.
    """

    id: Any
    status: StreamStatus
    z: State = None
    residual: float = float("inf")
    relative: float = float("inf")
    evaluations: int = 0
    steps: int = 0
    aux: Any = None
    attempts: int = 1
    error: Exception | None = None
    seconds: float = 0.0
