"""SHINE: the backward solve starts from the inverse Jacobian of the forward solve."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit
from torchdeq.linear import GMRES
from torchdeq.solver import Anderson, Broyden, StopRule
from torchdeq.solver.low_rank import LowRank


def solve(init: Any, rho: float, d: int = 64, batch: int = 4) -> tuple[Tensor, Tensor, int]:
    """Return the gradient by Broyden, the dense gradient, and the number of products."""
    torch.manual_seed(0)
    A = problems.rotation(rho, d)
    b = torch.randn(batch, d, dtype=torch.float64, requires_grad=True)
    g = torch.randn(batch, d, dtype=torch.float64)
    seen: list[Any] = []
    backward = Implicit(solver=Broyden(l_thres=None), stop=StopRule(300, 1e-9),
                        init=init, writer=seen.append)  # fmt: skip
    z = fixed_point(lambda z: z @ A.mT + b, torch.zeros(batch, d, dtype=torch.float64),
                    solver=Broyden(l_thres=None), stop=StopRule(300, 1e-9),
                    backward=backward).z  # fmt: skip
    (got,) = torch.autograd.grad(z, b, g)
    exact = torch.linalg.solve((torch.eye(d, dtype=torch.float64) - A).mT, g.mT).mT
    return got, exact, seen[0].nfe


def test_the_gradient_is_exact_and_takes_fewer_products() -> None:
    got, exact, products = solve("shine", 0.95)
    torch.testing.assert_close(got, exact, rtol=0, atol=1e-7)
    plain, _, without = solve("zeros", 0.95)
    torch.testing.assert_close(plain, exact, rtol=0, atol=1e-7)
    assert products < without


def test_a_transposed_operator_is_the_transpose_and_falls_back_to_it() -> None:
    H = LowRank(torch.randn(2, 5, dtype=torch.float64), 4)
    for _ in range(3):
        H.make_room(remaining=3)
        H.U[H.rank], H.V[H.rank] = torch.randn(2, 2, 5, dtype=torch.float64)
        H.extend()
    T, x = H.transposed(2), torch.randn(2, 5, dtype=torch.float64)
    torch.testing.assert_close(T.matvec(x), H.rmatvec(x))
    torch.testing.assert_close(T.rmatvec(x), H.matvec(x))
    for _ in range(2):
        assert not T.make_room(remaining=3)
        T.U[T.rank], T.V[T.rank] = torch.randn(2, 2, 5, dtype=torch.float64)
        T.extend()
    assert T.make_room(remaining=3)
    torch.testing.assert_close(T.matvec(x), H.rmatvec(x))


def test_a_solve_that_learnt_nothing_leaves_the_plain_start() -> None:
    x = torch.randn(2, 3, dtype=torch.float64, requires_grad=True)
    exact = torch.zeros(2, 3, dtype=torch.float64)
    z = fixed_point(lambda z: z * 0.5 + 0 * x, exact, solver=Broyden(),
                    backward=Implicit(solver=Broyden(), init="shine")).z  # fmt: skip
    assert torch.equal(torch.autograd.grad(z.sum(), x)[0], torch.zeros_like(x))


def test_says_what_does_not_fit() -> None:
    x = torch.randn(2, 3, requires_grad=True)
    with pytest.raises(ValueError, match="backward solver must be broyden, got GMRES"):
        Implicit(solver=GMRES(), init="shine")
    with pytest.raises(ValueError, match="drop higher_order"):
        Implicit(solver=Broyden(), init="shine", higher_order=True)
    with pytest.raises(ValueError, match="did you mean 'shine'"):
        Implicit(solver=Broyden(), init="shne")  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="must be Broyden's on the whole batch: got Anderson"):
        fixed_point(lambda z: 0.5 * z + x, torch.zeros_like(x), solver=Anderson(),
                    backward=Implicit(solver=Broyden(), init="shine"))  # fmt: skip


@pytest.mark.parametrize("coupled", [None, "adjoint"])
def test_coupled_samples_leave_the_inverse_of_the_forward_solve_alone(coupled: Any) -> None:
    """The inverse is one of each sample, but the adjoint of all samples is one system."""
    A = problems.contraction(0.8, 4)
    x = torch.randn(4, 3, dtype=torch.float64, requires_grad=True)
    z = fixed_point(lambda z: A @ z + x, torch.zeros_like(x), solver=Broyden(),
                    stop=StopRule(200, 1e-12), coupled=coupled,
                    backward=Implicit(solver=Broyden(), stop=StopRule(100, 1e-10), init="shine"),
                    ).z  # fmt: skip
    g = torch.randn_like(z)
    exact = torch.linalg.solve((torch.eye(4, dtype=torch.float64) - A).mT, g)
    torch.testing.assert_close(torch.autograd.grad(z, x, g)[0], exact, rtol=0, atol=1e-8)
