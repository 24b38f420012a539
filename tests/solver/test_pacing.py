"""Checks at intervals that the solve chooses: fewer reads, hardly more evaluations."""

from __future__ import annotations

import argparse

import pytest
import torch

from benchmarks.accelerator import Meter
from benchmarks.cases import CASES
from torchdeq import DEQConfig, add_deq_args, get_deq
from torchdeq.solver import SOLVERS, StopRule, solve
from torchdeq.solver.pacing import Pace


@pytest.mark.parametrize("name", ["fixed_point_iter", "anderson", "broyden"])
@pytest.mark.parametrize("case", ["mlp", "pair"])
@pytest.mark.parametrize("tol", [1e-3, 1e-5])
def test_reads_fall_and_evaluations_do_not_rise(
    case: str, name: str, tol: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    problem = CASES[case]()
    stop = StopRule(200, tol, "rel")
    every = solve(problem.f, problem.z0, SOLVERS[name](), stop)
    monkeypatch.setattr("torchdeq.numbers.reads_are_free", lambda device: False)
    checks = []
    interval = Pace.next_interval

    def spy(self: Pace, worst: float, count: int) -> int:
        checks.append(count)
        return interval(self, worst, count)

    monkeypatch.setattr(Pace, "next_interval", spy)
    stop = StopRule(200, tol, "rel", check_every="auto")
    paced = solve(problem.f, problem.z0, SOLVERS[name](), stop)
    assert paced.stats.nfe <= 1.05 * every.stats.nfe
    assert len(checks) <= (0.9 if every.stats.nfe > 20 else 1.0) * every.stats.nfe
    assert torch.equal(paced.stats.status, every.stats.status)
    torch.testing.assert_close(paced.z, every.z, atol=1e-5, rtol=1e-4)


def test_a_device_is_read_less_often() -> None:
    reads = []
    for every in (1, "auto"):
        meter = Meter(simulated=True)
        z0 = meter.put(torch.zeros(4, 16))
        with meter:
            stop = StopRule(200, 1e-6, check_every=every)
            result = solve(lambda z: 0.9 * z + 1, z0, SOLVERS["fixed_point_iter"](), stop)
            assert result.stats.nfe <= 170
        reads.append(meter.tally.reads)
    assert reads[1] <= reads[0] / 4


def test_the_pace_looks_at_every_evaluation_unless_the_decay_is_steady() -> None:
    pace = Pace(1e-6, 16)
    assert [pace.next_interval(w, k) for k, w in enumerate((1.0, 0.5, 0.25), 1)] == [1, 1, 10]
    assert pace.next_interval(0.24, 13) == 1  # much slower than before
    assert pace.next_interval(0.24, 14) == 1  # no progress
    assert pace.next_interval(float("nan"), 15) == 1
    assert Pace(1e-3, 16).next_interval(float("inf"), 1) == 1


def test_auto_is_an_option_and_a_flag() -> None:
    parser = argparse.ArgumentParser()
    add_deq_args(parser)
    args = parser.parse_args(["--f_check_every", "auto"])
    assert get_deq(args).config.f_stop.check_every == "auto"
    assert DEQConfig(f_check_every="auto").f_stop == StopRule(check_every="auto")
    assert StopRule(check_every="auto").interval == 1
    with pytest.raises(TypeError, match="whole number or auto"):
        get_deq(f_check_every="often")
    with pytest.raises(ValueError, match="check_every"):
        StopRule(check_every="often")  # type: ignore[arg-type]
