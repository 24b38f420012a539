"""Properties of single linear solvers: GMRES and BiCGStab."""

from __future__ import annotations

import pytest
import torch

from tests import problems
from tests.linear.systems import system, times
from torchdeq.linear import GMRES, BiCGStab, Neumann
from torchdeq.solver import Status, StopRule


def test_gmres_solves_systems_on_which_the_series_diverges() -> None:
    matvec, b, exact = system(problems.rotation(3.0, 16))
    x, stats = GMRES().solve(matvec, b, StopRule(60, 1e-11, "rel"))
    torch.testing.assert_close(x, exact)
    assert stats.nfe <= 17  # one of them measures the residual
    _, diverged = Neumann().solve(matvec, b, StopRule(60, 1e-11, "rel"))
    assert (diverged.status == Status.DIVERGED).all()


@pytest.mark.parametrize("restart", [1, 2, 5])
def test_gmres_restarts(restart: int) -> None:
    matvec, b, exact = system(problems.contraction(0.8, 24))
    x, stats = GMRES(restart=restart).solve(matvec, b, StopRule(400, 1e-10, "rel"))
    torch.testing.assert_close(x, exact, atol=1e-7, rtol=0)
    assert stats.converged.all()


def test_gmres_has_the_smallest_residual_over_the_krylov_space() -> None:
    J = problems.contraction(0.95, 20)
    matvec, b, _ = system(J, batch=1)
    A = torch.eye(20, dtype=torch.float64) - J
    for k in (1, 4, 9):
        x, stats = GMRES(confirm=False).solve(matvec, b, StopRule(k, 0.0))
        K = torch.stack([torch.linalg.matrix_power(A, i) @ b[0] for i in range(k)], dim=1)
        best = A @ K @ torch.linalg.lstsq(A @ K, b[0][:, None]).solution
        expected = (b[0] - best[:, 0]).norm()
        torch.testing.assert_close((b[0] - A @ x[0]).norm(), expected)
        torch.testing.assert_close(stats.abs_lowest[0], expected)


def test_gmres_ends_when_its_space_is_exhausted_and_gives_up_on_unsolvable_systems() -> None:
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    x, stats = GMRES().solve(lambda v: 2 * v, b, StopRule(9, 1e-12, "rel"))
    torch.testing.assert_close(x, b / 2)
    assert stats.nfe == 2  # the second measures the residual
    singular = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    x, stats = GMRES().solve(lambda v: v @ singular.mT, b, StopRule(50, 1e-12, "rel"))
    assert x.isfinite().all()
    assert stats.failed.all()  # neither Krylov space leads to a solution
    assert stats.nfe < 50


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_gmres_reports_true_residuals_of_singular_systems(dtype: torch.dtype, tol: float) -> None:
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        rank = 1 + seed % 7
        U, V = torch.randn(2, 8, rank, generator=generator, dtype=torch.float64)
        A = (U @ V.mT).to(dtype)
        b = torch.randn(2, 8, generator=generator, dtype=torch.float64).to(dtype)
        x, stats = GMRES().solve(times(A), b, StopRule(30, tol, "rel"))
        true = (b - x @ A.mT).norm(dim=1) / b.norm(dim=1)
        assert (true <= 1.01).all()  # never worse than zero
        assert (true[stats.converged] <= 1e-4).all()


@pytest.mark.parametrize("condition", [1e5, 1e7])
def test_gmres_reports_convergence_only_where_it_measured_it(condition: float) -> None:
    U, _ = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))
    spectrum = torch.logspace(0, -torch.tensor(condition).log10().item(), 40, dtype=torch.float64)
    A = (U @ torch.diag(spectrum) @ V).float()
    b = torch.randn(4, 40)
    x, stats = GMRES(restart=60).solve(times(A), b, StopRule(200, 1e-4, "rel"))
    true = (b - x @ A.mT).norm(dim=1) / b.norm(dim=1)
    assert (true[stats.converged] <= 2e-4).all()


def test_restart_is_positive() -> None:
    with pytest.raises(ValueError, match="restart must be a whole number >= 1"):
        GMRES(restart=0)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 9])
def test_bicgstab_does_not_follow_the_null_space(budget: int) -> None:
    """Solve the adjoint system of f(z) = z: 0 x = b, up to rounding."""
    Q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    A = torch.eye(6, dtype=torch.float64) - Q @ Q.mT
    b = torch.ones(2, 6, dtype=torch.float64)
    for tol in (0.0, 1e-6):
        x, stats = BiCGStab().solve(lambda v: v @ A, b, StopRule(budget, tol, "rel"))
        assert (x.abs() <= 1e8).all()
        assert stats.failed.all()
