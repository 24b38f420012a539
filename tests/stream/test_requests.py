"""Requests that fail, the order and number of results, and options that a stream refuses."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.stream.samples import STOP, alone, f, request
from torchdeq import Anderson, Auto, Broyden, FixedPointIter, NewtonKrylov, StopRule, solve
from torchdeq.stream import Request, Result, Stream, StreamStatus


def check_good(results: list[Result], requests: list[Any]) -> None:
    """Check that every good request has the answer that it has alone."""
    good = {r.id: r for r in requests if isinstance(r, Request)}
    for result in results:
        if result.status is StreamStatus.CONVERGED:
            torch.testing.assert_close(result.z, alone(good[result.id]), atol=1e-9, rtol=0)


def test_a_bad_request_gives_a_result_with_its_error_and_harms_no_other() -> None:
    shape, rate = torch.zeros(3, dtype=torch.float64), torch.tensor([0.5]).double()
    bad: list[Any] = [
        Request(torch.zeros(4, dtype=torch.float64), (rate, shape), "shape"),
        Request(shape.float(), (rate, shape), "dtype"),
        Request((shape, shape), (rate, shape), "structure"),
        Request(shape, (rate,), "arguments"),
        Request(shape, (rate, "text"), "text"),
        Request(shape, (rate, shape[:2]), "row"),
        Request("text", (rate, shape), "start"),
        Request(shape, (rate, shape), "interval", stop=StopRule(check_every=3)),
        Request(shape, (rate, shape), "rule", stop=7),  # type: ignore[arg-type]
        Request(shape, (rate, shape), "seconds", time_limit=-1.0),
        Request(shape, 3, "tuple"),  # type: ignore[arg-type]
        "not a request",
    ]
    good = [request(i) for i in range(9)]
    mixed = list(itertools.chain(*itertools.zip_longest(good, bad)))[:-1]
    mixed = [r for r in mixed if r is not None]
    results = list(Stream(f, slots=3, stop=STOP).run(mixed, ordered=True))
    assert len(results) == len(mixed)
    for one, result in zip(mixed, results, strict=True):
        if one in good:
            assert result.status is StreamStatus.CONVERGED
        else:
            assert result.status is StreamStatus.FAILED
            assert result.z is None
            assert isinstance(result.error, (TypeError, ValueError))
    check_good(results, mixed)
    messages = {r.id: str(r.error) for r in results if r.error}
    assert "shape (4,)" in messages["shape"]
    assert "(3,)" in messages["shape"]
    assert "float32" in messages["dtype"]
    assert "check_every" in messages["interval"]


def test_a_bad_first_request_does_not_set_the_layout_if_an_example_does() -> None:
    bad = Request(torch.zeros(7), (), "bad")
    stream = Stream(f, slots=2, stop=STOP, example=request(0))
    results = list(stream.run([bad, request(1)]))
    assert [r.status for r in results] == [StreamStatus.FAILED, StreamStatus.CONVERGED]


@pytest.mark.parametrize("solver", [FixedPointIter(), Anderson(), Broyden()])
@pytest.mark.parametrize("has_aux", [False, True])
def test_an_error_in_f_ends_only_the_samples_that_cause_it(solver: Any, has_aux: bool) -> None:
    def picky(z: Tensor, rate: Tensor, x: Tensor) -> Any:
        if bool((x[:, 0] == 0.5).any()):
            raise RuntimeError("no halves, please")
        image = f(z, rate, x)
        return (image, {"double": 2 * image}) if has_aux else image

    requests = [request(i, 0.1 * i) for i in range(7)]
    for i in (2, 5):
        x = requests[i].args[1].clone()
        x[0] = 0.5
        requests[i] = Request(requests[i].z0, (requests[i].args[0], x), i)
    stream = Stream(picky, slots=3, solver=solver, stop=STOP, has_aux=has_aux)
    results = list(stream.run(requests, ordered=True))
    for i, result in enumerate(results):
        if i in (2, 5):
            assert result.status is StreamStatus.FAILED
            assert str(result.error) == "no halves, please"
        else:
            assert result.status is StreamStatus.CONVERGED
            torch.testing.assert_close(result.z, alone(requests[i]), atol=1e-8, rtol=0)
            if has_aux:
                torch.testing.assert_close(result.aux["double"], 2 * result.z, atol=1e-8, rtol=0)


@pytest.mark.parametrize("every", [1, 2, 5])
def test_an_error_after_the_end_of_a_sample_is_not_its_own(every: int) -> None:
    """Between two checks, rows are evaluated beyond their budgets."""

    def bounded(z: Tensor) -> Tensor:
        if bool((z > 3).any()):
            raise ValueError("too large")
        return z + 1

    stop = StopRule(20, 1e-9, check_every=every)
    stream = Stream(bounded, slots=2, solver=FixedPointIter(), stop=stop)
    short = replace(stop, max_iter=4)
    rules = [None, short] * 3
    for result in stream.run(Request(torch.zeros(1), (), i, r) for i, r in enumerate(rules)):
        if result.id % 2:
            assert (result.status, float(result.z)) == (StreamStatus.MAX_ITER, 1.0)
        else:
            assert "too large" in str(result.error)
            assert result.evaluations == 5


def test_an_f_that_always_raises_or_changes_shapes_fails_every_request() -> None:
    for wrong in (lambda z: 1 / 0, lambda z: z[:, :1], lambda z: "text", lambda z: z.long()):
        results = list(
            Stream(wrong, slots=2).run([Request(torch.ones(2), (), i) for i in range(5)])
        )
        assert [r.status for r in results] == [StreamStatus.FAILED] * 5
        assert all(r.error is not None for r in results)
    with pytest.raises(ZeroDivisionError):
        Stream(lambda z: 1 / 0, slots=2).solve(torch.ones(5, 2))


def test_an_interrupt_is_not_swallowed() -> None:
    def interrupted(z: Tensor) -> Tensor:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(Stream(interrupted).run([Request(torch.ones(2))]))


def numbered(n: int, log: list[int]) -> Iterator[Request]:
    for i in range(n):
        log.append(i)
        yield request(i % 7, 0.95 if i == 0 else 0.1, stop=None)


def test_requests_are_read_only_when_a_slot_is_free() -> None:
    log: list[int] = []
    results = Stream(f, slots=3, stop=STOP).run(numbered(1000, log))
    assert log == []
    for got in range(1, 20):
        next(results)
        assert len(log) <= got + 3
    results.close()  # type: ignore[attr-defined]


def test_an_ordered_run_reads_no_further_than_allowed() -> None:
    """The first request takes long; the others wait for it, as many as are allowed."""
    log: list[int] = []
    hard = StopRule(300, 1e-300)
    first = Request(torch.zeros(1).double(), (torch.tensor([0.1]).double(),), "hard", hard)

    def requests() -> Iterator[Request]:
        yield first
        for i in range(100):
            log.append(i)
            yield Request(torch.zeros(1).double(), (torch.tensor([0.1 * (i % 5)]).double(),), i)

    def g(z: Tensor, rate: Tensor) -> Tensor:
        return rate * torch.sin(z) + 1 + 1e-3 * torch.rand(())  # never at rest

    stream = Stream(g, slots=4, solver=FixedPointIter(), stop=StopRule(30, 1e-1), ahead=6)
    results = stream.run(requests(), ordered=True)
    assert next(results).id == "hard"
    assert len(log) <= 4 + 6
    assert [r.id for r in results] == list(range(100))


def test_an_error_of_the_iterator_comes_after_the_results() -> None:
    def requests() -> Iterator[Request]:
        yield request(0)
        yield request(1)
        raise OSError("the disk is gone")

    got = []
    results = Stream(f, slots=4, stop=STOP).run(requests())
    got += [next(results).id, next(results).id]
    with pytest.raises(OSError, match="the disk is gone"):
        next(results)
    assert sorted(got) == [0, 1]


def test_no_requests_no_results() -> None:
    stream = Stream(f)
    assert list(stream.run([])) == []
    empty = stream.solve(torch.zeros(0, 3), (torch.zeros(0, 1), torch.zeros(0, 3)))
    assert empty.z.shape == (0, 3)
    none = Stream(f, stop=StopRule(0)).solve(torch.ones(2, 3), (torch.ones(2, 1), torch.ones(2, 3)))
    assert torch.equal(none.z, torch.ones(2, 3))
    assert none.stats.nfe == 0


def test_nothing_of_the_caller_changes() -> None:
    x = torch.randn(9, 3)
    rates, z0 = torch.rand(9, 1), torch.randn(9, 3)
    copies = [t.clone() for t in (x, rates, z0)]
    stream = Stream(f, slots=2, stop=StopRule(40, 1e-5))
    first = stream.solve(z0, (rates, x))
    kept = first.z.clone()
    results = list(stream.run([Request(z0[i], (rates[i], x[i]), i) for i in range(9)]))
    states = [r.z.clone() for r in results]
    stream.solve(z0, (rates, x))
    assert all(torch.equal(a, b) for a, b in zip((x, rates, z0), copies, strict=True))
    assert torch.equal(first.z, kept)
    assert all(torch.equal(r.z, z) for r, z in zip(results, states, strict=True))
    assert not first.z.requires_grad


def test_a_map_that_returns_its_argument_is_safe() -> None:
    x = torch.randn(9, 3)
    found = Stream(lambda z, x: x, slots=2, solver=FixedPointIter()).solve(torch.zeros(9, 3), (x,))
    assert torch.equal(found.z, x)
    same = Stream(lambda z: z, slots=2, solver=Anderson()).solve(x)
    assert torch.equal(same.z, x)


@pytest.mark.parametrize("solver", [Auto(), NewtonKrylov(), Broyden(ls=True)])
def test_a_solver_whose_samples_cannot_come_and_go_is_refused(solver: Any) -> None:
    with pytest.raises(ValueError, match="use FixedPointIter, Anderson, or Broyden without ls"):
        Stream(f, solver=solver)


def test_wrong_options_are_refused() -> None:
    for wrong, message in (
        ({"slots": 0}, "slots must be"),
        ({"restarts": 1}, "go together"),
        ({"restart": lambda r, k: r.z0}, "go together"),
        ({"choose": "best"}, "choose must be"),
        ({"time_limit": 0}, "time_limit"),
        ({"ahead": 0}, "ahead"),
    ):
        with pytest.raises(ValueError, match=message):
            Stream(f, **wrong)
    for parts, message in (
        ({"f": 3}, "callable"),
        ({"f": f, "solver": "anderson"}, "must be a Solver"),
        ({"f": f, "stop": 40}, "StopRule"),
        ({"f": f, "halt": True}, "callable"),
    ):
        with pytest.raises(TypeError, match=message):
            Stream(**parts)
    with pytest.raises(ValueError, match="first dimension"):
        Stream(f).solve(torch.zeros(3, 2), (torch.zeros(3, 1), torch.zeros(2)))
    timed = Stream(f, time_limit=1.0)
    with pytest.raises(ValueError, match="use run"):
        timed.solve(torch.zeros(3, 2), (torch.zeros(3, 1), torch.zeros(3, 2)))


@pytest.mark.parametrize("solver", [FixedPointIter(), Anderson(), Broyden()])
def test_the_caller_may_change_its_modes_while_a_stream_runs(solver: Any) -> None:
    x = torch.randn(12, 3).double()
    rates = torch.rand(12, 1).double()
    with torch.inference_mode():
        hidden = x.clone()
    stream = Stream(f, slots=2, solver=solver, stop=STOP)
    results = stream.run(Request(hidden[i] * 0, (rates[i], hidden[i]), i) for i in range(12))
    found = {}
    for k in range(12):
        with torch.inference_mode(k % 2 == 0), torch.set_grad_enabled(k % 3 == 0):
            result = next(results)
            assert torch.is_grad_enabled() == (k % 3 == 0)
        found[result.id] = result
    for i, result in found.items():
        assert result.status is StreamStatus.CONVERGED
        assert not result.z.requires_grad
        expected = alone(Request(torch.zeros(3).double(), (rates[i], x[i])))
        torch.testing.assert_close(result.z, expected, atol=1e-8, rtol=0)


@pytest.mark.parametrize("solver", [FixedPointIter(), Anderson(), Anderson(type=1), Broyden()])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_states_of_half_precision_stream(solver: Any, dtype: torch.dtype) -> None:
    x, rates = torch.randn(12, 3).to(dtype), (0.7 * torch.rand(12, 1)).to(dtype)
    stream = Stream(f, slots=3, solver=solver, stop=StopRule(60, 2e-2, "rel"))
    found = stream.solve(torch.zeros_like(x), (rates, x))
    assert found.z.dtype == dtype
    assert not found.stats.failed.any()
    exact = solve(
        f, torch.zeros(12, 3).double(), Anderson(), STOP, args=(rates.double(), x.double())
    )
    assert (found.z - exact.z).abs().max() < 0.1


def test_two_runs_of_one_stream_do_not_disturb_each_other() -> None:
    stream = Stream(f, slots=2, stop=STOP)
    one, two = (stream.run([request(i) for i in range(k, k + 5)]) for k in (0, 5))
    results = [*itertools.chain(*zip(one, two, strict=True))]
    assert sorted(r.id for r in results) == list(range(10))
    check_good(results, [request(i) for i in range(10)])
