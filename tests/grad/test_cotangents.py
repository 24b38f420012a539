"""Cotangents of every size, or not finite; backward solves in low precision or without a budget."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, jvp

from tests import problems
from tests.grad.references import (
    both_paths,
    close,
    every_adjoint,
    implicit,
    looped,
    normal,
    solved,
)
from torchdeq.compat.functions import function_solver
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import ConvergenceWarning, Status, StopRule


@both_paths
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@every_adjoint
def test_a_cotangent_that_is_not_finite_spoils_its_own_sample_alone(
    name: str, bad: float, higher_order: bool
) -> None:
    f, z0 = problems.tanh_layer(batch=4, d=5, gain=0.6)
    x = torch.zeros_like(z0).requires_grad_()
    backward = implicit(name, tol=1e-10, higher_order=higher_order, on_failure="ignore")
    z = solved(lambda z: f(z + x), z0, backward)
    g = normal(4, 5)
    (clean,) = torch.autograd.grad(z, x, g, retain_graph=True)
    g[1, 2] = bad
    (got,) = torch.autograd.grad(z, x, g)
    others = [0, 2, 3]
    torch.testing.assert_close(got[others], clean[others], rtol=1e-7, atol=1e-9)
    assert not got[1].isfinite().all()
    if bad != bad:
        assert got[1].isnan().all()


@both_paths
def test_a_nan_cotangent_is_reported(higher_order: bool) -> None:
    f, z0 = problems.tanh_layer(batch=3, d=5, gain=0.6)
    x = torch.zeros_like(z0).requires_grad_()
    written = list[Any]()
    backward = Implicit(higher_order=higher_order, writer=written.append, on_failure="ignore")
    z = solved(lambda z: f(z + x), z0, backward)
    g = normal(3, 5)
    g[1] = torch.nan
    torch.autograd.grad(z, x, g)
    assert written[0].status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


@pytest.mark.parametrize("name", ["gmres", "bicgstab", "neumann", "fixed_point_iter", "anderson",
                                  "broyden"])  # fmt: skip
def test_the_adjoint_of_a_map_in_low_precision_stalls_at_its_floor(name: str) -> None:
    torch.manual_seed(0)
    layer = nn.Linear(64, 64)
    with torch.no_grad():
        layer.weight.copy_(problems.contraction(0.7, 64))
    x = torch.randn(8, 64, requires_grad=True)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(layer(z).float()) + x

    written = list[Any]()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-6),
                        writer=written.append)  # fmt: skip
    g = torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with torch.autocast("cpu", torch.bfloat16):
            z = fixed_point(f, torch.zeros(8, 64), stop=StopRule(60, 1e-6), backward=backward).z
            h = z.detach().requires_grad_()
            fh = f(h)
        (u,) = torch.autograd.grad(z, x, g)  # x is added in single precision: its gradient is u
    (stats,) = written
    assert not stats.failed.any()
    assert (stats.status == Status.STALLED).sum() >= 6  # one may meet the tolerance by luck
    assert stats.nfe < 60
    (image,) = torch.autograd.grad(fh, h, u)
    true = (g + image - u).norm(dim=1) / g.norm(dim=1)
    assert (true < 0.02).all()
    reported = stats.rel_lowest if name in LINEAR else stats.abs_lowest
    assert (reported < 4 * true).all()
    if name in LINEAR:  # no wishful recurrence; the others pick the luckiest of many products
        assert (reported > true / 4).all()


@both_paths
@every_adjoint
def test_a_backward_budget_of_zero_is_the_jacobian_free_gradient(
    name: str, higher_order: bool
) -> None:
    W, x = problems.contraction(0.6, 4).requires_grad_(), normal(3, 4).requires_grad_()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(0),
                        higher_order=higher_order)  # fmt: skip
    f = lambda z: torch.tanh(z @ W + x)  # noqa: E731
    z = solved(f, torch.zeros_like(x), backward)
    g = normal(3, 4, seed=5)
    got = torch.autograd.grad(z, (W, x), g)
    close(got, torch.autograd.grad(f(z.detach()), (W, x), g))
    transformed = grad(
        lambda x: (solved(lambda z: torch.tanh(z @ W.detach() + x), 0 * x, backward) * g).sum()
    )(x.detach())
    close(transformed, got[1])


@both_paths
@every_adjoint
def test_every_row_is_right_relative_to_its_own_cotangent(name: str, higher_order: bool) -> None:
    weights = torch.tensor([1.0, 1e-10, 1e-25, 1e-35, 1e30, 0.0])[:, None]
    W = problems.contraction(0.6, 6).float()
    x = normal(6, 6).float().requires_grad_()
    backward = implicit(name, tol=1e-5, higher_order=higher_order)
    z = fixed_point(lambda z: torch.tanh(z @ W + x), torch.zeros_like(x), stop=StopRule(60, 1e-5),
                    backward=backward).z  # fmt: skip
    g = normal(6, 6, seed=5).float()
    (got,) = torch.autograd.grad(z, x, weights * g)
    exact = x.detach().double().requires_grad_()
    end = looped(lambda z: torch.tanh(z @ W.double() + exact), torch.zeros_like(exact))
    (expected,) = torch.autograd.grad(end, exact, g.double())
    expected *= weights.double()
    error = (got.double() - expected)[:5].norm(dim=1) / expected[:5].norm(dim=1)
    assert (error < 1e-3).all(), error
    assert not got[5].any()


@every_adjoint
def test_a_sample_without_a_cotangent_is_solved_beside_one_that_is_not_finite(name: str) -> None:
    x = torch.randn(3, 4, dtype=torch.float64, requires_grad=True)
    written = list[Any]()
    backward = Implicit(
        solver=make_adjoint_solver(name, {}), writer=written.append, on_failure="ignore"
    )
    z = fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x), backward=backward).z
    g = torch.ones_like(z)
    g[0], g[1] = 0.0, torch.nan
    (grad,) = torch.autograd.grad(z, x, g)
    assert torch.equal(grad[0], torch.zeros_like(grad[0]))
    assert grad[1].isnan().all()
    assert [Status(code).name for code in written[0].status.tolist()] == [
        "CONVERGED", "NONFINITE", "CONVERGED",
    ]  # fmt: skip


@both_paths
@pytest.mark.parametrize("name", ["anderson", "broyden", "fixed_point_iter", "gmres"])
@pytest.mark.parametrize(("coupled", "batch"), [(True, 3), ("adjoint", 3), (None, 1)])
def test_a_backward_budget_of_zero_does_not_round_the_cotangent(
    name: str, higher_order: bool, coupled: Any, batch: int
) -> None:
    x = normal(batch, 5).bfloat16().requires_grad_()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(0),
                        higher_order=higher_order)  # fmt: skip
    z = fixed_point(lambda z: 0.5 * z + x, torch.zeros_like(x), coupled=coupled, backward=backward,
                    on_failure="ignore").z  # fmt: skip
    g = normal(batch, 5, seed=5).bfloat16()
    (u,) = torch.autograd.grad(z, x, g)  # x is added: its gradient is u
    assert torch.equal(u, g)


def test_a_backward_budget_of_zero_does_not_call_a_function_of_a_program() -> None:
    def one_step(f: Any, x0: Tensor, **options: Any) -> Any:
        return f(x0), [], {}

    written = list[Any]()
    x = normal(3, 4).requires_grad_()
    backward = Implicit(
        solver=function_solver(one_step, {}), stop=StopRule(0), writer=written.append
    )
    z = solved(lambda z: 0.5 * z + x, torch.zeros(3, 4, dtype=x.dtype), backward)
    (u,) = torch.autograd.grad(z, x, torch.ones_like(z))
    assert torch.equal(u, torch.ones_like(u))
    assert written[0].nfe == 0


@both_paths
@pytest.mark.parametrize("name", sorted(LINEAR))
def test_a_loose_tolerance_reports_a_cotangent_that_is_not_finite(
    name: str, higher_order: bool
) -> None:
    written = list[Any]()
    x = normal(3, 4).requires_grad_()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(20, 1.0),
                        higher_order=higher_order, writer=written.append)  # fmt: skip
    z = solved(lambda z: 0.3 * torch.tanh(z) + x, torch.zeros(3, 4, dtype=x.dtype), backward)
    g = torch.ones(3, 4, dtype=x.dtype)
    g[1] = torch.nan
    with pytest.warns(ConvergenceWarning, match="NONFINITE"):
        torch.autograd.grad(z, x, g)
    assert written[0].status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


@pytest.mark.parametrize(("coupled", "batch"), [(True, 3), (None, 1), (False, 3)])
def test_the_tangent_has_the_dtype_of_the_state(coupled: Any, batch: int) -> None:
    x = torch.ones(batch, 4, dtype=torch.float16)

    def z(x: Tensor) -> Tensor:
        return fixed_point(lambda z: 0.3 * torch.tanh(z) + x, torch.zeros_like(x), coupled=coupled,
                           backward=Implicit(stop=StopRule(40, 1e-3))).z  # fmt: skip

    primal, tangent, *_ = jvp(z, (x,), (torch.ones_like(x),))
    assert primal.dtype == tangent.dtype == torch.float16
