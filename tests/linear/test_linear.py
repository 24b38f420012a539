"""What holds for every registered linear solver, and what each promises beyond."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import problems
from torchdeq.linear import GMRES, LINEAR, BiCGStab, LinearSolver, Neumann
from torchdeq.solver import Status, StopRule

NAMES = list(LINEAR)


def system(
    J: Tensor, batch: int = 3, dtype: torch.dtype = torch.float64
) -> tuple[Any, Tensor, Tensor]:
    """``(I - J) x = b``: the product, right-hand sides and the dense solution."""
    A = torch.eye(len(J), dtype=torch.float64) - J
    b = torch.randn(batch, len(J), dtype=torch.float64)
    x = torch.linalg.solve(A, b.mT).mT
    A = A.to(dtype)
    return lambda v: v @ A.mT, b.to(dtype), x


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
    ("dtype", "tol", "error"),
    [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 3e-2, 0.2)],
)
@pytest.mark.parametrize("batch", [0, 1, 257])
def test_every_precision_and_batch_size(
    name: str, dtype: torch.dtype, tol: float, error: float, batch: int
) -> None:
    matvec, b, exact = system(problems.contraction(0.6), batch, dtype)
    x, stats = LINEAR[name]().solve(matvec, b, StopRule(60, tol, "rel"))
    assert x.dtype == dtype
    assert stats.status.shape == (batch,)
    if batch:
        assert ((x - exact).norm(dim=1) / exact.norm(dim=1)).max() < error


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
@pytest.mark.parametrize("tol", [0.0, 1e-8])
def test_a_broken_system_does_not_touch_its_neighbours(name: str, tol: float) -> None:
    matvec, b, exact = system(problems.contraction(0.6))
    b[1] = torch.nan
    x, stats = LINEAR[name]().solve(matvec, b, StopRule(60, tol, "rel"))
    keep = torch.tensor([0, 2])
    torch.testing.assert_close(x[keep], exact[keep], atol=1e-6, rtol=0)
    assert stats.status[1] == Status.NONFINITE


@pytest.mark.parametrize("name", NAMES)
def test_a_system_with_nothing_on_the_right_is_solved_by_zero(name: str) -> None:
    matvec, b, exact = system(problems.contraction(0.9))
    b[1] = 0
    x, stats = LINEAR[name]().solve(matvec, b, StopRule(300, 1e-9, "rel"))
    assert torch.equal(x[1], torch.zeros_like(x[1]))
    assert stats.converged.all()
    torch.testing.assert_close(x[2], exact[2], atol=1e-7, rtol=0)
    x, stats = LINEAR[name]().solve(matvec, 0 * b, StopRule(30, 1e-9, "rel"))
    assert stats.nfe == 0
    assert not x.any()


@pytest.mark.parametrize("name", NAMES)
def test_a_system_alone_gets_the_answer_it_gets_in_a_batch(name: str) -> None:
    Js = torch.stack([problems.contraction(r, seed=i) for i, r in enumerate((0.1, 0.9, 0.5))])
    b = torch.randn(3, 8, dtype=torch.float64)
    stop = StopRule(200, 1e-6, "rel")

    def product(J: Tensor) -> Any:
        return lambda v: v - torch.einsum("bij,bj->bi", J, v)

    together = LINEAR[name]().solve(product(Js), b, stop)
    for i in range(3):
        alone = LINEAR[name]().solve(product(Js[i : i + 1]), b[i : i + 1], stop)
        torch.testing.assert_close(alone.x[0], together.x[i], atol=1e-9, rtol=0)
        assert alone.stats.nstep[0] == together.stats.nstep[i]


@pytest.mark.parametrize("name", NAMES)
def test_a_good_start_saves_products(name: str) -> None:
    matvec, b, exact = system(problems.rotation(0.9, 32))
    stop = StopRule(300, 1e-8, "rel")
    cold = LINEAR[name]().solve(matvec, b, stop)
    warm = LINEAR[name]().solve(matvec, b, stop, exact + 1e-5 * torch.randn_like(exact))
    assert warm.stats.nfe < cold.stats.nfe


@pytest.mark.parametrize("name", NAMES)
def test_failures_are_told(name: str) -> None:
    matvec, b, _ = system(problems.rotation(0.99, 64))
    _, stats = LINEAR[name]().solve(matvec, b, StopRule(4, 1e-10, "rel"))
    assert stats.failed.all()
    with pytest.raises(ValueError, match=r"got \(3, 2\), expected \(3, 64\)"):
        LINEAR[name]().solve(lambda v: v[:, :2], b, StopRule(4))
    with pytest.raises(ValueError, match="floating-point matrix"):
        LINEAR[name]().solve(matvec, b[0], StopRule(4))


def test_gmres_solves_systems_on_which_the_series_diverges() -> None:
    matvec, b, exact = system(problems.rotation(3.0, 16))
    x, stats = GMRES().solve(matvec, b, StopRule(60, 1e-11, "rel"))
    torch.testing.assert_close(x, exact)
    assert stats.nfe <= 17  # one of them to make sure
    _, lost = Neumann().solve(matvec, b, StopRule(60, 1e-11, "rel"))
    assert (lost.status == Status.DIVERGED).all()


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


def test_gmres_ends_luckily_and_gives_up_on_what_cannot_be_solved() -> None:
    b = torch.tensor([[1.0, 0.0], [1.0, 1.0]], dtype=torch.float64)
    x, stats = GMRES().solve(lambda v: 2 * v, b, StopRule(9, 1e-12, "rel"))
    torch.testing.assert_close(x, b / 2)
    assert stats.nfe == 2  # the second to make sure
    singular = torch.tensor([[0.0, 1.0], [0.0, 0.0]], dtype=torch.float64)
    x, stats = GMRES().solve(lambda v: v @ singular.mT, b, StopRule(50, 1e-12, "rel"))
    assert x.isfinite().all()
    assert stats.failed.all()  # neither Krylov space leads to a solution
    assert stats.nfe < 50


def test_bicgstab_checks_what_its_recurrence_claims() -> None:
    """A product that lies once makes the recurrence believe in a residual that is not there."""
    matvec, b, exact = system(problems.contraction(0.9, 16))
    calls = 0

    def lying(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return matvec(v) + (1e-3 * v if calls == 3 else 0)

    x, stats = BiCGStab().solve(lying, b, StopRule(200, 1e-9, "rel"))
    assert stats.converged.all()
    torch.testing.assert_close(x, exact, atol=1e-7, rtol=0)


def test_goals_can_differ_by_system() -> None:
    matvec, b, _ = system(problems.rotation(0.9, 16), batch=2)
    goal = torch.tensor([1e-1, 1e-9], dtype=torch.float64)
    x, _ = GMRES().solve(matvec, b, StopRule(100, None), goal=goal)
    residual = (b - matvec(x)).norm(dim=1)
    assert 1e-9 < residual[0] <= 1e-1
    assert residual[1] <= 1e-9


def test_a_linear_solver_of_ones_own() -> None:
    class Exact(LinearSolver):
        def run(self, system: Any) -> Tensor:
            return system.b

    b = torch.ones(2, 3)
    assert torch.equal(Exact().solve(lambda v: v, b, StopRule(3)).x, b)


def _times(A: Tensor) -> Any:
    return lambda v: v @ A.mT


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_gmres_tells_the_truth_about_singular_systems(dtype: torch.dtype, tol: float) -> None:
    for seed in range(40):
        generator = torch.Generator().manual_seed(seed)
        rank = 1 + seed % 7
        U, V = torch.randn(2, 8, rank, generator=generator, dtype=torch.float64)
        A = (U @ V.mT).to(dtype)
        b = torch.randn(2, 8, generator=generator, dtype=torch.float64).to(dtype)
        x, stats = GMRES().solve(_times(A), b, StopRule(30, tol, "rel"))
        true = (b - x @ A.mT).norm(dim=1) / b.norm(dim=1)
        assert (true <= 1.01).all()  # never worse than doing nothing
        assert (true[stats.converged] <= 1e-4).all()


@pytest.mark.parametrize("condition", [1e5, 1e7])
def test_gmres_claims_nothing_it_has_not_measured(condition: float) -> None:
    U, _ = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))
    V, _ = torch.linalg.qr(torch.randn(40, 40, dtype=torch.float64))
    spectrum = torch.logspace(0, -torch.tensor(condition).log10().item(), 40, dtype=torch.float64)
    A = (U @ torch.diag(spectrum) @ V).float()
    b = torch.randn(4, 40)
    x, stats = GMRES(restart=60).solve(lambda v: v @ A.mT, b, StopRule(200, 1e-4, "rel"))
    true = (b - x @ A.mT).norm(dim=1) / b.norm(dim=1)
    assert (true[stats.converged] <= 2e-4).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [4, 6, 20])
def test_a_product_that_breaks_late_leaves_what_was_found(name: str, budget: int) -> None:
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
    if budget == 20 and name != "neumann":
        torch.testing.assert_close(x[1:], exact[1:], atol=1e-6, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_a_budget_of_zero_returns_the_start(name: str) -> None:
    matvec, b, _ = system(problems.contraction(0.5))
    assert torch.equal(
        LINEAR[name]().solve(matvec, b, StopRule(0), torch.ones_like(b)).x, 0 * b + 1
    )
    assert not LINEAR[name]().solve(matvec, b, StopRule(0)).x.any()


def test_restart_is_positive() -> None:
    with pytest.raises(ValueError, match="restart must be at least 1"):
        GMRES(restart=0)
