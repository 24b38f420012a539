"""Rows that depend on each other: declared, found by a probing product, or denied."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from itertools import combinations
from typing import Any

import numpy as np
import pytest
import scipy.optimize
import scipy.sparse.linalg
import torch
from torch import Tensor

from tests import problems
from tests.problems import GRAPH_TOL
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.linear import GMRES, LINEAR, Neumann
from torchdeq.solver import (
    SOLVERS,
    Anderson,
    Broyden,
    ConvergenceWarning,
    FixedPointIter,
    Status,
    StopRule,
)

DOUBLE = torch.float64
ADJOINTS = [*SOLVERS, *LINEAR]
#: Each step is the same whether rows are one system or many. What a row returns is not: if it stops
#: where its own residual is small, it misses what other rows send it later.
PLAIN = ("fixed_point_iter", "simple_fixed_point_iter", "neumann")
PROBED = [name for name in ADJOINTS if name not in PLAIN and name != "auto"]


class Counted(torch.autograd.Function):
    """The identity; its backward counts the products with the Jacobian of a map."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, calls: list[int]) -> Tensor:
        ctx.calls = calls
        return z.clone()

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, None]:
        ctx.calls.append(1)
        return g, None


def counting(f: Callable[[Tensor], Tensor]) -> tuple[Callable[[Tensor], Tensor], list[int]]:
    """A map and the list that grows by one with every product with its transposed Jacobian."""
    calls: list[int] = []
    return lambda z: f(Counted.apply(z, calls)), calls


def flat_anderson(f: Callable[[Tensor], Tensor], z0: Tensor, tol: float) -> int:
    """Evaluations that SciPy's Anderson mixing needs for the flat system."""
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


def flat_gmres(f: Callable[[Tensor], Tensor], z: Tensor, g: Tensor, tol: float) -> int:
    """Products that SciPy's GMRES needs for the flat adjoint system."""
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


def sequential(seed: int = 0) -> tuple[Any, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """The chain as rows, its tensors, a cotangent, and the gradients of the chain in sequence."""
    at_once, step_by_step, W, x = problems.chain(seed=seed)
    W, x = W.requires_grad_(), x.requires_grad_()
    g = torch.randn(x.shape, generator=torch.Generator().manual_seed(seed), dtype=DOUBLE)
    return at_once, W, x, g, torch.autograd.grad(step_by_step(W, x), (W, x), g)


def test_plain_iteration_needs_fifteen_to_forty_evaluations_for_the_graph() -> None:
    make, A, W, x = problems.graph()
    assert torch.equal(A, A.mT)
    assert (A > 0).double().mean() < 0.2
    found = fixed_point(make(W, x), torch.zeros_like(x), solver=FixedPointIter(), coupled=True,
                        stop=StopRule(60, GRAPH_TOL))  # fmt: skip
    assert 15 <= found.stats.nfe <= 40


@pytest.mark.parametrize("seed", range(4))
def test_anderson_on_a_declared_graph_needs_little_more_than_one_flat_system(seed: int) -> None:
    make, _, W, x = problems.graph(seed=seed)
    f, z0 = make(W, x), torch.zeros_like(x)
    found = fixed_point(f, z0, solver=Anderson(), stop=StopRule(100, GRAPH_TOL), coupled=True)
    assert float((f(found.z) - found.z).norm()) <= GRAPH_TOL
    assert found.stats.nfe <= 1.5 * flat_anderson(f, z0, GRAPH_TOL)


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


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", ADJOINTS)
def test_the_gradient_of_a_chain_given_as_rows_is_that_of_the_sequence(
    name: str, higher_order: bool
) -> None:
    at_once, W, x, g, expected = sequential()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-9),
                        higher_order=higher_order)  # fmt: skip
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                        stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip
        got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_loss_of_the_last_row_of_a_chain_reaches_the_first(name: str, higher_order: bool) -> None:
    """At first every row but one looks solved: its residual is zero until news arrive."""
    at_once, W, x, g, _ = sequential()
    g[:-1] = 0
    _, step_by_step, *_ = problems.chain()
    expected = torch.autograd.grad(step_by_step(W, x), (W, x), g)
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-9),
                        higher_order=higher_order)  # fmt: skip
    z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                    stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip
    got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def hidden(seed: int = 0) -> tuple[Any, tuple[Tensor, ...], tuple[Tensor, ...]]:
    """A hidden state over a graph and a readout of each row; the loss sees the readout alone.

    The first product with the transposed Jacobian leads from the readout to the hidden state of the
    same row: only the second shows that rows depend on each other.

    Returns:
        The map on pairs, its leaves, and the cotangents, of very different sizes by row.
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
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(80, 1e-9),
                        higher_order=higher_order)  # fmt: skip
    z0 = (torch.zeros(6, 3, dtype=DOUBLE), torch.zeros(6, 3, dtype=DOUBLE))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        z = fixed_point(f, z0, solver=FixedPointIter(), stop=StopRule(150, 1e-12),
                        backward=backward).z  # fmt: skip
        got = torch.autograd.grad(z, leaves, g)
    error = max(float((a - b).norm() / b.norm()) for a, b in zip(got, expected, strict=True))
    reported = any(issubclass(w.category, ConvergenceWarning) for w in told)
    assert error < 1e-6 or reported, f"wrong by {error:.1e} without a word"


@pytest.mark.parametrize("name", ["gmres", "anderson"])
def test_one_pair_of_coupled_rows_is_found_wherever_it_is(name: str) -> None:
    W = problems.contraction(0.5, 3)
    wrong = []
    for i, j in combinations(range(0, 40, 3), 2):
        mix = torch.eye(40, dtype=DOUBLE)
        mix[i, j] = 0.5
        x = torch.zeros(40, 3, dtype=DOUBLE, requires_grad=True)
        backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-9),
                            on_failure="raise")  # fmt: skip
        z = fixed_point(lambda z, mix=mix, x=x: mix @ z @ W + x, torch.zeros_like(x),
                        solver=FixedPointIter(), stop=StopRule(60, 1e-12),
                        backward=backward).z  # fmt: skip
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
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-9))
    z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                    stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip
    got = torch.autograd.grad(z, (W, x), g, is_grads_batched=True)
    end = step_by_step(W, x)
    expected = [torch.autograd.grad(end, (W, x), row, retain_graph=True) for row in g]
    for mine, theirs in zip(got, zip(*expected, strict=True), strict=True):
        torch.testing.assert_close(mine, torch.stack(theirs), atol=1e-6, rtol=1e-6)


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_declared_chain_whose_rows_start_solved_is_solved_as_a_whole(name: str) -> None:
    """With input at the first row alone, the others have residual zero until it reaches them."""
    at_once, step_by_step, W, x = problems.chain()
    x[1:] = 0
    solver: Any = make_adjoint_solver(name, {})
    z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=solver, coupled=True,
                    stop=StopRule(60, 1e-9)).z  # fmt: skip
    torch.testing.assert_close(z, step_by_step(W, x), atol=1e-8, rtol=0)


def test_the_default_backward_gives_the_gradient_of_a_chain() -> None:
    at_once, W, x, g, expected = sequential()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                        stop=StopRule(60, 1e-10)).z  # fmt: skip
        got = torch.autograd.grad(z, (W, x), g)
    for a, b in zip(got, expected, strict=True):
        assert float((a - b).norm() / b.norm()) < 1e-5  # the tolerance of the adjoint is 1e-6


@pytest.mark.parametrize("coupled", [True, "adjoint"])
@pytest.mark.parametrize("name", ADJOINTS)
def test_a_declared_chain_is_right_with_every_adjoint_solver(name: str, coupled: Any) -> None:
    at_once, W, x, g, expected = sequential()
    seen: list[Any] = []
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-9),
                        writer=seen.append)  # fmt: skip
    z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(), coupled=coupled,
                    stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip
    got = torch.autograd.grad(z, (W, x), g)
    torch.testing.assert_close(got, expected, atol=1e-6, rtol=1e-6)
    assert seen[0].status.shape == (len(x),)
    assert (seen[0].status == Status.CONVERGED).all() or name == "simple_fixed_point_iter"


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("name", [*PLAIN, *LINEAR])
def test_coupling_denied_is_right_or_reported_never_silently_wrong(
    name: str, higher_order: bool
) -> None:
    """`coupled=False` solves rows as separate systems; on coupled ones that may fail, aloud.

    A quasi-Newton method takes the program's word for it: testing would cost what it saves.
    """
    at_once, W, x, g, expected = sequential()
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(40, 1e-8),
                        higher_order=higher_order)  # fmt: skip
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(), coupled=False,
                        stop=StopRule(60, 1e-10), backward=backward).z  # fmt: skip
        got = torch.autograd.grad(z, (W, x), g)
    right = all(torch.allclose(a, b, atol=1e-5) for a, b in zip(got, expected, strict=True))
    assert right or any(issubclass(w.category, ConvergenceWarning) for w in told)


def test_coupled_rows_cannot_leave_the_batch() -> None:
    make, _, W, x = problems.graph(nodes=5)
    for coupled in (True, "adjoint"):
        with pytest.raises(ValueError, match="compact=True"):
            fixed_point(make(W, x), torch.zeros_like(x), coupled=coupled, compact=True)


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("budget", [3, 200])
def test_all_rows_of_a_declared_graph_share_one_status(name: str, budget: int) -> None:
    make, _, W, x = problems.graph()
    solver = make_adjoint_solver(name, {})
    found = fixed_point(make(W, x), torch.zeros_like(x), solver=solver, coupled=True,  # type: ignore[arg-type]
                        stop=StopRule(budget, GRAPH_TOL), on_failure="ignore")  # fmt: skip
    stats = found.stats
    for key in ("abs_lowest", "rel_lowest", "nstep"):
        assert stats[key].shape == (len(x),)
        assert (stats[key] == stats[key][0]).all()
    assert stats.status.shape == (len(x),)
    assert (stats.status == stats.status[0]).all()
    if name == "simple_fixed_point_iter":  # watches nothing
        return
    assert int(stats.status[0]) == (Status.MAX_ITER if budget == 3 else Status.CONVERGED)
    if budget > 3:
        z = found.z
        assert float((make(W, x)(z) - z).norm()) < 2 * GRAPH_TOL  # of the whole, not of each row


def test_only_the_adjoint_is_one_system_if_that_is_what_was_declared() -> None:
    """Row i of a chain is known after i + 1 evaluations, and converged after one more."""
    at_once, W, x, g, _ = sequential()
    seen: list[Any] = []
    found = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                        stop=StopRule(60, 1e-13), coupled="adjoint",
                        backward=Implicit(writer=seen.append))  # fmt: skip
    assert len(found.stats.nstep.unique()) > len(x) // 2
    torch.autograd.grad(found.z, x, g)
    assert (seen[0].nstep == seen[0].nstep[0]).all()
    assert (seen[0].abs_lowest == seen[0].abs_lowest[0]).all()


@pytest.mark.parametrize("name", ["gmres", "bicgstab", "anderson", "broyden"])
def test_the_tolerance_is_relative_to_the_whole_cotangent(name: str) -> None:
    make, _, W, x = problems.graph()
    x.requires_grad_()
    seen: list[Any] = []
    f = make(W, x)
    z = fixed_point(f, torch.zeros_like(x), solver=FixedPointIter(), coupled=True,
                    stop=StopRule(100, 1e-12), backward=Implicit(
                        solver=make_adjoint_solver(name, {}), stop=StopRule(80, 1e-4),
                        writer=seen.append)).z  # fmt: skip
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


def plain_rows(
    name: str, coupled: Any, batch: int = 3, tol: float = 1e-6
) -> tuple[int, int, Tensor]:
    """Products of rows that do not depend on each other: as reported, as counted, the gradient."""
    f0, z0 = problems.tanh_layer(batch, gain=0.6)
    x = torch.zeros_like(z0).requires_grad_()
    f, calls = counting(lambda z: f0(z) + x)
    seen: list[Any] = []
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(30, tol),
                        writer=seen.append)  # fmt: skip
    z = fixed_point(f, z0, stop=StopRule(60, 1e-10), backward=backward, coupled=coupled).z
    (grad,) = torch.autograd.grad(z, x, torch.randn(z.shape, dtype=DOUBLE,
                                  generator=torch.Generator().manual_seed(3)))  # fmt: skip
    return seen[0].nfe, len(calls), grad


@pytest.mark.parametrize("name", PROBED)
def test_undeclared_rows_cost_one_product_and_one_that_tests_the_answer(name: str) -> None:
    """A Krylov method tests its answer anyway."""
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
        backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(budget, 1e-10),
                            on_failure="ignore")  # fmt: skip
        z = fixed_point(f, z0, stop=StopRule(90, 1e-10), backward=backward).z
        torch.autograd.grad(z.sum(), x)
        assert len(calls) <= budget


def test_coupling_that_nobody_declared_is_noted_once_and_not_warned_about(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("torchdeq.notes._written", set())  # another test may have seen the note
    at_once, W, x, g, _ = sequential()

    def gradient(coupled: Any) -> None:
        z = fixed_point(at_once(W, x), torch.zeros_like(x), solver=FixedPointIter(),
                        stop=StopRule(60, 1e-10), coupled=coupled).z  # fmt: skip
        torch.autograd.grad(z, W, g)

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("scale", [1e-3, 1e3])
def test_rounding_is_not_taken_for_coupling(dtype: torch.dtype, scale: float) -> None:
    """Wide reductions round differently for other factors; GMRES by rows stays by rows."""
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
    """Among very many rows some have the same factor."""
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


@pytest.mark.parametrize("name", ["gmres", "bicgstab", "anderson", "fixed_point_iter"])
def test_absolute_residuals_of_the_writer_are_relative_to_the_cotangent(name: str) -> None:
    f0, z0 = problems.tanh_layer(3, gain=0.8)
    x = torch.zeros_like(z0).requires_grad_()
    seen: list[Any] = []
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-6),
                        writer=seen.append)  # fmt: skip
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
