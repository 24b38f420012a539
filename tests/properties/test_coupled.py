"""Gradients of rows that depend on each other, although the program does not declare it."""

from __future__ import annotations

import warnings
from itertools import combinations
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from tests.grad.references import looped, solved
from tests.properties.coupled import ADJOINTS, DOUBLE, implicit, sequential, solve_plainly
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit
from torchdeq.linear import GMRES, Neumann
from torchdeq.solver import (
    Anderson,
    Broyden,
    ConvergenceWarning,
    FixedPointIter,
    Status,
    StopRule,
)


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", ADJOINTS)
def test_the_gradient_of_a_chain_given_as_rows_is_that_of_the_sequence(
    name: str, higher_order: bool
) -> None:
    at_once, W, x, g, expected = sequential()
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        z = solve_plainly(at_once(W, x), x, implicit(name, higher_order=higher_order))
        got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_loss_of_the_last_row_of_a_chain_reaches_the_first(name: str, higher_order: bool) -> None:
    """At first every row but one looks solved: its residual is zero until the loss reaches it."""
    at_once, W, x, g, _ = sequential()
    g[:-1] = 0
    _, step_by_step, *_ = problems.chain()
    expected = torch.autograd.grad(step_by_step(W, x), (W, x), g)
    z = solve_plainly(at_once(W, x), x, implicit(name, higher_order=higher_order))
    got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def hidden(seed: int = 0) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """Return a map with a hidden state over a graph and a readout of each row.

    The loss sees the readout alone. The first product with the transposed Jacobian leads from the
    readout to the hidden state of the same row: only the second shows that rows depend on each
    other.

    Returns:
        The map on pairs, its leaves, and cotangents whose sizes differ much between rows.
    """
    make, _, W, x = problems.graph(nodes=6, d=3, gain=0.8, seed=seed)
    V = problems.contraction(0.8, 3, seed + 1).requires_grad_()
    W, x = W.requires_grad_(), x.requires_grad_()

    def f(h: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        return make(W, x)(h), torch.sin(h @ V)

    generator = torch.Generator().manual_seed(seed)
    g = torch.randn(6, 3, generator=generator, dtype=DOUBLE)
    return f, (W, x, V), (torch.zeros_like(g), g * 10.0 ** torch.arange(-2, 4)[:, None])


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", ADJOINTS)
def test_coupling_that_the_first_product_does_not_show_is_right_or_reported(
    name: str, higher_order: bool
) -> None:
    f, leaves, g = hidden()
    a = b = torch.zeros(6, 3, dtype=DOUBLE)
    for _ in range(150):
        a, b = f(a, b)
    expected = torch.autograd.grad((a, b), leaves, g)
    backward = implicit(name, max_iter=80, higher_order=higher_order)
    z0 = (torch.zeros(6, 3, dtype=DOUBLE), torch.zeros(6, 3, dtype=DOUBLE))
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        z = fixed_point(f, z0, solver=FixedPointIter(), stop=StopRule(150, 1e-12),
                        backward=backward).z  # fmt: skip
        got = torch.autograd.grad(z, leaves, g)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
    reported = any(issubclass(w.category, ConvergenceWarning) for w in caught)
    assert error < 1e-6 or reported, f"wrong by {error:.1e} without a warning"


@pytest.mark.parametrize("name", ["gmres", "anderson"])
def test_one_pair_of_coupled_rows_is_found_wherever_it_is(name: str) -> None:
    W = problems.contraction(0.5, 3)
    wrong = []
    for i, j in combinations(range(0, 40, 3), 2):
        mix = torch.eye(40, dtype=DOUBLE)
        mix[i, j] = 0.5
        x = torch.zeros(40, 3, dtype=DOUBLE, requires_grad=True)
        f = lambda z, mix=mix, x=x: mix @ z @ W + x  # noqa: E731
        z = solve_plainly(f, x, implicit(name, on_failure="raise"))
        g = 10.0 ** torch.linspace(-1, 1, 40, dtype=DOUBLE)[:, None].expand_as(x)
        (got,) = torch.autograd.grad(z, x, g)
        u = g
        for _ in range(80):
            u = mix.mT @ u @ W.mT + g
        if float(((got - u).norm(dim=1) / u.norm(dim=1)).max()) > 1e-5:
            wrong.append((i, j))
    assert not wrong


@pytest.mark.parametrize("name", [name for name in ADJOINTS if name != "auto"])
def test_several_cotangents_of_a_chain_at_once(name: str) -> None:
    at_once, W, x, _, _ = sequential()
    _, step_by_step, *_ = problems.chain()
    g = torch.randn(3, *x.shape, dtype=DOUBLE)
    g[1, :-1] = 0  # a loss of the last row
    z = solve_plainly(at_once(W, x), x, implicit(name))
    got = torch.autograd.grad(z, (W, x), g, is_grads_batched=True)
    end = step_by_step(W, x)
    expected = [torch.autograd.grad(end, (W, x), row, retain_graph=True) for row in g]
    for together, one_by_one in zip(got, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(together, torch.stack(one_by_one), atol=1e-6, rtol=1e-6)


def test_the_default_backward_gives_the_gradient_of_a_chain() -> None:
    at_once, W, x, g, expected = sequential()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = solve_plainly(at_once(W, x), x)
        got = torch.autograd.grad(z, (W, x), g)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5  # the tolerance of the adjoint is 1e-6


def test_the_default_gradient_of_a_graph_is_right_without_a_warning() -> None:
    make, _, W, x = problems.graph()
    W.requires_grad_()
    seen: list[Any] = []
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = solved(make(W, x), torch.zeros_like(x), Implicit(writer=seen.append))
        (got,) = torch.autograd.grad(z.square().sum(), W)
    (expected,) = torch.autograd.grad(looped(make(W, x), torch.zeros_like(x)).square().sum(), W)
    assert float((got - expected).norm() / expected.norm()) < 1e-5
    assert seen[0].nfe <= 20
    assert (seen[0].status == Status.CONVERGED).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_rounding_is_not_taken_for_coupling(dtype: torch.dtype, scale: float) -> None:
    """Wide reductions round differently for other factors; GMRES still solves row by row."""
    generator = torch.Generator().manual_seed(0)
    W = torch.randn(256, 256, generator=generator).to(dtype) / 32
    x = scale * torch.randn(16, 256, generator=generator).to(dtype)
    x.requires_grad_()
    seen: list[Any] = []
    z = fixed_point(lambda z: scale * torch.tanh(z @ W / scale) + x, torch.zeros_like(x),
                    stop=StopRule(60, 1e-5, "rel"), on_failure="ignore",
                    backward=Implicit(writer=seen.append)).z  # fmt: skip
    g = torch.randn(x.shape, generator=generator).to(dtype)
    g[3] = 0
    g[5] *= 1e-6
    torch.autograd.grad(z, x, g)
    assert len(seen[0].abs_lowest.unique()) > 1  # one system would have one residual


@pytest.mark.parametrize(
    "solver", [GMRES(confirm=False), GMRES(), Anderson(), Broyden(), FixedPointIter(), Neumann()]
)
def test_a_pair_of_rows_that_the_probe_cannot_tell_apart_is_right(solver: Any) -> None:
    """Among very many rows, the probe gives some the same factor."""
    batch, (i, j) = 200, (0, 121)
    x = torch.randn(batch, 2, dtype=DOUBLE, generator=torch.Generator().manual_seed(5))
    x.requires_grad_()
    mix = 0.4 * torch.eye(batch, dtype=DOUBLE)
    mix[j, i] = 0.5
    z = fixed_point(lambda z: mix @ z + x, torch.zeros_like(x), stop=StopRule(100, 1e-10),
                    backward=Implicit(solver=solver, stop=StopRule(100, 1e-10))).z  # fmt: skip
    g = torch.ones(batch, 2, dtype=DOUBLE)
    (got,) = torch.autograd.grad(z, x, g)
    exact = torch.linalg.solve((torch.eye(batch, dtype=DOUBLE) - mix).mT, g)
    torch.testing.assert_close(got, exact, atol=1e-7, rtol=0)
