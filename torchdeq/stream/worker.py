"""The thread behind `Stream.submit`: it runs the slots while there are requests."""

from __future__ import annotations

from concurrent.futures import Future, InvalidStateError
from threading import Condition, Thread, current_thread
from time import monotonic

from torchdeq.stream.jobs import Job, Jobs
from torchdeq.stream.request import Request, Result, StreamClosed, StreamFull

_IDLE = 5.0  # seconds without a request after which the thread ends; the next one starts it again


class Worker:
    """Requests from several threads, served by one thread that this class starts and ends.

    Args:
        jobs: the requests on their way.
        ahead: requests that may wait for a slot.
    """

    def __init__(self, jobs: Jobs, ahead: int) -> None:
        self._jobs, self._ahead = jobs, ahead
        self._changed = Condition()
        self._thread: Thread | None = None
        self._futures: dict[Job, Future[Result]] = {}
        self._cancelled: list[Job] = []
        self._closed = self._abort = False

    @property
    def waiting(self) -> int:
        """Return the number of requests that wait for a slot."""
        return self._jobs.waiting

    @property
    def busy(self) -> int:
        """Return the number of requests in slots."""
        return self._jobs.busy

    def submit(self, request: Request, timeout: float) -> Future[Result]:
        """Accept a request; raise `StreamFull` if the queue has no room within the timeout."""
        if self._is_current:  # in a callback of a future: nobody else makes room
            timeout = 0.0
        end = monotonic() + timeout
        future: Future[Result] = Future()
        with self._changed:
            while self._jobs.waiting >= self._ahead and not self._closed:
                left = end - monotonic()
                if left <= 0:
                    raise StreamFull(
                        f"{self._ahead} requests already wait for a slot, and none of them entered "
                        f"within {timeout:g} s: submit later, or allow more with ahead="
                    )
                self._changed.wait(left)
            if self._closed:
                raise StreamClosed("the stream is closed: it accepts no further requests")
            job = self._jobs.accept(request)
            self._futures[job] = future
            if self._thread is None:
                self._thread = Thread(target=self._run, name="torchdeq-stream", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        future.add_done_callback(lambda f: self._cancel(job) if f.cancelled() else None)
        return future

    def close(self, drain: bool, timeout: float) -> None:
        """Accept nothing more; finish the accepted requests, or end them with an error."""
        with self._changed:
            self._closed, self._abort = True, self._abort or not drain
            thread = self._thread
            self._changed.notify_all()
        if thread is not None and not self._is_current:
            thread.join(timeout)
            if thread.is_alive():  # f takes too long, or hangs: nobody may wait for it for ever
                self._fail_all(
                    StreamClosed(f"the stream was closed and did not finish within {timeout:g} s")
                )

    @property
    def _is_current(self) -> bool:
        """Return whether the caller is the thread that this class started."""
        return self._thread is current_thread()

    def _cancel(self, job: Job) -> None:
        with self._changed:
            self._cancelled.append(job)
            self._changed.notify_all()

    def _run(self) -> None:
        """Serve requests until the stream is closed, or has been idle for a while."""
        try:
            while self._wait_for_work():
                for job, result in self._jobs.advance():
                    self._answer(job, result)
        except BaseException as error:
            with self._changed:
                self._closed = True
            self._fail_all(error)  # whoever waits for a result gets it
        finally:
            with self._changed:
                self._changed.notify_all()

    def _wait_for_work(self) -> bool:
        """Return whether there are requests to serve; wait for them for a while."""
        with self._changed:
            cancelled, self._cancelled = self._cancelled, []
            self._jobs.drop(cancelled)
            for job in cancelled:
                self._futures.pop(job, None)
            end = monotonic() + _IDLE
            while not (self._jobs.waiting or self._jobs.busy or self._closed):
                if not self._changed.wait(max(0.0, end - monotonic())) and monotonic() >= end:
                    break
            work = bool(self._jobs.waiting or self._jobs.busy) and not self._abort
            if not work:
                self._thread = None
            self._changed.notify_all()
        if self._abort:
            self._fail_all(StreamClosed("the stream was closed before this request was solved"))
        return work

    def _answer(self, job: Job, result: Result) -> None:
        """Give a result to whoever waits for it."""
        with self._changed:
            future = self._futures.pop(job, None)
            self._changed.notify_all()
        if future is not None:
            _resolve(future, result)

    def _fail_all(self, error: BaseException) -> None:
        with self._changed:
            futures = list(self._futures.values())
            self._futures.clear()
        for future in futures:
            _resolve(future, error)


def _resolve(future: Future[Result], outcome: Result | BaseException) -> None:
    """Set the outcome of a future, unless the caller has cancelled it."""
    try:
        if isinstance(outcome, BaseException):
            future.set_exception(outcome)
        else:
            future.set_result(outcome)
    except InvalidStateError:
        pass
