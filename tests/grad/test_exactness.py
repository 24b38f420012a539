"""Gradients that were wrong, missing or dear once, each against the right value by another road."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.autograd.forward_ad as forward_ad
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp, vmap
from torch.utils.checkpoint import checkpoint

from tests import problems
from torchdeq import _torch
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, Phantom, Reversible, make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, ConvergenceWarning, FixedPointIter, Status, StopRule

DOUBLE = torch.float64
TIGHT = StopRule(200, 1e-13)
ADJOINTS = [*SOLVERS, *LINEAR]
Map = Callable[[Tensor], Tensor]
every_adjoint = pytest.mark.parametrize("name", ADJOINTS)
both_paths = pytest.mark.parametrize("higher_order", [False, True])


def normal(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DOUBLE)


def implicit(name: str = "gmres", tol: float = 1e-12, **options: Any) -> Implicit:
    return Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(200, tol), **options)


def solved(f: Map, z0: Tensor, backward: Any, args: tuple[Any, ...] = ()) -> Tensor:
    """The equilibrium by plain iteration, or by the reversible one."""
    if isinstance(backward, Reversible):
        return fixed_point(f, z0, args, stop=StopRule(20, 0.0), backward=backward).z
    return fixed_point(f, z0, args, solver=FixedPointIter(), stop=TIGHT, backward=backward).z


def looped(f: Map, z: Tensor, backward: Any = None, args: tuple[Any, ...] = ()) -> Tensor:
    """What `solved` must be and how it must be differentiated: a plain loop."""
    call: Any = f
    if isinstance(backward, Reversible):
        older = z
        for _ in range(20):
            older, z = z, (1 - backward.tau) * older + backward.tau * call(z, *args)
        return z
    for _ in range(100):
        z = call(z, *args)
    return z


def close(got: Any, expected: Any, atol: float = 1e-9) -> None:
    torch.testing.assert_close(got, expected, atol=atol, rtol=1e-8)


# Inputs of f whose use depends on z.

#: From zero the first call is near; the fixed point, where every entry exceeds 1, is far.
Routed = Callable[[Tensor, Tensor, Tensor], Map]


def routed(near: Tensor, far: Tensor, x: Tensor) -> Map:
    """A map that uses `near` at its first call from zero only, and `far` at all others."""

    def f(z: Tensor) -> Tensor:
        if bool(z.abs().max() < 0.5):
            return 0.5 * z + near + x
        return 0.4 * torch.tanh(z @ far) + x

    return f


def experts(near: Tensor, far: Tensor, x: Tensor) -> Map:
    """Two experts, each called for the rows routed to it; at zero that is the first for all."""

    def f(z: Tensor) -> Tensor:
        second = z.abs().amax(1) > 0.5
        out = torch.zeros_like(z)
        for chosen, expert in ((~second, near), (second, far)):
            rows = chosen.nonzero()[:, 0]
            if len(rows):
                image = torch.tanh(z.index_select(0, rows) @ expert)
                out = out.index_add(0, rows, 0.4 * image)
        return out + x

    return f


def tensors() -> tuple[Tensor, Tensor, Tensor]:
    return normal(4, 4, seed=1), normal(4, 4, seed=2) / 3, 2 + normal(4, 4, seed=3).tanh()


LATE = [implicit(), implicit(higher_order=True), Reversible(tau=0.5)]
late = pytest.mark.parametrize("backward", LATE, ids=["kept graph", "higher order", "reversible"])
maps = pytest.mark.parametrize("make", [routed, experts])


@late
@maps
def test_a_tensor_that_f_uses_only_near_the_fixed_point_has_its_gradient(
    make: Routed, backward: Any
) -> None:
    near, far, x = (t.requires_grad_() for t in tensors())
    f, z0 = make(near, far, x), torch.zeros_like(x)
    got, expected = (
        torch.autograd.grad(
            run(f, z0, backward).square().sum(), (near, far, x), materialize_grads=True
        )
        for run in (solved, looped)
    )
    assert expected[1].abs().sum() > 0
    close(got, expected)


@late
@maps
def test_such_a_tensor_may_be_an_argument(make: Routed, backward: Any) -> None:
    leaves = tuple(t.requires_grad_() for t in tensors())
    f: Any = lambda z, *args: make(*args)(z)  # noqa: E731
    z0 = torch.zeros_like(leaves[2])
    got, expected = (
        torch.autograd.grad(
            run(f, z0, backward, leaves).square().sum(), leaves, materialize_grads=True
        )
        for run in (solved, looped)
    )
    close(got, expected)


@late
def test_such_a_tensor_may_be_a_parameter_of_a_module(backward: Any) -> None:
    class Experts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            near, far, _ = tensors()
            self.near, self.far = nn.Parameter(near), nn.Parameter(far)

        def forward(self, z: Tensor, x: Tensor) -> Tensor:
            return experts(self.near, self.far, x)(z)

    model, x = Experts(), tensors()[2].requires_grad_()
    leaves = (x, *model.parameters())
    got, expected = (
        torch.autograd.grad(
            run(lambda z: model(z, x), torch.zeros_like(x), backward).square().sum(), leaves,
            materialize_grads=True,
        )
        for run in (solved, looped)
    )  # fmt: skip
    close(got, expected)


FUNCTIONAL = {
    "grad": lambda loss, out: grad(loss, (0, 1, 2)),
    "vjp": lambda loss, out: lambda *t: vjp(out, *t)[1](torch.ones_like(t[2])),
    "jacrev": lambda loss, out: jacrev(out, (0, 1, 2)),
    "jvp": lambda loss, out: lambda *t: jvp(out, t, t),
    "jacfwd": lambda loss, out: jacfwd(out, (0, 1, 2)),
    "grad(grad)": lambda loss, out: grad(
        lambda *t: sum(g.sin().sum() for g in grad(loss, (0, 1, 2))(*t)), (0, 1, 2)
    ),
    "hessian": lambda loss, out: hessian(loss, (1, 2)),
}


@pytest.mark.parametrize("transform", list(FUNCTIONAL))
@late
@maps
def test_such_a_tensor_has_its_gradient_under_function_transforms(
    make: Routed, backward: Any, transform: str
) -> None:
    def of(run: Any) -> Any:
        def out(near: Tensor, far: Tensor, x: Tensor) -> Tensor:
            z: Tensor = run(make(near, far, x), torch.zeros(4, 4, dtype=DOUBLE), backward)
            return z

        return FUNCTIONAL[transform](lambda *t: out(*t).square().sum(), out)(*tensors())

    close(of(solved), of(looped))


@maps
def test_such_a_tensor_has_its_second_derivative(make: Routed) -> None:
    def twice(run: Any) -> tuple[Tensor, ...]:
        leaves = tuple(t.requires_grad_() for t in tensors())
        z = run(make(*leaves), torch.zeros(4, 4, dtype=DOUBLE), implicit(higher_order=True))
        first = torch.autograd.grad(z.square().sum(), leaves[1:], create_graph=True)
        value = first[0].sin().sum() + first[1].cos().sum()
        return torch.autograd.grad(value, leaves, materialize_grads=True)

    close(twice(solved), twice(looped))


# Rows that depend on each other.


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


# Cotangents that are not finite.


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
    seen: list[Any] = []
    backward = Implicit(higher_order=higher_order, writer=seen.append, on_failure="ignore")
    z = solved(lambda z: f(z + x), z0, backward)
    g = normal(3, 5)
    g[1] = torch.nan
    torch.autograd.grad(z, x, g)
    assert seen[0].status.tolist() == [Status.CONVERGED, Status.NONFINITE, Status.CONVERGED]


# Maps that differentiate inside.


def energy(W: Tensor, x: Tensor) -> Map:
    def f(z: Tensor) -> Tensor:
        slope: Tensor = grad(lambda y: torch.cosh(y @ W).log().sum())(z)
        return 0.5 * slope + x

    return f


def energy_by_hand(W: Tensor, x: Tensor) -> Map:
    return lambda z: 0.5 * torch.tanh(z @ W) @ W.mT + x


def of_energy(run: Any, make: Any, W: Tensor, x: Tensor) -> Tensor:
    backward = implicit(higher_order=torch.is_grad_enabled())
    z: Tensor = run(make(W, x), torch.zeros_like(x), backward)
    return z


def energy_tensors() -> tuple[Tensor, Tensor]:
    return problems.contraction(1.0, 3), normal(2, 3)


def test_an_energy_model_has_its_second_derivative() -> None:
    def twice(run: Any, make: Any) -> tuple[Tensor, ...]:
        leaves = tuple(t.requires_grad_() for t in energy_tensors())
        z = of_energy(run, make, *leaves)
        first = torch.autograd.grad(z.square().sum(), leaves, create_graph=True)
        return torch.autograd.grad(first[0].sin().sum() + first[1].cos().sum(), leaves)

    close(twice(solved, energy), twice(looped, energy_by_hand))


@pytest.mark.parametrize(
    "transform",
    [
        lambda out: grad(lambda W, x: out(W, x).square().sum(), (0, 1)),
        lambda out: hessian(lambda W, x: out(W, x).square().sum(), (0, 1)),
        lambda out: jacrev(out, (0, 1)),
        lambda out: jacfwd(out, (0, 1)),
        lambda out: lambda W, x: jvp(out, (W, x), (W, x)),
        lambda out: grad(lambda W, x: grad(lambda W: out(W, x).square().sum())(W).sin().sum()),
    ],
    ids=["grad", "hessian", "jacrev", "jacfwd", "jvp", "grad(grad)"],
)
def test_an_energy_model_under_function_transforms(transform: Any) -> None:
    got = transform(lambda W, x: of_energy(solved, energy, W, x))(*energy_tensors())
    expected = transform(lambda W, x: of_energy(looped, energy_by_hand, W, x))(*energy_tensors())
    close(got, expected)


@pytest.mark.parametrize("computed", [False, True])
def test_an_energy_model_in_a_level_of_forward_mode(computed: bool) -> None:
    """The tensor with a tangent is used only where f itself differentiates."""
    W, x = energy_tensors()
    dW = normal(3, 3, seed=4)

    def tangent(run: Any, make: Any) -> Tensor:
        with forward_ad.dual_level():
            dual = forward_ad.make_dual(W, dW)
            z = run(make(1.0 * dual if computed else dual, x), torch.zeros_like(x), implicit())
            t = forward_ad.unpack_dual(z).tangent
            assert t is not None, "the tangent is lost"
            return t.clone()

    close(tangent(solved, energy), tangent(looped, energy_by_hand))


def test_an_energy_model_under_vmap() -> None:
    W, x = energy_tensors()
    xs = torch.stack((x, 0.5 * x))
    loss = lambda run, make: lambda x: of_energy(run, make, W, x).square().sum()  # noqa: E731
    got = vmap(grad(loss(solved, energy)))(xs)
    expected = torch.stack([grad(loss(looped, energy_by_hand))(x) for x in xs])
    close(got, expected)


#: What an error must say where something cannot work: the cause, and a way out.
WAY_OUT = re.compile(r"(?is)\b(use|pass|drop|call|instead|without|outside)\b")


def right_or_clear(run: Callable[[], Any], expected: Any, cause: str) -> None:
    """Compare, or look for an error of ours that names the cause and a way out."""
    try:
        got = run()
    except (RuntimeError, TypeError, ValueError, NotImplementedError) as error:
        text = str(error)
        assert re.search(cause, text), text
        assert WAY_OUT.search(text), text
        assert "INTERNAL ASSERT" not in text
        assert "functorch transform" not in text
        assert "saved tensor hooks" not in text
        return
    close(got, expected)


def test_autograd_grad_inside_f_gives_higher_orders_or_a_clear_error() -> None:
    def inner(W: Tensor, x: Tensor) -> Map:
        def f(z: Tensor) -> Tensor:
            with torch.enable_grad():
                y = z if z.requires_grad else z.detach().requires_grad_()
                value = torch.cosh(y @ W).log().sum()
                (slope,) = torch.autograd.grad(value, y, create_graph=True)
            return 0.5 * slope + x

        return f

    def gradient(run: Any, make: Any, order: int) -> tuple[Tensor, ...]:
        leaves = tuple(t.requires_grad_() for t in energy_tensors())
        g: Any = torch.autograd.grad(
            of_energy(run, make, *leaves).square().sum(), leaves, create_graph=order > 1
        )
        return g if order == 1 else torch.autograd.grad(g[0].sin().sum(), leaves)

    for order in (1, 2):
        expected = gradient(looped, energy_by_hand, order)
        right_or_clear(partial(gradient, solved, inner, order), expected, r"autograd\.grad")


def test_a_checkpoint_inside_f_gives_higher_orders_or_a_clear_error() -> None:
    def inner(W: Tensor, x: Tensor) -> Map:
        def layer(z: Tensor) -> Tensor:
            return torch.tanh(z @ W)

        return lambda z: 0.5 * checkpoint(layer, z, use_reentrant=False) + x

    def gradient(run: Any, make: Any, order: int) -> tuple[Tensor, ...]:
        leaves = tuple(t.requires_grad_() for t in energy_tensors())
        g: Any = torch.autograd.grad(
            of_energy(run, make, *leaves).square().sum(), leaves, create_graph=order > 1
        )
        return g if order == 1 else torch.autograd.grad(g[0].sin().sum(), leaves)

    plain = lambda W, x: lambda z: 0.5 * torch.tanh(z @ W) + x  # noqa: E731
    for order in (1, 2):
        expected = gradient(looped, plain, order)
        right_or_clear(partial(gradient, solved, inner, order), expected, "checkpoint")


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4).double()
        with torch.no_grad():
            self.linear.weight.copy_(problems.contraction(0.6, 4))

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(self.linear(z) + x)


@pytest.mark.parametrize("order", [1, 2])
@pytest.mark.parametrize("how", ["script", "trace"])
def test_a_scripted_module_gives_higher_orders_or_a_clear_error(how: str, order: int) -> None:
    cell, x = Cell(), normal(2, 4)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        compiled: Any = torch.jit.script(cell) if how == "script" else torch.jit.trace(cell, (x, x))

    def gradient(run: Any, module: Any) -> Any:
        leaves = (x.clone().requires_grad_(), *module.parameters())
        z = run(lambda z: module(z, leaves[0]), torch.zeros_like(x), implicit(higher_order=True))
        g = torch.autograd.grad(z.square().sum(), leaves, create_graph=order > 1)
        value = torch.stack([t.sin().sum() for t in g]).sum()
        return g if order == 1 else torch.autograd.grad(value, leaves)

    right_or_clear(
        lambda: gradient(solved, compiled), gradient(looped, cell), r"(?i)script|jit|traced"
    )


# Starts that depend on what is differentiated.


def from_the_input(run: Any, W: Tensor, backward: Any) -> Callable[[Tensor], Tensor]:
    """A scalar function of x whose solve starts at a function of x."""
    return lambda x: run(lambda z: torch.tanh(z @ W + x), 0.3 * x, backward).square().sum()


@pytest.mark.parametrize(
    "transform",
    [
        lambda loss: lambda xs: vmap(grad(loss))(xs),
        lambda loss: lambda xs: hessian(loss)(xs[0]),
        lambda loss: lambda xs: vmap(hessian(loss))(xs),
        lambda loss: lambda xs: jvp(grad(loss), (xs[0],), (xs[1],)),
        lambda loss: lambda xs: vmap(lambda x: jvp(loss, (x,), (x,)))(xs),
        lambda loss: lambda xs: jacrev(grad(loss))(xs[0]),
    ],
    ids=["vmap(grad)", "hessian", "vmap(hessian)", "jvp(grad)", "vmap(jvp)", "jacrev(grad)"],
)
def test_the_start_may_depend_on_the_input_under_every_transform(transform: Any) -> None:
    W, xs = problems.contraction(0.6, 4), normal(3, 2, 4)
    got = transform(from_the_input(solved, W, implicit()))(xs)
    close(got, transform(from_the_input(looped, W, None))(xs))


@pytest.mark.parametrize("start", ["zeros", "input"])
def test_phantom_steps_beside_a_kept_estimate_under_vmap(start: str) -> None:
    W, xs = problems.contraction(0.6, 4), normal(3, 2, 4)

    def loss(x: Tensor) -> Tensor:
        z0 = 0.3 * x if start == "input" else torch.zeros_like(x)
        z = fixed_point(lambda z: torch.tanh(z @ W + x), z0, stop=TIGHT,
                        backward=Phantom(grad=3), keep_estimate=True).z  # fmt: skip
        return z.square().sum()

    def reference(x: Tensor) -> Tensor:
        estimate = looped(lambda z: torch.tanh(z @ W + x), torch.zeros_like(x)).detach()
        z = estimate
        for _ in range(3):
            z = torch.tanh(z @ W + x)
        return (2 * estimate * z).sum()  # the gradient of squares at the estimate

    close(vmap(grad(loss))(xs), torch.stack([grad(reference)(x) for x in xs]))


# What a backward pass costs.


@pytest.mark.parametrize("tol", [0.0, 1e-8])
@every_adjoint
def test_a_checkpoint_around_the_solve_repeats_it_once(name: str, tol: float) -> None:
    with torch.autograd.graph.save_on_cpu():
        if _torch.saved_tensor_hooks() is None:
            pytest.skip("this torch does not tell about hooks: the solve is repeated per product")
    W, x = problems.contraction(0.6, 4).requires_grad_(), normal(3, 4).requires_grad_()
    calls = 0

    def run(x: Tensor) -> Tensor:
        def f(z: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            return torch.tanh(z @ W + x)

        return fixed_point(f, torch.zeros_like(x), solver=FixedPointIter(),
                           stop=StopRule(15, tol), on_failure="ignore",
                           backward=Implicit(solver=make_adjoint_solver(name, {}),
                                             stop=StopRule(12, 0.0))).z  # fmt: skip

    expected = torch.autograd.grad(run(x).sum(), (W, x))
    calls = 0
    z = checkpoint(run, x, use_reentrant=False)
    forward, calls = calls, 0
    got = torch.autograd.grad(z.sum(), (W, x))
    assert calls <= forward
    close(got, expected)


def test_sampled_states_with_higher_order_share_one_solve() -> None:
    W, x = problems.contraction(0.9, 4), normal(3, 4).requires_grad_()
    f, calls = problems.counted(lambda z: torch.tanh(z @ W + x))
    found = fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), stop=StopRule(40, 0.0),
                        record=[(k, Phantom()) for k in (10, 20, 30)],
                        backward=Implicit(higher_order=True))  # fmt: skip
    assert len(calls) == 44  # the solve, and one call with a graph for each state
    assert len(found.states) == 4
    plain = fixed_point(f, torch.zeros(3, 4, dtype=DOUBLE), stop=StopRule(40, 0.0),
                        record=[(k, Phantom()) for k in (10, 20, 30)])  # fmt: skip
    for got, expected in zip(found.states, plain.states, strict=True):
        close(got, expected)
        (a,) = torch.autograd.grad(got.square().sum(), x, retain_graph=True)
        (b,) = torch.autograd.grad(expected.square().sum(), x, retain_graph=True)
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


def test_batch_statistics_cost_no_more_products_with_higher_order() -> None:
    x = normal(8, 4)

    def run(higher_order: bool) -> tuple[int, tuple[Tensor, ...]]:
        torch.manual_seed(0)
        norm, mix = nn.BatchNorm1d(4).double(), nn.Linear(4, 4).double()
        with torch.no_grad():
            mix.weight.mul_(0.8)
        leaf = x.clone().requires_grad_()
        seen: list[Any] = []
        backward = Implicit(stop=StopRule(60, 1e-8), higher_order=higher_order,
                            writer=seen.append)  # fmt: skip
        z = fixed_point(lambda z: 0.5 * torch.tanh(norm(mix(z) + leaf)) + leaf,
                        torch.zeros_like(x), stop=StopRule(200, 1e-11), backward=backward,
                        solver=FixedPointIter()).z  # fmt: skip
        leaves = (leaf, *norm.parameters(), *mix.parameters())
        grads = torch.autograd.grad(z.sin().sum(), leaves)
        assert len(seen) == 1
        return seen[0].nfe, grads

    def reference() -> tuple[Tensor, ...]:
        torch.manual_seed(0)
        norm, mix = nn.BatchNorm1d(4).double(), nn.Linear(4, 4).double()
        with torch.no_grad():
            mix.weight.mul_(0.8)
        leaf = x.clone().requires_grad_()
        z = looped(lambda z: 0.5 * torch.tanh(norm(mix(z) + leaf)) + leaf, torch.zeros_like(x))
        return torch.autograd.grad(z.sin().sum(), (leaf, *norm.parameters(), *mix.parameters()))

    (first, once), (again, higher), expected = run(False), run(True), reference()
    close(once, expected, atol=1e-6)
    close(higher, expected, atol=1e-6)
    assert again <= 1.2 * first


# Precision and size.


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

    seen: list[Any] = []
    backward = Implicit(solver=make_adjoint_solver(name, {}), stop=StopRule(60, 1e-6),
                        writer=seen.append)  # fmt: skip
    g = torch.randn(8, 64)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with torch.autocast("cpu", torch.bfloat16):
            z = fixed_point(f, torch.zeros(8, 64), stop=StopRule(60, 1e-6), backward=backward).z
            h = z.detach().requires_grad_()
            fh = f(h)
        (u,) = torch.autograd.grad(z, x, g)  # x is added in single precision: its gradient is u
    (stats,) = seen
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


def test_functional_call_reaches_a_tensor_that_is_used_late() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            near, far, _ = tensors()
            self.near, self.far = nn.Parameter(near), nn.Parameter(far)

        def forward(self, x: Tensor, run: Any) -> Tensor:
            z: Tensor = run(lambda z: experts(self.near, self.far, x)(z), 0 * x, implicit())
            return z

    model, x = Model(), tensors()[2]
    params = {name: 0.9 * p.detach() for name, p in model.named_parameters()}

    def gradient(run: Any) -> Any:
        return grad(lambda p: functional_call(model, p, (x, run)).square().sum())(params)

    close(gradient(solved), gradient(looped))
