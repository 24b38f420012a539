"""`Stream`: many samples through a fixed number of slots."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from concurrent.futures import Future
from threading import Lock
from types import TracebackType
from typing import Any, Self

import torch

from torchdeq.autocast import AutocastState
from torchdeq.checks import require, require_whole
from torchdeq.pytree import S
from torchdeq.solution import FixedPoint
from torchdeq.solver import Anderson, Solver, StopRule
from torchdeq.stream.batch import solve_batches
from torchdeq.stream.isolation import Halt
from torchdeq.stream.jobs import Jobs
from torchdeq.stream.layout import Layout
from torchdeq.stream.request import Request, Result, StreamClosed
from torchdeq.stream.retry import Choose, Restart, Retry
from torchdeq.stream.rule import Counts, Rule
from torchdeq.stream.worker import Worker


class Stream:
    r"""Fixed points of a stream of samples, solved in a fixed number of slots.

    Each evaluation of `f` takes all slots at once. A sample that has ended leaves its slot at once,
    and the next one enters there, with an empty memory of the solver. So every sample costs what it
    needs alone, and its answer is that of a solve of its own, whatever its neighbours are.

    There are three ways to use it: `run` takes requests from an iterator and yields results,
    `submit` takes them from any thread and returns futures, `solve` takes one large batch.

    `f` must treat samples independently of each other, depend on nothing but its arguments and what
    it closes over, and accept any batch size up to `slots`: idle slots leave the batch. If `f`
    raises, it is called again for every sample alone; those for which it raises again end with the
    error, and the others go on.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state, with the samples of
            all slots along the first dimension.
        slots: samples that are solved at the same time, at most.
        solver: `FixedPointIter`, `Anderson`, or `Broyden` without line search; Anderson
            acceleration if None.
        stop: budget and tolerance of each sample. With `check_every=n` the host looks at residuals
            after every n evaluations, and samples enter and leave only then.
        has_aux: `f` returns `(z, aux)`, every tensor of `aux` with the batch first. A result has
            the `aux` of the evaluation that gave its state.
        halt: `halt(z, aux)` returns for each sample whether it ends, as flags (b,), after each
            evaluation; `z` is the current answer of the solver, `aux` is None without `has_aux`.
            `stop` then defaults to 40 evaluations, no tolerance and the last state; a `stop` of
            the caller counts, too.
        restart: `restart(request, attempt)` returns another start for a request that ended without
            convergence, for `attempt` 1, 2, ...
        restarts: further attempts of a request, at most.
        choose: the result if no attempt converged: `"residual"` takes that with the lowest
            residual, as `stop` measures it; a function of a `Result` returns what this result votes
            for, such as a number or a tuple of numbers, and the most frequent vote wins.
        time_limit: seconds for each request, from its acceptance; None for no limit.
        ahead: requests that may wait: those of `submit` for a slot, and results of an ordered `run`
            for an earlier one. Four times `slots` if None.
        example: a `Request` whose structure, shapes, dtypes and device all others must have; the
            first one that holds tensors if None.
        eps: the machine epsilon of the precision in which `f` computes, if that is coarser than its
            dtype and autocast say.
    """

    def __init__(
        self,
        f: Any,
        *,
        slots: int = 64,
        solver: Solver[Any] | None = None,
        stop: StopRule | None = None,
        has_aux: bool = False,
        halt: Halt | None = None,
        restart: Restart | None = None,
        restarts: int = 0,
        choose: Choose = "residual",
        time_limit: float | None = None,
        ahead: int | None = None,
        example: Request | None = None,
        eps: float | None = None,
    ) -> None:
        solver = Anderson() if solver is None else solver
        if stop is None:
            stop = StopRule() if halt is None else StopRule(tol=None, return_final=True)
        _check_parts(f, solver, stop, halt)
        require_whole("slots", slots)
        require_whole("restarts", restarts, 0)
        require_whole("ahead, unless it is None,", 1 if ahead is None else ahead)
        require(time_limit is None or time_limit > 0, "time_limit must be None or > 0", time_limit)
        if bool(restarts) != (restart is not None):
            raise ValueError(
                f"restart and restarts go together, got restarts={restarts} and restart={restart}: "
                "give the number of further attempts and the function that returns their starts"
            )
        if not (choose == "residual" or callable(choose)):
            raise ValueError(f"choose must be 'residual' or a function of a Result, got {choose!r}")
        self._rule = Rule(f, solver, stop, slots, has_aux, halt, eps, _autocast_now())
        self._retry, self._time_limit = Retry(restarts, restart, choose), time_limit
        self._ahead = 4 * slots if ahead is None else ahead
        self._layout = None if example is None else Layout(example.z0, example.args)
        self.counts = Counts()
        self._lock, self._closed = Lock(), False
        self._worker: Worker | None = None  # serves `submit`

    def run(self, requests: Iterable[Request], *, ordered: bool = False) -> Iterator[Result]:
        """Yield the result of every request, as they finish or in the order of the requests.

        The stream reads a request only when a slot is free, and evaluates `f` only while the caller
        waits for a result. So requests should be there without delay; if they come slowly, submit
        them from their own thread. An ordered run reads at most `ahead` requests beyond the
        one that it waits for. An error of the iterator itself is raised after the results of
        the requests that it gave before.
        """
        self._check_open()
        return self._run(iter(requests), self._ahead if ordered else None)

    def _run(self, requests: Iterator[Request], ahead: int | None) -> Iterator[Result]:
        jobs, error = self._jobs(), None
        done: dict[int, Result] = {}  # results of an ordered run that wait for an earlier one
        asked = given = 0
        more = True
        while True:
            while more and jobs.busy + jobs.waiting < self._rule.slots:
                if ahead is not None and asked - given >= self._rule.slots + ahead:
                    break
                try:
                    jobs.accept(next(requests))
                    asked += 1
                except StopIteration:
                    more = False
                except Exception as caught:
                    more, error = False, caught
            if not (jobs.busy or jobs.waiting):
                break
            for job, result in jobs.advance():
                if ahead is None:
                    given += 1
                    yield result
                else:
                    done[job.ticket] = result
            while given in done:
                given += 1
                yield done.pop(given - 1)
        if error is not None:
            raise error

    def submit(self, request: Request, timeout: float = 60.0) -> Future[Result]:
        """Return a future of the result of a request; any thread may call this.

        A request that fails gives a `Result` with its error, as in `run`. The future itself raises
        `StreamClosed` if the stream is closed before the request is solved. Cancelling a future
        frees its slot.

        Args:
            request: the sample.
            timeout: seconds to wait while `ahead` requests wait for a slot; then `StreamFull` is
                raised. 0 never waits.
        """
        self._check_open()
        with self._lock:
            if self._worker is None:
                self._worker = Worker(self._jobs(), self._ahead)
            worker = self._worker
        return worker.submit(request, timeout)

    def solve(
        self, z0: S, args: tuple[Any, ...] = (), *, on_failure: str = "warn"
    ) -> FixedPoint[S]:
        """Solve one batch of any size, as `torchdeq.solve` does, through the slots.

        Args:
            z0: the starts: a tensor, tuple, list or dict of tensors with the batch first.
            args: further arguments of `f`; every tensor has the batch first.
            on_failure: how to report samples that did not converge.

        Returns:
            The states, and statistics without traces: residuals, steps and status of every sample.
            `stats.nfe` is the largest number of evaluations of a sample. `aux` is a list with that
            of each sample.
        """
        (solution,) = self.solve_batches([(z0, args)], on_failure=on_failure)
        return solution

    def solve_batches(
        self, batches: Iterable[tuple[Any, tuple[Any, ...]]], *, on_failure: str = "warn"
    ) -> Iterator[FixedPoint[Any]]:
        """Solve batches one after the other, and yield what `solve` returns for each of them.

        The samples of the next batch enter while the last ones of a batch still run. A batch is
        read only when a slot is free, and not while `ahead` samples beyond the slots have been
        taken since the oldest unfinished batch. An error in `f` is raised.

        `restart` and `time_limit` belong to requests: a stream that has them refuses this call.
        """
        self._check_open()
        if self._retry.times or self._time_limit is not None:
            raise ValueError("batches have no requests to restart or to time: use run")
        return solve_batches(self._rule, self.counts, batches, self._ahead, on_failure)

    @property
    def waiting(self) -> int:
        """Return the number of submitted requests that wait for a slot."""
        return 0 if self._worker is None else self._worker.waiting

    @property
    def busy(self) -> int:
        """Return the number of submitted requests in slots."""
        return 0 if self._worker is None else self._worker.busy

    def close(self, drain: bool = True, timeout: float = 60.0) -> None:
        """Accept nothing more, and wait until the submitted requests are solved.

        Args:
            drain: False ends them with `StreamClosed` instead.
            timeout: seconds to wait; then requests without a result end with `StreamClosed`.
        """
        with self._lock:
            self._closed, worker = True, self._worker
        if worker is not None:
            worker.close(drain, timeout)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close(drain=error is None)

    def _check_open(self) -> None:
        if self._closed:
            raise StreamClosed("the stream is closed: it accepts no further requests")

    def _jobs(self) -> Jobs:
        return Jobs(self._rule, self._retry, self._time_limit, self._layout, self.counts)


def _check_parts(f: object, solver: object, stop: object, halt: object) -> None:
    """Raise for parts of the wrong kind, and for a solver whose samples cannot come and go."""
    if not callable(f):
        raise TypeError(f"f must be callable, got {type(f).__name__}")
    if not isinstance(solver, Solver):
        raise TypeError(f"solver must be a Solver such as Anderson(), got {solver!r}")
    if not solver.streams:
        raise ValueError(
            f"samples cannot enter and leave while {solver!r} runs: use FixedPointIter, Anderson, "
            "or Broyden without ls"
        )
    if not isinstance(stop, StopRule):
        raise TypeError(f"stop must be a StopRule such as StopRule(max_iter=40), got {stop!r}")
    if halt is not None and not callable(halt):
        raise TypeError(f"halt must be callable, got {type(halt).__name__}")


def _autocast_now() -> dict[str, AutocastState]:
    """Return the autocast mode in force, by kind of device: `f` runs in it in every thread."""
    kinds = {"cpu"}
    if torch.accelerator.is_available():
        device = torch.accelerator.current_accelerator()
        kinds.add("cpu" if device is None else device.type)
    return {kind: AutocastState(torch.device(kind)) for kind in kinds}
