"""Maps that differentiate, recompute or run TorchScript inside."""

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
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vmap
from torch.utils.checkpoint import checkpoint

from tests import problems
from tests.grad.references import Map, close, implicit, looped, normal, solved


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


#: An error must name a way out.
WAY_OUT = re.compile(r"(?is)\b(use|pass|drop|call|instead|without|outside)\b")


def right_or_clear(run: Callable[[], Any], expected: Any, cause: str) -> None:
    """Compare a gradient, or check that the library refuses it with a clear error.

    The `except` cannot hide a wrong value: the comparison comes after it, and an error passes only
    if it is not one of torch's own and its message names the cause and a way out.
    """
    try:
        got = run()
    except RuntimeError as error:
        text = str(error)
        assert re.search(cause, text), text
        assert WAY_OUT.search(text), text
        assert not re.search("INTERNAL ASSERT|functorch transform|saved tensor hooks", text), text
        return
    close(got, expected)


def energy_gradient(run: Any, make: Any, order: int) -> tuple[Tensor, ...]:
    """Return the gradient of a loss of the equilibrium, or that of a function of this gradient."""
    leaves = tuple(t.requires_grad_() for t in energy_tensors())
    g: Any = torch.autograd.grad(
        of_energy(run, make, *leaves).square().sum(), leaves, create_graph=order > 1
    )
    return g if order == 1 else torch.autograd.grad(g[0].sin().sum(), leaves)


def test_autograd_grad_inside_f_gives_higher_orders_or_a_clear_error() -> None:
    def inner(W: Tensor, x: Tensor) -> Map:
        def f(z: Tensor) -> Tensor:
            with torch.enable_grad():
                y = z if z.requires_grad else z.detach().requires_grad_()
                value = torch.cosh(y @ W).log().sum()
                (slope,) = torch.autograd.grad(value, y, create_graph=True)
            return 0.5 * slope + x

        return f

    for order in (1, 2):
        expected = energy_gradient(looped, energy_by_hand, order)
        right_or_clear(partial(energy_gradient, solved, inner, order), expected, r"autograd\.grad")


def test_a_checkpoint_inside_f_gives_higher_orders_or_a_clear_error() -> None:
    def inner(W: Tensor, x: Tensor) -> Map:
        def layer(z: Tensor) -> Tensor:
            return torch.tanh(z @ W)

        return lambda z: 0.5 * checkpoint(layer, z, use_reentrant=False) + x

    plain = lambda W, x: lambda z: 0.5 * torch.tanh(z @ W) + x  # noqa: E731
    for order in (1, 2):
        expected = energy_gradient(looped, plain, order)
        right_or_clear(partial(energy_gradient, solved, inner, order), expected, "checkpoint")


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
