"""Requests from several threads: futures, back-pressure, cancelling, closing."""

from __future__ import annotations

import threading
import time
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdeq import Anderson, FixedPointIter, StopRule, solve
from torchdeq.stream import Request, Result, Stream, StreamClosed, StreamFull, StreamStatus

STOP = StopRule(100, 1e-9)
WAIT = 60.0  # seconds after which a test fails instead of hanging


def f(z: Tensor, x: Tensor) -> Tensor:
    return torch.tanh(0.8 * z + x)


def request(i: int, **options: Any) -> Request:
    x = torch.full((3,), i / 50, dtype=torch.float64)
    return Request(torch.zeros_like(x), (x,), i, **options)


def test_many_threads_get_the_answers_to_their_own_requests() -> None:
    with Stream(f, slots=5, solver=Anderson(), stop=STOP, ahead=7) as stream:

        def client(first: int) -> list[Result]:
            futures = [stream.submit(request(i)) for i in range(first, first + 20)]
            return [future.result(WAIT) for future in futures]

        with ThreadPoolExecutor(6) as pool:
            answers = list(pool.map(client, range(0, 120, 20)))
    for k, results in enumerate(answers):
        assert [r.id for r in results] == list(range(20 * k, 20 * k + 20))
        for r in results:
            x = request(r.id).args[0][None]
            one = solve(f, torch.zeros_like(x), Anderson(), STOP, args=(x,))
            torch.testing.assert_close(r.z, one.z[0], atol=1e-12, rtol=0)
            assert r.status is StreamStatus.CONVERGED
    assert stream.counts.finished == 120
    assert (stream.waiting, stream.busy) == (0, 0)


class Gate:
    """A map that waits at each call until the gate is open."""

    def __init__(self) -> None:
        self.open = threading.Event()
        self.reached = threading.Event()

    def __call__(self, z: Tensor) -> Tensor:
        self.reached.set()
        assert self.open.wait(WAIT)
        return 0.5 * z


def test_a_full_queue_makes_the_sender_wait_and_then_says_so() -> None:
    gate = Gate()
    with Stream(gate, slots=1, ahead=2, stop=STOP) as stream:
        futures = [stream.submit(Request(torch.ones(1), (), 0))]
        assert gate.reached.wait(WAIT)
        futures += [stream.submit(Request(torch.ones(1), (), i)) for i in (1, 2)]
        assert stream.waiting == 2
        with pytest.raises(StreamFull, match="2 requests already wait"):
            stream.submit(Request(torch.ones(1)), timeout=0.0)
        begin = time.monotonic()
        with pytest.raises(StreamFull):
            stream.submit(Request(torch.ones(1)), timeout=0.05)
        assert time.monotonic() - begin >= 0.05
        waiter = ThreadPoolExecutor(1)
        late = waiter.submit(stream.submit, Request(torch.ones(1), (), 3), WAIT)
        gate.open.set()
        futures.append(late.result(WAIT))
        assert [future.result(WAIT).id for future in futures] == [0, 1, 2, 3]
        waiter.shutdown()


def test_closing_finishes_what_was_accepted_and_accepts_nothing_more() -> None:
    stream = Stream(f, slots=2, stop=STOP)
    futures = [stream.submit(request(i)) for i in range(8)]
    stream.close()
    assert [future.result(0).id for future in futures] == list(range(8))
    with pytest.raises(StreamClosed, match="accepts no further"):
        stream.submit(request(9))
    with pytest.raises(StreamClosed):
        stream.run([])
    with pytest.raises(StreamClosed):
        stream.solve(torch.zeros(1, 3), (torch.zeros(1, 3),))
    stream.close()


def test_closing_without_draining_ends_requests_with_an_error() -> None:
    gate = Gate()
    stream = Stream(gate, slots=1, stop=STOP)
    futures = [stream.submit(Request(torch.ones(1), (), i)) for i in range(4)]
    assert gate.reached.wait(WAIT)
    closer = threading.Thread(target=stream.close, args=(False, WAIT))
    closer.start()
    gate.open.set()
    closer.join(WAIT)
    for future in futures:
        with pytest.raises(StreamClosed):
            future.result(WAIT)


def test_nobody_waits_for_ever_for_a_map_that_hangs() -> None:
    gate = Gate()
    stream = Stream(gate, slots=1, stop=STOP)
    future = stream.submit(Request(torch.ones(1)))
    assert gate.reached.wait(WAIT)
    stream.close(timeout=0.05)
    with pytest.raises(StreamClosed, match="did not finish within"):
        future.result(WAIT)
    gate.open.set()


def test_an_error_in_a_with_block_does_not_wait_for_the_rest() -> None:
    futures: list[Future[Result]] = []
    stream = Stream(f, slots=1, stop=STOP)
    with suppress(ZeroDivisionError), stream:
        futures = [stream.submit(request(i)) for i in range(50)]
        raise ZeroDivisionError
    assert all(future.done() for future in futures)


def test_a_cancelled_request_frees_its_slot() -> None:
    gate = Gate()
    endless = StopRule(10**9, None)
    with Stream(gate, slots=1, solver=FixedPointIter(), stop=STOP) as stream:
        running = stream.submit(Request(torch.ones(1), (), "running", endless))
        assert gate.reached.wait(WAIT)
        waiting = stream.submit(Request(torch.ones(1), (), "waiting", endless))
        last = stream.submit(Request(torch.ones(1), (), "last"))
        assert waiting.cancel()
        gate.open.set()
        assert running.cancel()
        assert last.result(WAIT).id == "last"
        with pytest.raises(CancelledError):
            running.result(0)


def test_failing_requests_come_back_as_results() -> None:
    with Stream(f, slots=2, stop=STOP, example=request(0)) as stream:
        bad = stream.submit(Request(torch.zeros(7), (), "bad")).result(WAIT)
        good = stream.submit(request(1)).result(WAIT)
    assert bad.status is StreamStatus.FAILED
    assert isinstance(bad.error, (TypeError, ValueError))
    assert good.status is StreamStatus.CONVERGED


def test_an_interrupted_thread_fails_its_requests_and_closes_the_stream() -> None:
    def interrupted(z: Tensor) -> Tensor:
        raise SystemExit

    stream = Stream(interrupted, slots=1)
    future = stream.submit(Request(torch.ones(1)))
    with pytest.raises(SystemExit):
        future.result(WAIT)
    with pytest.raises(StreamClosed):
        stream.submit(Request(torch.ones(1)))
    stream.close()


def test_a_callback_of_a_future_may_submit_and_close() -> None:
    seen: list[Any] = []
    attached, done = threading.Event(), threading.Event()

    def gated(z: Tensor, x: Tensor) -> Tensor:
        attached.wait(WAIT)
        return f(z, x)

    def callback(future: Any) -> None:
        try:
            seen.append(stream.submit(request(1)))
            stream.submit(request(2))
        except StreamFull as error:  # at once: the thread that would make room is this one
            seen.append(error)
        stream.close()
        done.set()

    stream = Stream(gated, slots=1, stop=STOP, ahead=1)
    begin = time.monotonic()
    stream.submit(request(0)).add_done_callback(callback)
    attached.set()
    assert done.wait(WAIT)
    assert time.monotonic() - begin < 20
    assert isinstance(seen[1], StreamFull)
    assert seen[0].result(WAIT).status is StreamStatus.CONVERGED


def test_the_thread_ends_when_idle_and_starts_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("torchdeq.stream.worker._IDLE", 0.01)

    def threads() -> list[threading.Thread]:
        return [t for t in threading.enumerate() if t.name == "torchdeq-stream"]

    before = len(threads())
    with Stream(f, slots=2, stop=STOP) as stream:
        for i in range(4):
            assert stream.submit(request(i)).result(WAIT).id == i
            for _ in range(500):
                if len(threads()) == before:
                    break
                time.sleep(0.01)
            assert len(threads()) == before


def test_the_autocast_mode_of_the_caller_holds_in_the_thread() -> None:
    seen: list[torch.dtype] = []

    def cell(z: Tensor) -> Tensor:
        out = z @ torch.eye(2) * 0.5
        seen.append(out.dtype)
        return out

    with torch.autocast("cpu", torch.bfloat16):
        stream = Stream(cell, slots=1, stop=StopRule(3))
    with stream:
        result = stream.submit(Request(torch.ones(2))).result(WAIT)
    assert set(seen) == {torch.bfloat16}
    assert result.z.dtype == torch.float32
