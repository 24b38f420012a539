"""Requests on their way through the pool: time limits, restarts, errors, and the final result."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field, replace
from itertools import count
from math import inf
from threading import Lock
from time import monotonic
from typing import Any

from torchdeq.pytree import State
from torchdeq.stopping import StopRule
from torchdeq.stream.layout import Layout, Rows, join_rows
from torchdeq.stream.pool import Finished, Pool
from torchdeq.stream.request import UNSOLVED, Request, Result, StreamStatus
from torchdeq.stream.retry import Retry, choose_result
from torchdeq.stream.rule import Counts, Rule
from torchdeq.stream.verdict import Ending


@dataclass(eq=False)
class Job:
    """A request in a stream."""

    ticket: int
    request: Any
    accepted: float  # on the clock of the stream
    deadline: float = inf
    rows: Rows | None = None  # the packed sample of the next attempt
    rule: StopRule = field(default_factory=StopRule)
    attempts: int = 0
    evaluations: int = 0
    results: list[Result] = field(default_factory=list)  # of attempts that did not converge


class Jobs:
    """All requests of a stream that have been accepted and have no result yet.

    Args:
        rule: what to do with every sample.
        retry: what to do with those that end without convergence.
        time_limit: seconds for each request; None for no limit.
        layout: of the samples; None to take that of the first good request.
        counts: to add to.
    """

    def __init__(
        self,
        rule: Rule,
        retry: Retry,
        time_limit: float | None,
        layout: Layout | None,
        counts: Counts,
    ) -> None:
        self._rule, self._retry, self._time_limit = rule, retry, time_limit
        self._layout, self._counts = layout, counts
        self._pool: Pool | None = None
        self._numbers = count()
        self._waiting: deque[Job] = deque()
        self._lock = Lock()  # of `_waiting`, to which other threads add
        self._timed = False  # whether a request has had a time limit
        self._running: dict[int, Job] = {}
        self._again: list[Job] = []  # to start again from another point

    @property
    def waiting(self) -> int:
        """Return the number of requests that have not entered a slot yet."""
        return len(self._waiting)

    @property
    def busy(self) -> int:
        """Return the number of requests in slots, or about to be there again."""
        return len(self._running) + len(self._again)

    def accept(self, request: Any) -> Job:
        """Return the job of a request, which waits from now on. Other threads may call this."""
        job = Job(next(self._numbers), request, monotonic())
        limit = getattr(request, "time_limit", None)
        limit = self._time_limit if limit is None else limit
        if isinstance(limit, (int, float)) and limit > 0:  # a bad limit is an error of its request
            job.deadline, self._timed = job.accepted + limit, True
        with self._lock:
            self._waiting.append(job)
        return job

    def advance(self) -> list[tuple[Job, Result]]:
        """Let waiting requests enter, evaluate `f` until the next check; return what has ended."""
        results = self._fill()
        if self._pool is not None and self._running:
            for job, attempt in self._attempts(self._pool.tick(self._expired())):
                results += self._settle(job, attempt)
        return results

    def _expired(self) -> list[int]:
        """Return the tickets of requests in slots whose time is over."""
        if not self._timed:
            return []
        now = monotonic()
        return [ticket for ticket, job in self._running.items() if job.deadline <= now]

    def drop(self, jobs: list[Job]) -> None:
        """Remove requests without a result."""
        tickets = {job.ticket for job in jobs}
        with self._lock:
            self._waiting = deque(job for job in self._waiting if job.ticket not in tickets)
        self._again = [job for job in self._again if job.ticket not in tickets]
        if self._pool is not None:
            self._pool.drop(tickets & set(self._running))
        for ticket in tickets:
            self._running.pop(ticket, None)

    def _fill(self) -> list[tuple[Job, Result]]:
        """Let requests enter free rows; return those that end without entering."""
        entering, self._again = self._again, []
        late = self._late(monotonic())
        results = [(job, self._return_start(job, StreamStatus.TIME_LIMIT)) for job in late]
        while len(self._running) + len(entering) < self._rule.slots:
            job = self._next()
            if job is None:
                break
            early = self._prepare(job)
            if early is None:
                entering.append(job)
            else:
                results.append((job, early))
        if entering:
            self._enter(entering)
        return results

    def _next(self) -> Job | None:
        """Return the request that has waited longest; None if none waits."""
        with self._lock:
            return self._waiting.popleft() if self._waiting else None

    def _late(self, now: float) -> list[Job]:
        """Remove and return requests whose time is over before they could enter."""
        if not self._timed:
            return []
        with self._lock:
            late = [job for job in self._waiting if job.deadline <= now]
            self._waiting = deque(job for job in self._waiting if job.deadline > now)
        return late

    def _prepare(self, job: Job) -> Result | None:
        """Pack a request; return its result if it ends here: an error or no budget."""
        request = job.request
        try:
            if not isinstance(request, Request):
                raise TypeError(
                    f"a stream takes Request(z0, args, ...), got {type(request).__name__}"
                )
            job.rule = self._own_rule(request)
            if request.time_limit is not None and not request.time_limit > 0:
                raise ValueError(f"time_limit must be None or > 0, got {request.time_limit}")
            layout = self._layout or Layout(request.z0, request.args)
            job.rows = layout.row(request.z0, request.args)
        except Exception as error:
            return self._failed(job, error)
        self._layout = layout
        return None if job.rule.max_iter else self._return_start(job, StreamStatus.MAX_ITER)

    def _own_rule(self, request: Request) -> StopRule:
        """Return the stop rule of a request; raise for one that the stream cannot honour."""
        rule, common = request.stop, self._rule.stop
        if rule is None:
            return common
        if not isinstance(rule, StopRule):
            raise TypeError(f"stop must be None or a StopRule, got {type(rule).__name__}")
        if rule.interval != common.interval:
            raise ValueError(
                f"check_every is the same for all requests of a stream: got {rule.check_every}, "
                f"expected {common.check_every}"
            )
        return rule

    def _enter(self, jobs: list[Job]) -> None:
        assert self._layout is not None
        if self._pool is None:
            self._pool = Pool(self._rule, self._layout, self._counts)
        rows = join_rows([job.rows for job in jobs if job.rows is not None])
        self._pool.enter([job.ticket for job in jobs], rows, [job.rule for job in jobs])
        for job in jobs:
            job.rows = None
            job.attempts += 1
            self._running[job.ticket] = job

    def _attempts(self, finished: Finished) -> list[tuple[Job, Result]]:
        """Return the results of attempts that have ended."""
        if not finished.tickets:
            return []
        assert self._layout is not None
        states, aux = self._layout.samples(finished.z), finished.split_aux()
        attempts = []
        for i, (ticket, ending) in enumerate(zip(finished.tickets, finished.endings, strict=True)):
            job = self._running.pop(ticket)
            job.evaluations += ending.evaluations
            attempts.append((job, _attempt(job, ending, states[i], aux[i] if aux else None)))
            if ticket in finished.errors:
                attempts[-1] = (job, self._failed(job, finished.errors[ticket]))
        return attempts

    def _settle(self, job: Job, attempt: Result) -> list[tuple[Job, Result]]:
        """Return the result of a request whose attempt has ended; none if it starts again."""
        retry = self._retry
        late = attempt.status is StreamStatus.TIME_LIMIT
        try:
            if attempt.status in UNSOLVED or late:
                job.results.append(attempt)
            if attempt.status in UNSOLVED and job.attempts <= retry.times:
                assert retry.start is not None
                assert self._layout is not None
                start = retry.start(job.request, job.attempts)
                job.rows = self._layout.row(start, job.request.args)
                self._again.append(job)
                return []
            if attempt.status in UNSOLVED or late:
                attempt = choose_result(job.results, retry.choose, job.rule)
                attempt = replace(attempt, status=StreamStatus.TIME_LIMIT) if late else attempt
        except Exception as error:
            attempt = self._failed(job, error)
        return [(job, self._with_totals(job, attempt))]

    def _return_start(self, job: Job, status: StreamStatus) -> Result:
        """Return the result of a request that ends before `f` is evaluated: its start."""
        request = job.request
        z0, name = getattr(request, "z0", None), getattr(request, "id", None)
        return self._with_totals(job, Result(name, status, z0))

    def _failed(self, job: Job, error: Exception) -> Result:
        """Return the result of a request that an error has ended."""
        name = getattr(job.request, "id", None)
        return self._with_totals(job, Result(name, StreamStatus.FAILED, error=error))

    def _with_totals(self, job: Job, result: Result) -> Result:
        """Return a result with the figures of the whole request."""
        return replace(
            result,
            evaluations=job.evaluations,
            attempts=job.attempts,
            seconds=monotonic() - job.accepted,
        )


def _attempt(job: Job, ending: Ending, z: State, aux: Any) -> Result:
    """Return the result of one attempt."""
    if not ending.steps:  # no finite residual: as `solve`, return the start
        z = job.request.z0
    return Result(
        job.request.id,
        StreamStatus(ending.status),
        z,
        ending.residual,
        ending.relative,
        steps=ending.steps,
        aux=aux if ending.steps else None,
    )
