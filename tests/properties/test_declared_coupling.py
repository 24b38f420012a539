"""Coupling that the program declares or denies: one system, one status, one tolerance."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from tests import problems
from tests.problems import GRAPH_TOL
from tests.properties.coupled import ADJOINTS, PLAIN, implicit, sequential, solve_plainly
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, ConvergenceWarning, FixedPointIter, Status, StopRule


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_declared_chain_whose_rows_start_solved_is_solved_as_a_whole(name: str) -> None:
    """Only the first row has an input; until it reaches a row, the residual there is zero."""
    at_once, step_by_step, W, x = problems.chain()
    x[1:] = 0
    z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=SOLVERS[name](), coupled=True,
                    stop=StopRule(60, 1e-9)).z  # fmt: skip
    torch.testing.assert_close(z, step_by_step(W, x), atol=1e-8, rtol=0)


@pytest.mark.parametrize("coupled", [True, "adjoint"])
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_declared_chain_is_right_with_every_adjoint_solver(name: str, coupled: Any) -> None:
    at_once, W, x, g, expected = sequential()
    seen: list[Any] = []
    z = solve_plainly(at_once(W, x), x, implicit(name, writer=seen.append), coupled)
    got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert seen[0].status.shape == (len(x),)
    if name in LINEAR or SOLVERS[name].watches:
        assert (seen[0].status == Status.CONVERGED).all()


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", list(dict.fromkeys((*PLAIN, *LINEAR))))
def test_coupling_denied_is_right_or_reported_never_silently_wrong(
    name: str, higher_order: bool
) -> None:
    """`coupled=False` solves rows as separate systems; for coupled rows that may fail and warn.

    A quasi-Newton method trusts the program: a test would cost as much as `coupled=False` saves.
    """
    at_once, W, x, g, expected = sequential()
    backward = implicit(name, 40, 1e-8, higher_order=higher_order)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        z = solve_plainly(at_once(W, x), x, backward, coupled=False)
        got = torch.autograd.grad(z, (W, x), g)
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
    assert right or any(issubclass(w.category, ConvergenceWarning) for w in caught)


def test_coupled_rows_cannot_leave_the_batch() -> None:
    make, _, W, x = problems.graph(nodes=5)
    for coupled in (True, "adjoint"):
        with pytest.raises(ValueError, match="compact=True"):
            fixed_point(make(W, x), torch.zeros_like(x), coupled=coupled, compact=True)


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("budget", [3, 200])
def test_all_rows_of_a_declared_graph_share_one_status(name: str, budget: int) -> None:
    make, _, W, x = problems.graph()
    solution = fixed_point(make(W, x), torch.zeros_like(x), solver=SOLVERS[name](), coupled=True,
                           stop=StopRule(budget, GRAPH_TOL), on_failure="ignore")  # fmt: skip
    stats = solution.stats
    for key in ("abs_lowest", "rel_lowest", "nstep"):
        assert stats[key].shape == (len(x),)
        assert (stats[key] == stats[key][0]).all()
    assert stats.status.shape == (len(x),)
    assert (stats.status == stats.status[0]).all()
    if not SOLVERS[name].watches:
        return
    assert int(stats.status[0]) == (Status.MAX_ITER if budget == 3 else Status.CONVERGED)
    if budget > 3:
        z = solution.z
        assert float((make(W, x)(z) - z).norm()) < 2 * GRAPH_TOL  # the norm over all rows


def test_only_the_adjoint_is_one_system_if_that_is_what_was_declared() -> None:
    """Row i of a chain is exact after i + 1 evaluations, and converged after one more."""
    at_once, W, x, g, _ = sequential()
    seen: list[Any] = []
    solution = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                           stop=StopRule(60, 1e-13), coupled="adjoint",
                           backward=Implicit(writer=seen.append))  # fmt: skip
    assert len(solution.stats.nstep.unique()) > len(x) // 2
    torch.autograd.grad(solution.z, x, g)
    assert (seen[0].nstep == seen[0].nstep[0]).all()
    assert (seen[0].abs_lowest == seen[0].abs_lowest[0]).all()


@pytest.mark.parametrize("name", ["gmres", "bicgstab", "anderson", "broyden"])
def test_the_tolerance_is_relative_to_the_whole_cotangent(name: str) -> None:
    make, _, W, x = problems.graph()
    x.requires_grad_()
    seen: list[Any] = []
    f = make(W, x)
    z = fixed_point(f, torch.zeros_like(x), solver=FixedPointIter(), coupled=True,
                    stop=StopRule(100, 1e-12),
                    backward=implicit(name, 80, 1e-4, writer=seen.append)).z  # fmt: skip
    g = torch.randn_like(x)
    g[1:] *= 1e-9
    h = z.detach().requires_grad_()
    fh = f(h)
    (got,) = torch.autograd.grad(z, x, g)
    # The gradient of x is (f_x)^T u with the diagonal f_x = 1 - tanh^2 = 1 - z^2.
    u = got / (1 - h.detach().square())
    residual = g + torch.autograd.grad(fh, h, u)[0] - u
    assert float(residual.norm() / g.norm()) <= 1.1e-4
    assert (seen[0].status == Status.CONVERGED).all()
    true = float(residual.norm() / g.norm())
    reported = float((seen[0].abs_lowest if name in SOLVERS else seen[0].rel_lowest)[0])
    assert 0.99 * true <= reported <= 1e-4  # Anderson's answer is the image of what it measured
