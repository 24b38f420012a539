"""The evaluations and products that coupling, and the test for it, cost; notes and statistics."""

from __future__ import annotations

import logging
import warnings
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.linalg
import torch
from torch import Tensor

from tests import problems
from tests.problems import GRAPH_TOL
from tests.properties.coupled import (
    DOUBLE,
    PLAIN,
    PROBED,
    Map,
    counting,
    implicit,
    sequential,
    solve_plainly,
)
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import Anderson, FixedPointIter, StopRule


def flat_anderson(f: Map, z0: Tensor, tol: float) -> int:
    """Return the number of evaluations in SciPy's Anderson mixing on the flat system."""
    calls = 0

    def residual(v: Any) -> Any:
        nonlocal calls
        calls += 1
        z = torch.from_numpy(np.array(v)).view_as(z0)
        return (f(z) - z).numpy().ravel()

    start = np.zeros(z0.numel())
    scipy.optimize.anderson(
        residual, start, alpha=1.0, M=6, f_tol=tol, tol_norm=np.linalg.norm, line_search=None
    )
    return calls


def flat_gmres(f: Map, z: Tensor, g: Tensor, tol: float) -> int:
    """Return the number of products in SciPy's GMRES on the flat adjoint system."""
    h = z.detach().requires_grad_()
    fz, calls = f(h), 0

    def product(v: Any) -> Any:
        nonlocal calls
        calls += 1
        u = torch.from_numpy(np.array(v)).view_as(z)
        return (u - torch.autograd.grad(fz, h, u, retain_graph=True)[0]).numpy().ravel()

    system = scipy.sparse.linalg.LinearOperator((z.numel(), z.numel()), product, dtype=float)
    _, info = scipy.sparse.linalg.gmres(system, g.numpy().ravel(), rtol=tol, restart=60, maxiter=1)
    assert not info
    return calls


def test_plain_iteration_needs_fifteen_to_forty_evaluations_for_the_graph() -> None:
    make, A, W, x = problems.graph()
    assert torch.equal(A, A.mT)
    assert (A > 0).double().mean() < 0.2
    stats = fixed_point(make(W, x), torch.zeros_like(x), solver=FixedPointIter(), coupled=True,
                        stop=StopRule(60, GRAPH_TOL)).stats  # fmt: skip
    assert 15 <= stats.nfe <= 40


@pytest.mark.parametrize("seed", range(4))
def test_anderson_on_a_declared_graph_needs_little_more_than_one_flat_system(seed: int) -> None:
    make, _, W, x = problems.graph(seed=seed)
    f, z0 = make(W, x), torch.zeros_like(x)
    solution = fixed_point(f, z0, solver=Anderson(), stop=StopRule(100, GRAPH_TOL), coupled=True)
    assert float((f(solution.z) - solution.z).norm()) <= GRAPH_TOL
    assert solution.stats.nfe <= 1.5 * flat_anderson(f, z0, GRAPH_TOL)


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("coupled", [True, "adjoint", None])
def test_gmres_on_a_graph_needs_little_more_than_one_flat_system(seed: int, coupled: Any) -> None:
    make, _, W, x = problems.graph(seed=seed)
    W.requires_grad_()
    seen: list[Any] = []
    f, calls = counting(make(W, x))
    z = fixed_point(f, torch.zeros_like(x), solver=FixedPointIter(), coupled=coupled,
                    stop=StopRule(100, 1e-12), backward=Implicit(
                        stop=StopRule(60, GRAPH_TOL), writer=seen.append)).z  # fmt: skip
    g = torch.randn_like(x)
    (got,) = torch.autograd.grad(z, W, g)
    assert len(calls) == seen[0].nfe
    assert seen[0].nfe <= 1.5 * flat_gmres(make(W, x), z, g, GRAPH_TOL)
    unrolled = torch.zeros_like(x)
    for _ in range(150):
        unrolled = make(W, x)(unrolled)
    (expected,) = torch.autograd.grad(unrolled, W, g)
    assert float((got - expected).norm() / expected.norm()) < 20 * GRAPH_TOL


def plain_rows(
    name: str, coupled: Any, batch: int = 3, tol: float = 1e-6
) -> tuple[int, int, Tensor]:
    """Differentiate independent rows; return the products as reported and counted, the gradient."""
    f0, z0 = problems.tanh_layer(batch, gain=0.6)
    x = torch.zeros_like(z0).requires_grad_()
    f, calls = counting(lambda z: f0(z) + x)
    seen: list[Any] = []
    backward = implicit(name, 30, tol, writer=seen.append)
    z = fixed_point(f, z0, stop=StopRule(60, 1e-10), backward=backward, coupled=coupled).z
    (grad,) = torch.autograd.grad(z, x, torch.randn(z.shape, dtype=DOUBLE,
                                  generator=torch.Generator().manual_seed(3)))  # fmt: skip
    return seen[0].nfe, len(calls), grad


@pytest.mark.parametrize("name", PROBED)
def test_undeclared_rows_cost_one_product_and_one_that_tests_the_answer(name: str) -> None:
    """A Krylov method tests its answer itself."""
    reported, counted, grad = plain_rows(name, None)
    alone, alone_counted, same = plain_rows(name, False)
    assert reported == counted
    assert alone == alone_counted
    assert counted == alone_counted + (1 if name in LINEAR else 2)
    torch.testing.assert_close(grad, same, rtol=1e-10, atol=1e-12)  # the probe changes nothing


@pytest.mark.parametrize("name", PLAIN)
def test_rules_that_take_no_row_apart_need_at_most_one_product_to_find_out(name: str) -> None:
    reported, counted, grad = plain_rows(name, None)
    _, alone, same = plain_rows(name, False)
    assert reported == counted
    assert alone <= counted <= alone + 1
    torch.testing.assert_close(grad, same, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("name", PROBED)
def test_nothing_is_probed_for_one_row_without_a_tolerance_or_where_coupling_is_declared(
    name: str,
) -> None:
    assert plain_rows(name, None, batch=1)[:2] == plain_rows(name, False, batch=1)[:2]
    assert plain_rows(name, None, tol=0.0)[:2] == plain_rows(name, False, tol=0.0)[:2]
    reported, counted, _ = plain_rows(name, True)
    assert reported == counted


@pytest.mark.parametrize("name", PROBED)
def test_the_probing_product_counts_against_the_budget(name: str) -> None:
    f0, z0 = problems.tanh_layer(3, gain=0.9)
    x = torch.zeros_like(z0).requires_grad_()
    for budget in (1, 2, 3):
        f, calls = counting(lambda z: f0(z) + x)
        backward = implicit(name, budget, 1e-10, on_failure="ignore")
        z = fixed_point(f, z0, stop=StopRule(90, 1e-10), backward=backward).z
        torch.autograd.grad(z.sum(), x)
        assert len(calls) <= budget


def test_coupling_that_nobody_declared_is_noted_once_and_not_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdeq.notes._written", set())  # another test may have seen the note
    at_once, W, x, g, _ = sequential()

    def gradient(coupled: Any) -> None:
        torch.autograd.grad(solve_plainly(at_once(W, x), x, coupled=coupled), W, g)

    with caplog.at_level(logging.INFO, logger="torchdeq"), warnings.catch_warnings():
        warnings.simplefilter("error")
        for coupled in (True, "adjoint"):
            gradient(coupled)
        declared = [r for r in caplog.records if "depend on each other" in r.getMessage()]
        for _ in range(3):
            gradient(None)
    notes = [r for r in caplog.records if "depend on each other" in r.getMessage()]
    assert not declared
    assert len(notes) == 1
    assert notes[0].levelno == logging.INFO
    assert notes[0].name.split(".")[0] == "torchdeq"
    assert "\n" not in notes[0].getMessage()


def test_rows_that_do_not_depend_on_each_other_are_not_noted(
    caplog: pytest.LogCaptureFixture,
) -> None:
    with caplog.at_level(logging.INFO, logger="torchdeq"):
        for name in PROBED:
            plain_rows(name, None)
    assert not caplog.records


@pytest.mark.parametrize("name", ["gmres", "bicgstab", "anderson", "fixed_point_iter"])
def test_absolute_residuals_of_the_writer_are_relative_to_the_cotangent(name: str) -> None:
    f0, z0 = problems.tanh_layer(3, gain=0.8)
    x = torch.zeros_like(z0).requires_grad_()
    seen: list[Any] = []
    backward = implicit(name, tol=1e-6, writer=seen.append)
    z = fixed_point(lambda z: f0(z) + x, z0, stop=StopRule(90, 1e-10), backward=backward).z
    torch.autograd.grad(z, x, 1e4 * torch.ones_like(z))
    assert (seen[0].abs_lowest <= 1e-6).all()


@pytest.mark.parametrize("name", ["anderson", "fixed_point_iter", "gmres", "neumann"])
def test_the_backward_solve_looks_only_as_often_as_it_is_told(name: str) -> None:
    def products(every: int) -> int:
        f0, z0 = problems.tanh_layer(3, gain=0.9)
        x = torch.zeros_like(z0).requires_grad_()
        seen: list[Any] = []
        backward = Implicit(solver=make_adjoint_solver(name, {}), writer=seen.append,
                            stop=StopRule(80, 1e-6, check_every=every))  # fmt: skip
        z = fixed_point(lambda z: f0(z) + x, z0, stop=StopRule(90, 1e-10), backward=backward,
                        coupled=False).z  # fmt: skip
        torch.autograd.grad(z.sum(), x)
        assert seen[0].converged.all()
        return int(seen[0].nfe)

    often = products(1)
    assert often <= products(10) <= often + 11
