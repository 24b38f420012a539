"""The statistics of a solve describe the returned state of each sample, whatever happened."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq.solver import (
    SOLVERS,
    Anderson,
    Auto,
    Broyden,
    FixedPointIter,
    Status,
    StopRule,
    solve,
)


def test_later_iterates_of_a_finished_sample_are_not_reported() -> None:
    """The first sample is NaN at evaluation 3 and meets the tolerance later, which is too late."""
    rates = torch.tensor([[0.2], [0.98]], dtype=torch.float64)
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        fz = torch.cos(z.nan_to_num() * rates)
        return torch.cat((fz[:1] * torch.nan, fz[1:])) if calls == 3 else fz

    z0 = torch.zeros(2, 4, dtype=torch.float64)
    for every in (1, 4):
        calls = 0
        stop = StopRule(80, 1e-10, check_every=every)
        solution = solve(f, z0, FixedPointIter(), stop, on_failure="ignore")
        assert solution.stats.status.tolist()[0] == Status.NONFINITE
        assert solution.stats.nstep[0] == 2
        assert solution.stats.abs_lowest[0] == solution.stats.abs_trace[0, 1]


def test_a_chain_gives_a_broken_sample_another_chance() -> None:
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.cos(z) * (torch.nan if calls == 3 else 1.0)

    z0 = torch.zeros(2, 4, dtype=torch.float64)
    solution = solve(f, z0, SOLVERS["auto"](), StopRule(80, 1e-10))
    assert solution.stats.converged.all()


@pytest.mark.parametrize("scale", [1.0, 1e-14])
@pytest.mark.parametrize("chain", [("fixed_point_iter",), ("fixed_point_iter", "fixed_point_iter")])
def test_steady_progress_is_no_stall_at_any_scale_nor_under_autocast(
    scale: float, chain: tuple[str, ...]
) -> None:
    def f(z: Tensor) -> Tensor:
        return 0.99 * z + 0.01 * scale

    with torch.autocast("cpu", torch.bfloat16):
        solution = solve(
            f, torch.zeros(2, 4), Auto(chain=chain), StopRule(300, 1e-30),
            on_failure="ignore",
        )  # fmt: skip
    assert (solution.stats.status == Status.MAX_ITER).all()


def test_a_zero_fixed_point_is_found_with_a_relative_tolerance_alone() -> None:
    stop = StopRule(10, None, rtol=1e-3, atol=0.0)
    assert solve(lambda z: 0.5 * z, torch.zeros(2, 3), FixedPointIter(), stop).stats.converged.all()


@pytest.mark.parametrize("name", list(SOLVERS))
def test_no_graph_escapes_from_an_f_that_switches_gradients_on(name: str) -> None:
    layer = torch.nn.Linear(4, 4)

    def f(z: Tensor) -> Tensor:
        with torch.enable_grad():
            return 0.2 * torch.tanh(layer(z) + 1)

    solver = SOLVERS[name](**SOLVERS[name].options_without_jvp)
    solution = solve(f, torch.zeros(2, 4), solver, StopRule(9, 0.0), (3,))
    assert not solution.z.requires_grad
    assert not solution.states[0].requires_grad


def test_a_buffer_that_f_returns_again_and_again_is_noticed() -> None:
    buffer = torch.empty(2, 3)
    for name in ("fixed_point_iter", "anderson", "broyden"):
        with pytest.raises(RuntimeError, match="return a new tensor"):
            solve(lambda z: torch.cos(z, out=buffer), torch.zeros(2, 3), SOLVERS[name]())
    constant = torch.ones(2, 3)  # the same tensor with the same values is fine
    assert torch.equal(solve(lambda z: constant, torch.zeros(2, 3), Anderson()).z, constant)


def test_a_name_instead_of_a_solver_raises_with_the_way_to_build_one() -> None:
    with pytest.raises(TypeError, match="make_solver"):
        solve(torch.cos, torch.zeros(2, 3), "anderson")  # type: ignore[arg-type]


@pytest.mark.parametrize("solver", [SOLVERS["newton_krylov"](), Broyden(ls=True)])
def test_a_sample_that_is_not_finite_does_not_spend_the_budget(solver: Any) -> None:
    W, x = problems.contraction(0.9, 12), torch.randn(2, 12, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        fz = torch.tanh(z @ W.mT + x[: len(z)])
        return torch.cat((fz[:1], fz[1:] * torch.nan))

    stop = StopRule(100, 1e-9)
    alone = solve(f, torch.zeros(1, 12, dtype=torch.float64), solver, stop)
    both = solve(f, torch.zeros(2, 12, dtype=torch.float64), solver, stop, on_failure="ignore")
    assert both.stats.status.tolist() == [Status.CONVERGED, Status.NONFINITE]
    assert both.stats.nfe <= alone.stats.nfe + 2


def test_newton_takes_a_plain_step_instead_of_an_enormous_one() -> None:
    """The Jacobian at the start has the eigenvalue 1: the Newton direction is enormous."""
    Q, _ = torch.linalg.qr(torch.randn(8, 8, dtype=torch.float64))
    A = Q @ torch.diag(torch.linspace(0.0, 1.0, 8, dtype=torch.float64)) @ Q.mT
    x = torch.randn(3, 8, dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return z @ A.mT + 0.1 * x - 1e-3 * z**3

    solution = solve(f, torch.zeros_like(x), SOLVERS["newton_krylov"](), StopRule(400, 1e-9))
    assert solution.stats.converged.all()


def test_a_coupled_system_with_shared_iterates_has_statistics_of_every_sample() -> None:
    make, _, W, x = problems.graph(nodes=5)
    ask: Any = (make(W, x), torch.zeros_like(x), FixedPointIter(), StopRule(60, 1e-6))
    shared, own = (solve(*ask, coupled=True, shared=shared).stats for shared in (True, False))
    assert shared.converged.all()
    for key in ("abs_lowest", "rel_trace", "nstep"):
        torch.testing.assert_close(shared[key], own[key])


def test_a_chain_takes_maps_without_a_forward_mode() -> None:
    norm = torch.nn.BatchNorm1d(4)

    def f(z: Tensor) -> Tensor:
        return 0.99 * torch.cos(norm(z)) + z * 0.01

    solution = solve(
        f, torch.randn(8, 4), SOLVERS["auto"](), StopRule(60, 1e-12), on_failure="ignore"
    )
    assert solution.z.isfinite().all()
