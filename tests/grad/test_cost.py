"""The number of calls of f and of products that a backward pass costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests import problems
from tests.grad.references import DOUBLE, Map, close, every_adjoint, looped, normal
from torchdeq import _torch
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, Phantom, make_adjoint_solver
from torchdeq.solver import FixedPointIter, StopRule


@pytest.mark.parametrize("tol", [0.0, 1e-8])
@every_adjoint
def test_a_checkpoint_around_the_solve_repeats_it_once(name: str, tol: float) -> None:
    with torch.autograd.graph.save_on_cpu():
        if _torch.saved_tensor_hooks() is None:
            pytest.skip("this torch does not show its hooks: each product repeats the solve")
    W, x = problems.contraction(0.6, 4).requires_grad_(), normal(3, 4).requires_grad_()
    f, calls = problems.counted(lambda z, x: torch.tanh(z @ W + x))

    def run(x: Tensor) -> Tensor:
        return fixed_point(lambda z: f(z, x), torch.zeros_like(x), solver=FixedPointIter(),
                           stop=StopRule(15, tol), on_failure="ignore",
                           backward=Implicit(solver=make_adjoint_solver(name, {}),
                                             stop=StopRule(12, 0.0))).z  # fmt: skip

    expected = torch.autograd.grad(run(x).sum(), (W, x))
    calls.clear()
    z = checkpoint(run, x, use_reentrant=False)
    forward = len(calls)
    calls.clear()
    got = torch.autograd.grad(z.sum(), (W, x))
    assert len(calls) <= forward
    close(got, expected)


def test_sampled_states_with_higher_order_share_one_solve() -> None:
    W, x = problems.contraction(0.9, 4), normal(3, 4).requires_grad_()
    f, calls = problems.counted(lambda z: torch.tanh(z @ W + x))
    solution = fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), stop=StopRule(40, 0.0),
                           record=[(k, Phantom()) for k in (10, 20, 30)],
                           backward=Implicit(higher_order=True))  # fmt: skip
    assert len(calls) == 44  # the solve, and one call with a graph for each state
    assert len(solution.states) == 4
    plain = fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), stop=StopRule(40, 0.0),
                        record=[(k, Phantom()) for k in (10, 20, 30)])  # fmt: skip
    for got, expected in zip(solution.states, plain.states, strict=True):
        close(got, expected)
        (a,) = torch.autograd.grad(got.square().sum(), x, retain_graph=True)
        (b,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_batch_statistics_cost_no_more_products_with_higher_order() -> None:
    x = normal(8, 4)

    def gradients(run: Callable[[Map, Tensor], Tensor]) -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        norm, mix = nn.BatchNorm1d(4).double(), nn.Linear(4, 4).double()
        with torch.no_grad():
            mix.weight.mul_(0.8)
        leaf = x.clone().requires_grad_()
        z = run(lambda z: 0.5 * torch.tanh(norm(mix(z) + leaf)) + leaf, torch.zeros_like(x))
        return torch.autograd.grad(z.sin().sum(), (leaf, *norm.parameters(), *mix.parameters()))

    def solve(higher_order: bool) -> tuple[int, tuple[Tensor, ...]]:
        seen: list[Any] = []
        backward = Implicit(stop=StopRule(60, 1e-8), higher_order=higher_order,
                            writer=seen.append)  # fmt: skip
        grads = gradients(
            lambda f, z0: fixed_point(f, z0, stop=StopRule(200, 1e-11), backward=backward,
                                      solver=FixedPointIter()).z
        )  # fmt: skip
        assert len(seen) == 1
        return seen[0].nfe, grads

    (first_products, first), (products, higher) = solve(False), solve(True)
    expected = gradients(looped)
    close(first, expected, atol=1e-6)
    close(higher, expected, atol=1e-6)
    assert products <= 1.2 * first_products
