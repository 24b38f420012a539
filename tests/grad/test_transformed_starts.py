"""Starts that depend on the tensors that a transform differentiates."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.func import grad, hessian, jacrev, jvp, vmap

from tests import problems
from tests.grad.references import TIGHT, close, implicit, looped, normal, solved
from torchdeq.functional import fixed_point
from torchdeq.grad import Phantom


def from_the_input(run: Any, W: Tensor, backward: Any) -> Callable[[Tensor], Tensor]:
    """Return a scalar function of x whose solve starts at a function of x."""
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
