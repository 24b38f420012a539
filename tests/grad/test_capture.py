"""Inputs of f inside custom functions, transforms and complex operators."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import grad, vmap

from torchdeq.experimental import Reversible
from torchdeq.functional import fixed_point
from torchdeq.grad import Implicit, make_adjoint_solver
from torchdeq.solver import Anderson, StopRule

DOUBLE = torch.float64
EXACT = Implicit(stop=StopRule(100, 1e-12), higher_order=True)


class Times(torch.autograd.Function):
    """A product that a torch function mode does not see."""

    @staticmethod
    def forward(ctx: Any, z: Tensor, v: Tensor) -> Tensor:
        ctx.save_for_backward(z, v)
        return z * v

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        z, v = ctx.saved_tensors
        return g * v, (g * z).sum(0)


def custom(z: Tensor, v: Tensor) -> Tensor:
    return torch.tanh(Times.apply(z, v) + 1)


def vectorised(z: Tensor, v: Tensor) -> Tensor:
    return vmap(lambda row, v: torch.tanh(row * v + 1), (0, None))(z, v)


def differentiated(z: Tensor, v: Tensor) -> Tensor:
    energy = lambda z, v: (torch.cos(z) * v).sum()  # noqa: E731
    return torch.tanh(grad(energy, argnums=(0, 1))(z, v)[0] + 1)


def spectral(z: Tensor, v: Tensor) -> Tensor:
    kernel = torch.complex(v[:3], v[1:])
    return torch.tanh(torch.fft.irfft(torch.fft.rfft(z) * kernel, n=4) + 1)


def start() -> tuple[Tensor, Tensor]:
    v = torch.tensor([0.3, -0.2, 0.1, 0.25], dtype=DOUBLE, requires_grad=True)
    return torch.zeros(3, 4, dtype=DOUBLE), v


def in_args(f: Any, v: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return f, (v,)


def in_closure(f: Any, v: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    return lambda z: f(z, v), ()


def in_module(f: Any, v: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    holder = nn.Module()
    holder.v = v
    return lambda z: f(z, holder.v), ()


def in_list(f: Any, v: Tensor) -> tuple[Callable[..., Tensor], tuple[Tensor, ...]]:
    box = [v]
    return lambda z: f(z, box[0]), ()


def unrolled(f: Any, z: Tensor, v: Tensor) -> Tensor:
    for _ in range(80):
        z = f(z, v)
    return z


@pytest.mark.parametrize("f", [custom, vectorised, differentiated, spectral])
@pytest.mark.parametrize("way", [in_args, in_closure, in_module])
@pytest.mark.parametrize("backward", [EXACT, Reversible()])
def test_inputs_of_hidden_operations_receive_their_gradient(
    f: Any, way: Any, backward: Any
) -> None:
    z0, v = start()
    (expected,) = torch.autograd.grad(unrolled(f, z0, v).square().sum(), v)
    g, args = way(f, v)
    solver = None if isinstance(backward, Reversible) else Anderson()
    z = fixed_point(g, z0, args, solver=solver, stop=StopRule(60, 1e-13), backward=backward,
                    on_failure="ignore").z  # fmt: skip
    (got,) = torch.autograd.grad(z.square().sum(), v)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("f", [custom, differentiated])
@pytest.mark.parametrize("backward", [EXACT, Reversible()])
def test_an_input_that_cannot_be_put_in_place_is_an_error_with_a_cure(
    f: Any, backward: Any
) -> None:
    z0, v = start()
    g, _ = in_list(f, v)
    stop = StopRule(40, 0.0)
    with pytest.raises(RuntimeError, match=r"of shape \(4,\) where it cannot be seen"):
        fixed_point(g, z0, stop=stop, backward=backward).z.sum().backward()
    cured, _ = in_list(lambda z, v: f(z, v.view_as(v)), v)
    (got,) = torch.autograd.grad(fixed_point(cured, z0, stop=stop, backward=backward).z.sum(), v)
    (expected,) = torch.autograd.grad(unrolled(f, z0, v).sum(), v)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


@pytest.mark.parametrize("f", [vectorised, differentiated, spectral])
def test_hidden_operations_inside_function_transforms(f: Any) -> None:
    z0, v = start()
    v = v.detach()
    got = grad(lambda v: fixed_point(f, z0, (v,), stop=StopRule(90, 1e-13), backward=EXACT)
               .z.square().sum())(v)  # fmt: skip
    expected = grad(lambda v: unrolled(f, z0, v).square().sum())(v)
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def test_complex_parameters_receive_their_gradient() -> None:
    z0, _ = start()
    k = torch.tensor([0.2 + 0.1j, 0.1, -0.2j], dtype=torch.complex128, requires_grad=True)

    def f(z: Tensor, k: Tensor) -> Tensor:
        return torch.tanh(torch.fft.irfft(torch.fft.rfft(z) * k, n=4) + 1)

    (expected,) = torch.autograd.grad(unrolled(f, z0, k).square().sum(), k)
    for backward in (EXACT, Implicit(stop=StopRule(100, 1e-12)), Reversible()):
        solver = None if isinstance(backward, Reversible) else Anderson()
        z = fixed_point(lambda z: f(z, k), z0, solver=solver, stop=StopRule(60, 1e-13),
                        backward=backward, on_failure="ignore").z  # fmt: skip
        (got,) = torch.autograd.grad(z.square().sum(), k)
        torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
    got = grad(lambda k: fixed_point(f, z0, (k,), stop=StopRule(90, 1e-13), backward=EXACT)
               .z.square().sum())(k.detach())  # fmt: skip
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)


def test_a_map_that_returns_a_leaf_gives_it_the_gradient() -> None:
    y = torch.ones(3, 4, requires_grad=True)
    for backward in (Implicit(), EXACT, Reversible()):
        z = fixed_point(lambda z: y, torch.zeros(3, 4), stop=StopRule(60, 0.0), backward=backward).z
        torch.testing.assert_close(torch.autograd.grad(2 * z.sum(), y)[0], 2 * torch.ones(3, 4))


def test_several_cotangents_at_once_at_higher_order() -> None:
    W = (0.2 * torch.randn(4, 4, dtype=DOUBLE)).requires_grad_()
    z = fixed_point(lambda z: torch.tanh(z @ W + 1), torch.zeros(3, 4, dtype=DOUBLE),
                    stop=StopRule(90, 1e-12), backward=EXACT).z  # fmt: skip
    cotangents = torch.randn(5, 3, 4, dtype=DOUBLE)
    (together,) = torch.autograd.grad(z, W, cotangents, is_grads_batched=True, retain_graph=True)
    for g, got in zip(cotangents, together, strict=True):
        torch.testing.assert_close(got, torch.autograd.grad(z, W, g, retain_graph=True)[0])


def test_gradients_of_several_cotangents_at_once_are_right_or_an_error() -> None:
    """Without a graph they are right; a graph of theirs would be wrong, so it is refused."""
    W = (0.2 * torch.randn(4, 4, dtype=DOUBLE)).requires_grad_()
    x = torch.randn(3, 4, dtype=DOUBLE).requires_grad_()
    z = fixed_point(lambda z: torch.tanh(z @ W + x), torch.zeros(3, 4, dtype=DOUBLE),
                    stop=StopRule(90, 1e-12), backward=EXACT).z  # fmt: skip
    cotangents = torch.randn(5, 3, 4, dtype=DOUBLE)
    options: dict[str, Any] = {"is_grads_batched": True, "retain_graph": True}
    one_by_one = torch.stack(
        [torch.autograd.grad(z, x, g, retain_graph=True)[0] for g in cotangents]
    )
    (together,) = torch.autograd.grad(z, x, cotangents, **options)
    torch.testing.assert_close(together, one_by_one)
    with pytest.raises(RuntimeError, match="in a loop over the cotangents"):
        torch.autograd.grad(z, x, cotangents, create_graph=True, **options)


@pytest.mark.parametrize("solver", ["gmres", "bicgstab"])
@pytest.mark.parametrize("scales", [(1.0, 1e-10, 1e-20), (1e30, 1.0, 1e-30), (1.0, torch.nan, 2.0)])
def test_without_a_tolerance_rows_do_not_spoil_each_other(
    solver: str, scales: tuple[float, ...]
) -> None:
    W = 0.2 * torch.randn(4, 4)
    x = torch.randn(3, 4, requires_grad=True)
    backward = Implicit(solver=make_adjoint_solver(solver, {}), stop=StopRule(40, 0.0))
    z = fixed_point(lambda z: torch.tanh(z @ W + x), torch.zeros(3, 4), backward=backward,
                    stop=StopRule(60, 1e-7), on_failure="ignore").z  # fmt: skip
    (one,) = torch.autograd.grad(z, x, torch.ones(3, 4), retain_graph=True)
    scale = torch.tensor(scales)[:, None]
    (got,) = torch.autograd.grad(z, x, scale.expand(3, 4))
    torch.testing.assert_close(
        got / scale, torch.where(scale.isnan(), torch.nan, one), rtol=1e-3, atol=1e-4,
        equal_nan=True,
    )  # fmt: skip


def test_a_tolerance_of_one_asks_for_the_jacobian_free_gradient() -> None:
    x = torch.randn(3, 4, dtype=DOUBLE, requires_grad=True)
    backward = Implicit(stop=StopRule(4, 1.0))
    z = fixed_point(lambda z: torch.tanh(0.5 * z + x), torch.zeros_like(x),
                    stop=StopRule(60, 1e-12), backward=backward).z  # fmt: skip
    (got,) = torch.autograd.grad(z.sum(), x)
    torch.testing.assert_close(got, (1 - z.square()).detach())


@pytest.mark.parametrize("assigned", [False, True])
def test_leaves_that_f_makes_on_its_own_are_no_inputs(assigned: bool) -> None:
    z0, v = start()

    def f(z: Tensor, v: Tensor) -> Tensor:
        with torch.enable_grad():
            h = z.detach()
            if assigned:
                h.requires_grad = True
            else:
                h.requires_grad_()
            (slope,) = torch.autograd.grad((torch.cos(h) * v).sum(), h, create_graph=True)
        return torch.tanh(slope + 0.1 * z + 1)

    z = z0
    for _ in range(80):
        z = f(z, v)
    (expected,) = torch.autograd.grad(z.sum(), v)
    (got,) = torch.autograd.grad(
        fixed_point(f, z0, (v,), stop=StopRule(80, 1e-13), backward=EXACT).z.sum(), v
    )
    torch.testing.assert_close(got, expected, atol=1e-7, rtol=1e-6)
