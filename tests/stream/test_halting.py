"""Requests that a rule of the caller halts or a time limit ends, and what `f` returns beside."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.stream.samples import STOP, f, request
from torchdeq import FixedPointIter, StopRule
from torchdeq.stream import Request, Stream, StreamStatus


def test_the_rule_of_the_caller_halts_samples_at_their_own_time() -> None:
    """As in models that decide themselves when they have thought enough."""

    def thinking(z: Tensor, patience: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        z = z + 1
        return z, {"halt": z[:, 0] >= patience[:, 0], "steps": z[:, 0].clone()}

    patience = [3, 1, 9, 4, 4, 50]
    requests = [
        Request(torch.zeros(2), (torch.tensor([float(p)]),), i) for i, p in enumerate(patience)
    ]
    stream = Stream(
        thinking, slots=2, solver=FixedPointIter(), has_aux=True, halt=lambda z, aux: aux["halt"]
    )
    for result in stream.run(requests):
        wanted = min(patience[result.id], 40)
        assert result.evaluations == result.steps == wanted
        assert result.z.tolist() == [wanted, wanted]
        assert float(result.aux["steps"]) == wanted
        last = StreamStatus.MAX_ITER if wanted == 40 else StreamStatus.HALTED
        assert result.status is last
    assert stream.counts.evaluations <= 40 + 2 * sum(min(p, 40) for p in patience)


def test_a_rule_may_look_at_the_state_alone_and_tolerances_count_beside_it() -> None:
    stream = Stream(
        f, slots=3, solver=FixedPointIter(), stop=STOP, halt=lambda z, aux: z[:, 0] > 0.2
    )
    found = {r.id: r for r in stream.run([request(i) for i in (-5, 0, 5, 15)])}
    assert found[-5].status is StreamStatus.CONVERGED
    assert found[15].status is StreamStatus.HALTED
    assert found[15].evaluations == 1


def test_a_halting_rule_with_an_error_ends_the_samples_that_cause_it() -> None:
    def moody(z: Tensor, aux: Any) -> Tensor:
        if bool((z[:, 0] > 0.9).any()):
            raise ValueError("too large")
        return torch.zeros(len(z), dtype=torch.bool)

    stream = Stream(f, slots=4, solver=FixedPointIter(), stop=STOP, halt=moody)
    found = {r.id: r for r in stream.run([request(i) for i in (0, 1, 40, 2)])}
    assert found[40].status is StreamStatus.FAILED
    assert [found[i].status for i in (0, 1, 2)] == [StreamStatus.CONVERGED] * 3
    wrong = Stream(f, slots=4, stop=STOP, halt=lambda z, aux: z > 0)
    assert all("flags" in str(r.error) for r in wrong.run([request(0), request(1)]))


def test_aux_belongs_to_the_returned_state() -> None:
    def with_aux(z: Tensor, rate: Tensor) -> tuple[Tensor, Tensor]:
        image = rate * z + 1
        return image, image.clone()

    rates = (0.5, -1.5, 0.9, 3.0, -0.9, -2.0)  # some of them grow: their best state is an early one
    requests = [Request(torch.zeros(2), (torch.tensor([rate]),), i) for i, rate in enumerate(rates)]
    for every in (1, 3):
        stop = StopRule(9, 1e-3, check_every=every)
        stream = Stream(with_aux, slots=2, solver=FixedPointIter(), stop=stop, has_aux=True)
        for result in stream.run(requests):
            assert torch.equal(result.aux, result.z)
        found = stream.solve(
            torch.zeros(6, 2), (torch.tensor(rates)[:, None],), on_failure="ignore"
        )
        assert torch.equal(torch.stack(found.aux), found.z)


@pytest.mark.parametrize("aux", [torch.tensor(3.0), torch.arange(5), {"n": torch.ones(7, 2)}])
def test_aux_without_a_row_for_each_sample_is_an_error(aux: Any) -> None:
    stream = Stream(lambda *inputs: (f(*inputs), aux), slots=2, stop=STOP, has_aux=True)
    results = list(stream.run([request(i) for i in range(4)]))
    assert len(results) == 4
    assert all("first dimension of every tensor in aux" in str(r.error) for r in results)


def test_a_time_limit_ends_a_request_with_its_best_state() -> None:
    def slow(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        time.sleep(0.002)
        return f(z, rate, x)

    stop = StopRule(10**6, None)
    stream = Stream(slow, slots=2, solver=FixedPointIter(), stop=stop)
    begin = time.monotonic()
    results = list(stream.run([request(i, 0.9, time_limit=0.1) for i in range(3)]))
    assert time.monotonic() - begin < 20
    in_slots = [r for r in results if r.evaluations]
    assert all(r.status is StreamStatus.TIME_LIMIT for r in results)
    assert in_slots
    for result in in_slots:
        assert result.residual < 1.0
        assert result.seconds >= 0.1


@pytest.mark.parametrize("has_aux", [False, True])
@pytest.mark.parametrize("halts", [False, True])
def test_a_time_limit_returns_the_last_state_where_the_rule_asks_for_it(
    halts: bool, has_aux: bool
) -> None:
    def slow(z: Tensor) -> Any:
        time.sleep(0.005)
        return (z + 1, z + 1) if has_aux else z + 1

    last = StopRule(3, None, return_final=True)
    stream = Stream(
        slow, slots=2, solver=FixedPointIter(), stop=replace(last, max_iter=10**6), has_aux=has_aux,
        halt=(lambda z, aux: torch.zeros(len(z), dtype=torch.bool)) if halts else None,
    )  # fmt: skip
    requests = [Request(torch.full((1,), 100.0 * i), (), i, last) for i in range(3)]
    requests += [Request(torch.full((1,), 100.0 * i), (), i, time_limit=0.2) for i in range(3, 6)]
    for result in stream.run(requests):
        assert result.status is (
            StreamStatus.TIME_LIMIT if result.id > 2 else StreamStatus.MAX_ITER
        )
        assert result.steps == result.evaluations
        assert float(result.z) == 100 * result.id + result.steps
        assert not has_aux or result.steps == 0 or torch.equal(result.aux, result.z)


def test_a_request_may_run_out_of_time_before_a_slot_is_free() -> None:
    def slow(z: Tensor) -> Tensor:
        time.sleep(0.02)
        return z + 1

    stream = Stream(slow, slots=1, solver=FixedPointIter(), stop=StopRule(20, None), ahead=9)
    with stream:
        first = stream.submit(Request(torch.zeros(1), (), 1))
        second = stream.submit(Request(torch.zeros(1), (), 2, time_limit=0.05))
        late = second.result(timeout=30)
        assert late.status is StreamStatus.TIME_LIMIT
        assert (late.evaluations, late.attempts) == (0, 0)
        assert torch.equal(late.z, torch.zeros(1))
        assert not first.done() or first.result().evaluations == 20
        assert first.result(timeout=30).status is StreamStatus.MAX_ITER
