"""What a stream asks of a device beside `f`: one transfer per check, and few launches."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.accelerator import Meter
from torchdeq import Anderson, Broyden, FixedPointIter, StopRule, solve
from torchdeq.stream import Stream

SOLVERS = [FixedPointIter(), Anderson(), Broyden()]
#: Launches of a stream beyond those of a solve, at each evaluation, while samples come and go.
MORE = {"FixedPointIter": 4.0, "Anderson": 15.0, "Broyden": 15.0}


def metered(solver: Any, every: int, streams: bool) -> tuple[Any, int]:
    """Return the tally and the calls of `f`."""
    meter, calls = Meter(simulated=True), 0
    rates = torch.linspace(0.3, 0.9, 24)[torch.randperm(24)][:, None]

    def f(z: Tensor, rate: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        with meter.paused():
            return torch.tanh(rate * z.roll(1, 1) + 0.3)

    stop = StopRule(200, 1e-5, check_every=every)
    z0, args = meter.put(torch.zeros(24, 32)), (meter.put(rates),)
    with meter, torch.no_grad():
        if streams:
            Stream(f, slots=6, solver=solver, stop=stop).solve(z0, args, on_failure="ignore")
        else:
            solve(f, z0, solver, stop, args=args, on_failure="ignore")
    return meter.tally, calls


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("every", [1, 4])
def test_the_host_reads_at_most_once_per_check(solver: Any, every: int) -> None:
    tally, calls = metered(solver, every, streams=True)
    assert tally.reads <= calls / every + 1


@pytest.mark.parametrize("solver", SOLVERS, ids=lambda s: type(s).__name__)
def test_samples_that_come_and_go_cost_few_launches(solver: Any) -> None:
    tally, calls = metered(solver, 1, streams=True)
    alone, solo_calls = metered(solver, 1, streams=False)
    more = tally.launches / calls - alone.launches / solo_calls
    assert more <= MORE[type(solver).__name__], more
