"""Inputs of f that only some of its calls use: which tensors those are depends on z."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call, grad, hessian, jacfwd, jacrev, jvp, vjp

from tests.grad.references import DOUBLE, Map, close, implicit, looped, normal, solved
from torchdeq.experimental import Reversible

#: From zero the first call is near; the fixed point, where every entry exceeds 1, is far.
Routed = Callable[[Tensor, Tensor, Tensor], Map]


def routed(near: Tensor, far: Tensor, x: Tensor) -> Map:
    """Return a map that uses `near` in its first call from zero only, and `far` in all others."""

    def f(z: Tensor) -> Tensor:
        if bool(z.abs().max() < 0.5):
            return 0.5 * z + near + x
        return 0.4 * torch.tanh(z @ far) + x

    return f


def experts(near: Tensor, far: Tensor, x: Tensor) -> Map:
    """Return a map of two experts; each computes the rows routed to it, at zero the first all."""

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


class Experts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        near, far, _ = tensors()
        self.near, self.far = nn.Parameter(near), nn.Parameter(far)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return experts(self.near, self.far, x)(z)


@late
def test_such_a_tensor_may_be_a_parameter_of_a_module(backward: Any) -> None:
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


def test_functional_call_reaches_a_tensor_that_is_used_late() -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.experts = Experts()

        def forward(self, x: Tensor, run: Any) -> Tensor:
            z: Tensor = run(lambda z: self.experts(z, x), 0 * x, implicit())
            return z

    model, x = Model(), tensors()[2]
    params = {name: 0.9 * p.detach() for name, p in model.named_parameters()}

    def gradient(run: Any) -> Any:
        return grad(lambda p: functional_call(model, p, (x, run)).square().sum())(params)

    close(gradient(solved), gradient(looped))
