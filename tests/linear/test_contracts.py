"""Contracts of every registered linear solver: accuracy, budgets, starts, tolerances."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import problems
from tests.linear.systems import Batch, error, system, times
from torchdeq.linear import LINEAR, LinearSolver, System
from torchdeq.solver import StopRule

NAMES = list(LINEAR)
REL = StopRule(80, 1e-5, "rel")


@pytest.mark.parametrize("name", NAMES)
@given(rho=st.floats(0.0, 0.9), seed=st.integers(0, 2**16))
def test_solves_any_contractive_system(name: str, rho: float, seed: int) -> None:
    matvec, b, exact = system(problems.contraction(rho, seed=seed))
    x, stats = LINEAR[name]().solve(matvec, b, StopRule(400, 1e-10, "rel"))
    torch.testing.assert_close(x, exact, atol=1e-7, rtol=1e-7)
    assert stats.converged.all()
    assert (stats.rel_lowest <= 1e-10).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(
    ("dtype", "tol", "most"),
    [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 3e-2, 0.2)],
)
@pytest.mark.parametrize("batch", [0, 1, 257])
def test_every_precision_and_batch_size(
    name: str, dtype: torch.dtype, tol: float, most: float, batch: int
) -> None:
    matvec, b, exact = system(problems.contraction(0.6), batch, dtype)
    x, stats = LINEAR[name]().solve(matvec, b, StopRule(60, tol, "rel"))
    assert x.dtype == dtype
    assert stats.status.shape == (batch,)
    if batch:
        assert (error(x, exact) < most).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(name: str, dtype: torch.dtype) -> None:
    batch = Batch(dtype, rho=0.4)
    x, _ = LINEAR[name]().solve(batch, batch.b, StopRule(40, 1e-2, "rel"))
    assert x.dtype == dtype
    assert (error(x, batch.exact(batch.b)) < 0.05).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 7])
@pytest.mark.parametrize("tol", [0.0, 1e-14])
@pytest.mark.parametrize("warm", [False, True])
def test_the_budget_is_the_number_of_products(
    name: str, budget: int, tol: float, warm: bool
) -> None:
    matvec, b, _ = system(problems.rotation(0.95, 16))
    calls = 0

    def counted(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return matvec(v)

    x0 = 0.1 * b if warm else None
    x, stats = LINEAR[name]().solve(counted, b, StopRule(budget, tol, "rel"), x0)
    assert calls == stats.nfe == budget
    assert x.isfinite().all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("every", [1, 3, 4, 100])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 13, 80])
@pytest.mark.parametrize("with_first", [False, True])
def test_reading_less_often_never_exceeds_the_budget(
    name: str, every: int, budget: int, with_first: bool
) -> None:
    batch = Batch(torch.float64)
    first = batch(batch.b) if with_first else None
    batch.calls = 0
    stop = StopRule(budget, 1e-6, "rel", check_every=every)
    x, stats = LINEAR[name]().solve(batch, batch.b, stop, first=first)
    assert batch.calls == stats.nfe <= budget
    often = LINEAR[name]().solve(batch, batch.b, StopRule(budget, 1e-6, "rel"), first=first)
    assert stats.nfe >= often.stats.nfe
    if budget == 80:
        assert stats.converged.all()
        assert (error(x, batch.exact(batch.b)) < 1e-5).all()
        if every < 10:
            assert stats.nfe <= often.stats.nfe + 3 * every


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_zero_returns_the_start(name: str) -> None:
    matvec, b, _ = system(problems.contraction(0.5))
    assert torch.equal(
        LINEAR[name]().solve(matvec, b, StopRule(0), torch.ones_like(b)).x, 0 * b + 1
    )
    assert not LINEAR[name]().solve(matvec, b, StopRule(0)).x.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_good_start_saves_products(name: str) -> None:
    matvec, b, exact = system(problems.rotation(0.9, 32))
    stop = StopRule(300, 1e-8, "rel")
    cold = LINEAR[name]().solve(matvec, b, stop)
    warm = LINEAR[name]().solve(matvec, b, stop, exact + 1e-5 * torch.randn_like(exact))
    assert warm.stats.nfe < cold.stats.nfe


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_a_first_product_that_is_passed_is_not_made_again(name: str, scale: float) -> None:
    batch = Batch()
    b = scale * batch.b
    plain = LINEAR[name]().solve(batch, b, REL)
    first = batch(b)
    batch.calls = 0
    seen: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        seen.append(v / v.norm(dim=1, keepdim=True))
        return batch(v)

    x, stats = LINEAR[name]().solve(product, b, REL, first=first)
    torch.testing.assert_close(x, plain.x, rtol=1e-5, atol=0)
    assert batch.calls == stats.nfe == plain.stats.nfe - 1
    unit = b / b.norm(dim=1, keepdim=True)
    assert not any((v - unit).abs().max() < 1e-3 for v in seen)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_product_goes_with_a_zero_start_only(name: str) -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="drop x0 or first"):
        LINEAR[name]().solve(batch, batch.b, REL, batch.b, first=batch.b)
    with pytest.raises(ValueError, match=r"first must have the shape of b, \(4, 10\), got \(4,"):
        LINEAR[name]().solve(batch, batch.b, REL, first=batch.b[:, :2])
    with pytest.raises(ValueError, match="x0 must have the shape of b"):
        LINEAR[name]().solve(batch, batch.b, REL, batch.b[:2])


@pytest.mark.parametrize("name", NAMES)
def test_goals_and_starts_are_honoured_row_by_row(name: str) -> None:
    batch = Batch(torch.float64, rho=0.8)
    goal = torch.tensor([1.0, 1e-2, 1e-5, 1e-9], dtype=torch.float64)
    x, stats = LINEAR[name]().solve(batch, batch.b, StopRule(120, None), goal=goal)
    residual = (batch.b - batch(x)).norm(dim=1)
    assert (residual <= goal).all()
    assert (residual[:2] > 1e-9).all()
    near = batch.exact(batch.b) + 1e-7
    batch.calls = 0
    x, stats = LINEAR[name]().solve(batch, batch.b, StopRule(120, 1e-5, "rel"), near)
    assert batch.calls == stats.nfe == 1
    assert torch.equal(x, near)


@pytest.mark.parametrize("name", NAMES)
def test_a_tolerance_above_the_floor_is_met(name: str) -> None:
    batch = Batch()
    _, stats = LINEAR[name]().solve(batch, batch.b, REL, eps=torch.finfo(torch.bfloat16).eps)
    assert stats.converged.all()  # eps is an upper bound of the rounding


@pytest.mark.parametrize("name", NAMES)
def test_a_root_mean_square_tolerance_means_the_same_at_every_size(name: str) -> None:
    def product(v: Tensor) -> Tensor:
        return v - 0.5 * v.flip(1)

    small, large = (
        LINEAR[name]().solve(product, torch.ones(2, d), StopRule(60, 1e-3, norm="rms"))
        for d in (4, 4000)
    )
    assert small.stats.nfe == large.stats.nfe
    torch.testing.assert_close(small.stats.abs_lowest, large.stats.abs_lowest)
    assert small.stats.converged.all()
    assert (large.stats.abs_lowest <= 1e-3).all()
    torch.testing.assert_close(large.stats.abs_trace[:, 0], torch.ones(2))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [REL, StopRule(80, 1e-5), StopRule(80, None, rtol=1e-5, atol=0.0)])
def test_a_whole_batch_may_be_one_system(name: str, stop: StopRule) -> None:
    """Solve a system whose rows depend on each other, passed as (1, B D)."""
    M = problems.contraction(0.7, 40)
    A = torch.eye(40, dtype=torch.float64) - M
    b = torch.randn(1, 40, dtype=torch.float64)
    x, stats = LINEAR[name]().solve(times(A), b, stop)
    torch.testing.assert_close(x[0], torch.linalg.solve(A, b[0]), atol=1e-3, rtol=0)
    assert stats.converged.tolist() == [True]


@pytest.mark.parametrize("name", NAMES)
def test_failures_are_reported_and_wrong_shapes_refused(name: str) -> None:
    matvec, b, _ = system(problems.rotation(0.99, 64))
    _, stats = LINEAR[name]().solve(matvec, b, StopRule(4, 1e-10, "rel"))
    assert stats.failed.all()
    with pytest.raises(ValueError, match=r"got \(3, 2\), expected \(3, 64\)"):
        LINEAR[name]().solve(lambda v: v[:, :2], b, StopRule(4))
    with pytest.raises(ValueError, match="floating-point matrix"):
        LINEAR[name]().solve(matvec, b[0], StopRule(4))


def test_a_linear_solver_of_ones_own() -> None:
    class Exact(LinearSolver):
        def run(self, system: System) -> Tensor:
            return system.b

    b = torch.ones(2, 3)
    assert torch.equal(Exact().solve(lambda v: v, b, StopRule(3)).x, b)
