"""Requests that start again from another point, and the choice among their attempts."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from torchdeq import FixedPointIter, StopRule
from torchdeq.stream import Request, Stream, StreamStatus


def test_unsolved_requests_start_again_and_the_lowest_residual_wins() -> None:
    """sqrt has the fixed points 0 and 1; the map diverges from starts beyond 2."""

    def square(z: Tensor) -> Tensor:
        return z * z

    starts = {0: [3.0, 2.5, 0.5], 1: [0.1], 2: [4.0, 5.0, 6.0, 7.0]}

    def restart(one: Request, attempt: int) -> Tensor:
        return torch.tensor([starts[one.id][min(attempt, len(starts[one.id]) - 1)]]).double()

    requests = [Request(torch.tensor([s[0]]).double(), (), i) for i, s in starts.items()]
    stream = Stream(
        square,
        slots=2,
        solver=FixedPointIter(),
        stop=StopRule(60, 1e-9),
        restart=restart,
        restarts=2,
    )
    found = {r.id: r for r in stream.run(requests)}
    assert (found[0].status, found[0].attempts) == (StreamStatus.CONVERGED, 3)
    assert (found[1].status, found[1].attempts) == (StreamStatus.CONVERGED, 1)
    assert found[2].attempts == 3
    assert found[2].status is StreamStatus.NONFINITE
    assert float(found[2].z) == 16.0  # the image of the first start has the lowest residual
    assert found[2].evaluations > found[2].steps
    assert found[0].evaluations > found[0].steps


def test_attempts_may_vote() -> None:
    """The map returns a constant that depends on the start's sign, and never converges."""

    def restless(z: Tensor) -> Tensor:
        return torch.stack((z[:, 0], z[:, 1] + z[:, 2], z[:, 2]), dim=1)

    starts = [(1.0, 0.01), (2.0, 1.0), (2.0, 0.5), (3.0, 0.02)]

    def restart(one: Request, attempt: int) -> Tensor:
        label, drift = starts[attempt]
        return torch.tensor([label, 0.0, drift])

    def stream(choose: Any) -> Stream:
        return Stream(
            restless, slots=2, solver=FixedPointIter(), stop=StopRule(5, 1e-6), restart=restart,
            restarts=3, choose=choose,
        )  # fmt: skip

    one = [Request(torch.tensor([1.0, 0.0, 0.01]), (), "x")]
    (by_vote,) = stream(lambda r: float(r.z[0])).run(one)
    assert float(by_vote.z[0]) == 2.0
    assert by_vote.residual == pytest.approx(0.5)
    assert by_vote.attempts == 4
    (by_residual,) = stream("residual").run(one)
    assert float(by_residual.z[0]) == 1.0
    (failed,) = stream(lambda r: 1 / 0).run(one)
    assert isinstance(failed.error, ZeroDivisionError)
    broken = Stream(
        restless, slots=2, stop=StopRule(5, 1e-9), solver=FixedPointIter(), restarts=1,
        restart=lambda r, k: torch.zeros(9),
    )  # fmt: skip
    (failed,) = broken.run(one)
    assert failed.status is StreamStatus.FAILED


def test_an_attempt_that_ends_with_nan_never_wins() -> None:
    def breaks(z: Tensor) -> Tensor:
        return torch.where(z > 50, torch.nan, 0.9 * z + 1)

    stream = Stream(
        breaks, slots=1, solver=FixedPointIter(), stop=StopRule(3, None, return_final=True),
        restarts=2, restart=lambda one, attempt: torch.tensor([one.id[attempt]]),
    )  # fmt: skip
    for starts in itertools.permutations([100.0, 1.0, 2.0]):
        (result,) = stream.run([Request(torch.tensor([starts[0]]), id=starts)])
        assert float(result.z) == pytest.approx(10 - 8 * 0.9**3)


def test_a_tensor_is_no_vote() -> None:
    stream = Stream(
        lambda z: z + 1, slots=1, stop=StopRule(3, 1e-9), solver=FixedPointIter(), restarts=1,
        restart=lambda one, attempt: torch.ones(1), choose=lambda result: result.z > 0,
    )  # fmt: skip
    (result,) = stream.run([Request(torch.zeros(1))])
    assert "choose must return" in str(result.error)


@pytest.mark.parametrize(
    ("stop", "winner"),
    [
        (StopRule(1, 1e-6), 1.0),
        (StopRule(1, 1e-6, mode="rel"), 100.0),
        (StopRule(1, None, mode="rel", return_final=True), 100.0),
        (StopRule(1, None, rtol=1e-6, atol=1e-9), 100.0),
        (StopRule(1, None, rtol=0.0, atol=1e-6), 1.0),
    ],
)
def test_attempts_are_compared_in_the_measure_of_the_stop_rule(
    stop: StopRule, winner: float
) -> None:
    """The state at 100 moves further than that at 1, but by a smaller share of its size."""
    stream = Stream(
        lambda z: torch.stack((z[:, 0], z[:, 1], z[:, 1] + z[:, 2]), dim=1),
        slots=1, solver=FixedPointIter(), stop=stop, restarts=1,
        restart=lambda one, attempt: torch.tensor([100.0, 0.5, 0.0]),
    )  # fmt: skip
    (result,) = stream.run([Request(torch.tensor([1.0, 0.1, 0.0]))])
    assert float(result.z[0]) == winner
