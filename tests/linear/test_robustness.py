"""Hard cases for every registered linear solver: rows apart, singular systems, bad products."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from tests import problems
from tests.linear.systems import Batch, Product, error, system, times
from torchdeq.linear import GMRES, LINEAR, LinearSolution, LinearSolver, Neumann, System
from torchdeq.solver import Status, StopRule

NAMES = list(LINEAR)
REL = StopRule(80, 1e-5, "rel")
KEEP = torch.tensor([0, 2])


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
@pytest.mark.parametrize("where", ["b", "x0"])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(
    name: str, bad: float, tol: float, where: str
) -> None:
    batch, stop = Batch(), StopRule(40, tol, "rel")
    b, x0 = batch.b, 0.1 * batch.b if where == "x0" else None
    clean = LINEAR[name]().solve(batch, b, stop, x0)
    b, x0 = b.clone(), None if x0 is None else x0.clone()
    (b if x0 is None else x0)[1, 3] = bad
    seen: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        seen.append(v)
        return batch(v)

    x, stats = LINEAR[name]().solve(product, b, stop, x0)
    assert x[1].isnan().all()
    assert stats.status[1] == Status.NONFINITE
    assert torch.equal(x[KEEP], clean.x[KEEP])
    assert torch.equal(stats.status[KEEP], clean.stats.status[KEEP])
    assert all(v.isfinite().all() for v in seen)  # no NaN that could spread enters a product


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_every_row_is_right_relative_to_its_own_right_hand_side(name: str, tol: float) -> None:
    batch = Batch()
    b = batch.b * torch.tensor([1.0, 1e-10, 1e-25, 1e20])[:, None]
    x, stats = LINEAR[name]().solve(batch, b, StopRule(40, tol, "rel"))
    assert (error(x, batch.exact(b)) < 1e-4).all()
    true = (b.double() - torch.einsum("bij,bj->bi", batch.A64, x.double())).norm(dim=1)
    assert (stats.abs_lowest <= 1e-5 * b.double().norm(dim=1)).all()
    assert (true <= 2e-5 * b.double().norm(dim=1)).all()
    if tol:
        assert stats.converged.all()
        assert stats.nfe < 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_rows_are_independent(name: str, every: int, tol: float) -> None:
    """Solve easy and hard systems: each gets the same answer as alone, for any `check_every`."""
    rates = torch.tensor([0.05, 0.9, 0.3, 0.6], dtype=torch.float64)[:, None, None]
    J = rates * torch.stack([problems.contraction(1.0, 8, seed=i) for i in range(4)])
    b = torch.randn(4, 8, dtype=torch.float64)
    stop = StopRule(60, tol, "rel", check_every=every)

    def product(J: Tensor) -> Product:
        return lambda v: v - torch.einsum("bij,bj->bi", J, v)

    together = LINEAR[name]().solve(product(J), b, stop)
    for i in range(4):
        alone = LINEAR[name]().solve(product(J[i : i + 1]), b[i : i + 1], stop)
        torch.testing.assert_close(alone.x[0], together.x[i], atol=1e-10, rtol=0)
        assert alone.stats.status[0] == together.stats.status[i]
        if tol:
            assert alone.stats.nstep[0] == together.stats.nstep[i]


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_cost_nothing_and_are_solved_by_zero(name: str) -> None:
    batch = Batch()
    b = batch.b.clone()
    b[1] = 0
    x, stats = LINEAR[name]().solve(batch, b, REL)
    assert not x[1].any()
    assert stats.converged.all()
    assert stats.nstep[1] == 0
    assert (error(x[KEEP], batch.exact(b)[KEEP]) < 1e-4).all()
    batch.calls = 0
    for stop in (REL, StopRule(30, 1e-3), StopRule(30, None, rtol=1e-4, atol=0.0)):
        x, stats = LINEAR[name]().solve(batch, 0 * b, stop)
        assert batch.calls == stats.nfe == 0
        assert not x.any()
        assert stats.converged.all()


@pytest.mark.parametrize("name", NAMES)
def test_a_start_for_a_zero_row_reports_its_true_residual(name: str) -> None:
    """No residual is small relative to zero, but the statistics report the true residuals."""
    batch = Batch()
    b, x0 = torch.zeros_like(batch.b), batch.b * torch.tensor([[0.1], [1.0], [2.0], [50.0]])
    x, stats = LINEAR[name]().solve(batch, b, StopRule(3, 1e-5, "rel"), x0)
    assert (stats.status == Status.MAX_ITER).all()
    torch.testing.assert_close(stats.abs_lowest, batch(x).norm(dim=1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [0.0, 1e-6])
@pytest.mark.parametrize("budget", [1, 2, 3, 10, 60])
def test_singular_systems_give_bounded_answers_and_fail(
    name: str, dtype: torch.dtype, tol: float, budget: int
) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        Q, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
        spectrum = torch.linspace(0.0, 2.0, 8, dtype=torch.float64)  # I - J, J with eigenvalue 1
        A = (Q @ torch.diag(spectrum) @ Q.mT).to(dtype)
        b = torch.randn(3, 8, generator=generator, dtype=torch.float64).to(dtype)
        x, stats = LINEAR[name]().solve(times(A), b, StopRule(budget, tol, "rel"))
        residual = (b - x @ A.mT).norm(dim=1)
        most = max(1e5, torch.finfo(dtype).eps ** -0.5)
        assert (x.norm(dim=1) <= most * b.norm(dim=1)).all()
        assert (residual <= 1.001 * b.norm(dim=1)).all()  # never worse than the start
        assert stats.failed.all()


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_never_worse_than_the_start(name: str) -> None:
    A = torch.diag(torch.tensor([1e-9, -3.0, 5.0, 0.0]))  # the Neumann series diverges
    b, x0 = torch.ones(1, 4), torch.tensor([[0.0, -0.3, 0.2, 7.0]])
    for budget in range(1, 12):
        x, stats = LINEAR[name]().solve(lambda v: v @ A, b, StopRule(budget, 1e-6, "rel"), x0)
        assert (b - x @ A).norm() <= (b - x0 @ A).norm() * (1 + 1e-6)
        assert stats.failed.all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 6, 60])
def test_a_product_that_breaks_late_leaves_the_solution_so_far(name: str, budget: int) -> None:
    matvec, b, exact = system(problems.contraction(0.5))
    calls = 0

    def breaking(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        y = matvec(v)
        return torch.cat((y[:1] * torch.nan, y[1:])) if calls >= 4 else y

    x, stats = LINEAR[name]().solve(breaking, b, StopRule(budget, 1e-10, "rel"))
    assert x.isfinite().all()
    assert stats.status[0] != Status.CONVERGED
    if budget == 60:
        torch.testing.assert_close(x[1:], exact[1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("wrong", [1, 2, 3, 4])
def test_a_wrong_product_is_noticed_and_repaired(name: str, wrong: int) -> None:
    """One product is off by 5 %: a recurrence alone would report a residual that is too small."""
    batch = Batch(torch.float64)

    def product(v: Tensor) -> Tensor:
        y = batch(v)
        return 1.05 * y if batch.calls == wrong else y

    for stop in (StopRule(9, 1e-3, "rel"), StopRule(200, 1e-9, "rel")):
        batch.calls = 0
        x, stats = LINEAR[name]().solve(product, batch.b, stop)
        true = (batch.b - batch(x)).norm(dim=1)
        torch.testing.assert_close(stats.abs_lowest, true, rtol=1e-3, atol=0)
    assert stats.converged.all()
    assert (error(x, batch.exact(batch.b)) < 1e-8).all()


def solve_in_low_precision(
    solver: LinearSolver, half: torch.dtype, rho: float
) -> tuple[LinearSolution, Tensor, Tensor]:
    """Solve with products in half precision; return the solution, right-hand sides, residuals."""
    W, b = problems.contraction(rho, 64).to(half), torch.randn(8, 64)

    def product(v: Tensor) -> Tensor:
        return v - (v.to(half) @ W).float()

    solution = solver.solve(product, b, StopRule(60, 1e-8, "rel"), eps=torch.finfo(half).eps)
    return solution, b, b - product(solution.x)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_products_of_low_precision_end_at_their_floor(
    name: str, half: torch.dtype, rho: float
) -> None:
    """As a vjp under autocast: the residual stalls at its rounding, and is the true residual."""
    (_, stats), b, residual = solve_in_low_precision(LINEAR[name](), half, rho)
    assert ((stats.status == Status.STALLED) | stats.converged).all()
    assert (stats.status == Status.STALLED).sum() >= 4
    assert stats.nfe < 60
    true = residual.norm(dim=1)
    torch.testing.assert_close(stats.abs_lowest, true, rtol=1e-3, atol=1e-7)
    assert (true <= torch.finfo(half).eps * b.norm(dim=1)).all()


@pytest.mark.parametrize(("solver", "most"), [(GMRES(), 26), (Neumann(), 45)])
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_the_floor_of_low_precision_is_noticed_early(
    solver: LinearSolver, most: int, half: torch.dtype, rho: float
) -> None:
    (_, stats), _, _ = solve_in_low_precision(solver, half, rho)
    assert stats.nfe < most


def test_a_solver_of_a_program_is_held_to_its_contract() -> None:
    @dataclass(frozen=True, kw_only=True)
    class Wrong(LinearSolver):
        kind: str

        def run(self, system: System) -> Tensor:
            if self.kind == "greedy":
                while True:
                    system.product(system.b)
            return system.b[:1] if self.kind == "one row" else None  # type: ignore[return-value]

    b = torch.ones(2, 3)
    for kind, got in (("one row", r"\(1, 3\)"), ("nothing", "NoneType")):
        with pytest.raises(TypeError, match=rf"Wrong.run must return .* \(2, 3\): got {got}"):
            Wrong(kind=kind).solve(lambda x: x, b, StopRule(5))
    with pytest.raises(RuntimeError, match="more than its 5 products"):
        Wrong(kind="greedy").solve(lambda x: x, b, StopRule(5))
