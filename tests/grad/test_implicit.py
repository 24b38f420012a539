"""Implicit gradients, first order: against gradcheck, the dense formula and unrolled autograd."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from tests import problems
from tests.grad.references import saved_bytes
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit
from torchdeq.linear import GMRES, LINEAR
from torchdeq.solver import SOLVERS, Anderson, ConvergenceWarning, Status, StopRule

TIGHT = StopRule(300, 1e-13)
ADJOINTS: dict[str, Any] = {**SOLVERS, **LINEAR}


def leaf(*shape: int, scale: float = 1.0) -> Tensor:
    return (scale * torch.randn(*shape, dtype=torch.float64)).requires_grad_()


def exact(**kwargs: Any) -> Implicit:
    return Implicit(stop=StopRule(300, 1e-12), **kwargs)


@pytest.mark.parametrize("name", list(ADJOINTS))
def test_passes_gradcheck_with_every_solver_for_the_adjoint(name: str) -> None:
    backward = exact(solver=ADJOINTS[name]())

    def run(W: Tensor, x: Tensor) -> Tensor:
        z0 = torch.zeros_like(x)
        return fixed_point(
            lambda z: torch.tanh(z @ W.mT + x), z0, stop=TIGHT, backward=backward
        ).z  # fmt: skip

    assert gradcheck(run, (leaf(5, 5, scale=0.2), leaf(3, 5)))


@pytest.mark.parametrize("name", list(ADJOINTS))
def test_equals_the_dense_formula_on_affine_systems(name: str) -> None:
    A = problems.contraction(0.8, 6).requires_grad_()
    b, g = leaf(4, 6), torch.randn(4, 6, dtype=torch.float64)
    backward = exact(solver=ADJOINTS[name]())
    z = fixed_point(lambda z: z @ A.mT + b, torch.zeros_like(b), stop=TIGHT, backward=backward).z
    dA, db = torch.autograd.grad(z, (A, b), g)
    with torch.no_grad():
        u = torch.linalg.solve((torch.eye(6, dtype=torch.float64) - A).mT, g.mT).mT
        exact_z = torch.linalg.solve(torch.eye(6, dtype=torch.float64) - A, b.mT).mT
    torch.testing.assert_close(db, u, atol=1e-10, rtol=0)
    torch.testing.assert_close(dA, u.mT @ exact_z, atol=1e-9, rtol=0)


def test_tuple_and_dict_states_closures_modules_and_explicit_args() -> None:
    layer = nn.Linear(4, 4).double()
    with torch.no_grad():
        layer.weight.mul_(0.3)
    x = leaf(3, 4)

    def pair(a: Tensor, b: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(layer(b.flatten(1)) + x), (0.4 * torch.sin(a)).view(3, 2, 2)

    def named(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
        a, b = pair(z["a"], z["b"], x)
        return {"b": b, "a": a}

    def loss(W: Tensor, x: Tensor, how: str) -> Tensor:
        layer.weight.data.copy_(W.detach())
        a, b = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 2, 2, dtype=torch.float64)
        if how == "tuple":
            a, b = fixed_point(pair, (a, b), (x,), stop=TIGHT, backward=exact()).z
        elif how == "closure":
            a, b = fixed_point(lambda a, b: pair(a, b, x), [a, b], stop=TIGHT, backward=exact()).z
        else:
            z = fixed_point(named, {"a": a, "b": b}, (x,), stop=TIGHT, backward=exact()).z
            a, b = z["a"], z["b"]
        return a.square().sum() + b.cos().sum()

    a, b = torch.zeros(3, 4, dtype=torch.float64), torch.zeros(3, 2, 2, dtype=torch.float64)
    for _ in range(120):
        a, b = pair(a, b, x)
    value = a.square().sum() + b.cos().sum()
    expected = torch.autograd.grad(value, (layer.weight, x))
    for how in ("tuple", "closure", "dict"):
        got = torch.autograd.grad(loss(layer.weight, x, how), (layer.weight, x))
        torch.testing.assert_close(got, expected, atol=1e-9, rtol=0)


@pytest.mark.parametrize("scale", [1e-8, 1.0, 1e8])
def test_does_not_depend_on_the_scale_of_the_loss(scale: float) -> None:
    W, x = leaf(8, 8, scale=0.2), leaf(4, 8)
    backward = Implicit(solver=SOLVERS["fixed_point_iter"](), stop=StopRule(200, 1e-8))
    z = fixed_point(lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), stop=TIGHT,
                    backward=backward).z  # fmt: skip
    (one,) = torch.autograd.grad(z.sum(), W, retain_graph=True)
    (scaled,) = torch.autograd.grad(scale * z.sum(), W)
    torch.testing.assert_close(scaled / scale, one, rtol=1e-10, atol=1e-12)


def test_a_sample_without_a_cotangent_gets_none() -> None:
    seen: list[Any] = []
    x = leaf(3, 4)
    z = fixed_point(
        lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x), stop=TIGHT,
        backward=exact(writer=seen.append, solver=Anderson()),
    ).z  # fmt: skip
    z[1].sum().backward()
    assert x.grad is not None
    assert not x.grad[0].any()
    assert x.grad[1].all()
    assert (seen[0].status == Status.CONVERGED).all()
    assert len(seen) == 1


def test_create_graph_raises_and_names_the_way_out() -> None:
    x = leaf(2, 3)
    z = fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x)).z
    with pytest.raises(RuntimeError, match="higher_order=True"):
        torch.autograd.grad(z.sum(), x, create_graph=True)


def test_two_pending_forwards_retained_graphs_and_nesting() -> None:
    W, x = leaf(4, 4, scale=0.2), leaf(2, 4)

    def run(x: Tensor) -> Tensor:
        f = lambda z: torch.tanh(z @ W.mT + x)  # noqa: E731
        return fixed_point(f, torch.zeros_like(x), stop=TIGHT, backward=exact()).z

    def reference(x: Tensor) -> Tensor:
        z = torch.zeros_like(x)
        for _ in range(100):
            z = torch.tanh(z @ W.mT + x)
        return z

    first, second = run(x), run(2 * x)  # the second before the first was differentiated
    expected = [torch.autograd.grad(reference(k * x).sum(), W)[0] for k in (1, 2)]
    torch.testing.assert_close(
        torch.autograd.grad(first.sum(), W, retain_graph=True)[0], expected[0]
    )
    torch.testing.assert_close(torch.autograd.grad(second.sum(), W)[0], expected[1])
    torch.testing.assert_close(torch.autograd.grad(first.sum(), W)[0], expected[0])
    nested = fixed_point(
        lambda z: 0.5 * run(x + 0.1 * z), torch.zeros_like(x), stop=TIGHT, backward=exact()
    ).z
    z = torch.zeros_like(x)
    for _ in range(40):
        z = 0.5 * reference(x + 0.1 * z)
    torch.testing.assert_close(
        torch.autograd.grad(nested.sum(), (W, x)), torch.autograd.grad(z.sum(), (W, x))
    )


def test_inside_a_checkpoint() -> None:
    x = leaf(2, 4)

    def run(x: Tensor) -> Tensor:
        return fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x), stop=TIGHT,
                           backward=exact()).z  # fmt: skip

    (plain,) = torch.autograd.grad(run(x).sum(), x)
    checkpointed = torch.utils.checkpoint.checkpoint(run, x, use_reentrant=False)
    torch.testing.assert_close(torch.autograd.grad(checkpointed.sum(), x)[0], plain)


def test_gradients_follow_the_grad_mode() -> None:
    x = leaf(2, 3)
    f, calls = problems.counted(lambda z: torch.tanh(0.5 * z + x))
    z0, stop = torch.zeros(2, 3, dtype=torch.float64), StopRule(7, 0.0)
    with torch.no_grad():
        estimate = fixed_point(f, z0, stop=stop, keep_estimate=True).z
    assert len(calls) == 7
    assert not estimate.requires_grad
    with_graph = fixed_point(f, z0, stop=stop, keep_estimate=True).z
    assert torch.equal(with_graph, estimate)  # bit for bit
    assert with_graph.requires_grad
    attached = fixed_point(f, z0, stop=stop).z
    torch.testing.assert_close(attached, f(estimate))
    (g,) = torch.autograd.grad(with_graph.sum(), x)
    torch.testing.assert_close(g, torch.autograd.grad(attached.sum(), x)[0])


def test_a_non_finite_attached_call_never_reaches_the_estimate() -> None:
    x = leaf(1, 2)
    f, calls = problems.counted(
        lambda z: torch.tanh(0.5 * z + x) * (torch.nan if len(calls) > 5 else 1.0)
    )
    z0 = torch.zeros(1, 2, dtype=torch.float64)
    assert fixed_point(f, z0, stop=StopRule(5, 0.0), keep_estimate=True).z.isfinite().all()


def test_nothing_to_differentiate_gives_no_graph_and_a_cut_graph_an_error() -> None:
    z0 = torch.zeros(2, 3)
    assert not fixed_point(torch.cos, z0).z.requires_grad
    with pytest.raises(RuntimeError, match="without a graph although its input requires grad"):
        fixed_point(lambda z: torch.cos(z).detach(), z0)


def test_a_failed_backward_solve_is_never_silent() -> None:
    W = problems.rotation(0.99, 16).requires_grad_()
    x = torch.randn(2, 16, dtype=torch.float64)

    def run(policy: str) -> Tensor:
        backward = Implicit(solver=GMRES(), stop=StopRule(2, 1e-10), on_failure=policy)
        f = lambda z: z @ W.mT + x  # noqa: E731
        return fixed_point(f, torch.zeros_like(x), stop=StopRule(500, 1e-8), backward=backward).z

    with pytest.warns(ConvergenceWarning, match="the backward solve did not converge"):
        run("warn").square().sum().backward()
    with pytest.raises(RuntimeError, match="the backward solve failed"):
        run("raise").square().sum().backward()


@pytest.mark.parametrize("diverging", [1, 3])
def test_an_adjoint_that_diverges_by_plain_iteration_is_not_stalled(diverging: int) -> None:
    x = torch.zeros(3, 4, dtype=torch.float64, requires_grad=True)
    rates = torch.full((3, 1), 0.5, dtype=torch.float64)
    rates[:diverging] = -3.0
    stats: list[Any] = []
    backward = Implicit(solver=SOLVERS["fixed_point_iter"](), writer=stats.append)
    exact = (x / (1 - rates)).detach()
    z = fixed_point(lambda z: rates * z + x, exact, backward=backward, stop=StopRule(1, 0.0)).z
    with pytest.warns(ConvergenceWarning, match="DIVERGED"):
        z.sum().backward()
    assert stats[0].status.tolist()[:diverging] == [int(Status.DIVERGED)] * diverging


def test_memory_does_not_grow_with_the_steps_of_the_solver() -> None:
    x = leaf(4, 64)

    def run(steps: int) -> Tensor:
        f = lambda z: torch.tanh(0.9 * z + x)  # noqa: E731
        return fixed_point(f, torch.zeros_like(x), stop=StopRule(steps, 0.0)).z

    assert 0 < saved_bytes(lambda: run(5)) == saved_bytes(lambda: run(80))


def test_the_graph_is_freed_without_the_garbage_collector() -> None:
    x = leaf(2, 3)
    gc.disable()
    try:
        z = fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x)).z
        node = weakref.ref(z.grad_fn)
        z.sum().backward()
        del z
        assert node() is None
    finally:
        gc.enable()


def test_dropout_masks_and_autocast_are_those_of_the_attached_call() -> None:
    linear = nn.Linear(32, 32)
    layer = nn.Sequential(linear, nn.Dropout(0.5))
    with torch.no_grad():
        linear.weight.mul_(0.3)
    x = torch.randn(8, 32)
    for autocast in (False, True):
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            z = fixed_point(
                lambda z: torch.tanh(layer(z).float() + x), torch.zeros(8, 32),
                stop=StopRule(10, 0.0), backward=Implicit(stop=StopRule(40, 1e-3)),
            ).z  # fmt: skip
        assert z.dtype == torch.float32
        z.sum().backward()  # outside of autocast
        assert linear.weight.grad is not None
        assert linear.weight.grad.isfinite().all()
        layer.zero_grad()


def test_batch_norm_statistics_are_not_updated_by_the_backward_pass() -> None:
    norm = nn.BatchNorm1d(4).double()
    x = leaf(8, 4)
    z = fixed_point(lambda z: 0.3 * norm(z + x), torch.zeros_like(x), stop=StopRule(20, 0.0)).z
    before = {name: buffer.clone() for name, buffer in norm.named_buffers()}
    z.square().sum().backward()
    assert all(torch.equal(buffer, before[name]) for name, buffer in norm.named_buffers())


@pytest.mark.parametrize("higher_order", [False, True])
@pytest.mark.parametrize("state", ["tensor", "tuple"])
def test_the_auxiliary_output_of_the_returned_state_has_complete_gradients(
    state: str, higher_order: bool
) -> None:
    W, x = leaf(4, 4, scale=0.2), leaf(3, 4)

    def f(*inputs: Tensor) -> tuple[Any, dict[str, Tensor]]:
        z, x = inputs[0], inputs[-1]
        h = z @ W.mT + x
        new = torch.tanh(h)
        return (new if state == "tensor" else (new, 0.5 * inputs[1] + new)), {"load": h.square()}

    z0 = torch.zeros_like(x)
    solution = fixed_point(
        f, z0 if state == "tensor" else (z0, z0), (x,), stop=TIGHT, has_aux=True,
        backward=exact(higher_order=higher_order),
    )  # fmt: skip
    z = torch.zeros_like(x)
    for _ in range(120):
        z = torch.tanh(z @ W.mT + x)
    expected = (z @ W.mT + x).square()
    torch.testing.assert_close(solution.aux["load"], expected, atol=1e-10, rtol=0)
    torch.testing.assert_close(
        torch.autograd.grad(solution.aux["load"].sum(), (W, x)),
        torch.autograd.grad(expected.sum(), (W, x)), atol=1e-8, rtol=0,
    )  # fmt: skip
    with pytest.raises(TypeError, match=r"must return a pair \(z, aux\): got Tensor"):
        fixed_point(torch.tanh, z0, has_aux=True)
