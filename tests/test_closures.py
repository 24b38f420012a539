"""Closures that keep their variables for calls in the backward pass."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import fixed_point, mem_gc
from torchdeq.closures import with_own_closure
from torchdeq.experimental import Reversible
from torchdeq.grad import Backward, Implicit
from torchdeq.solver import FixedPointIter, StopRule


def test_a_function_with_its_own_closure_keeps_names_defaults_and_inner_functions() -> None:
    scale = 2.0

    def inner(z: float) -> float:
        return scale * z

    def outer(z: float, shift: float = 1.0, *, sign: float = -1.0) -> float:
        return sign * inner(z) + shift

    own = with_own_closure(outer)
    scale = 5.0
    assert (own(3.0), outer(3.0)) == (-5.0, -14.0)
    assert own.__name__ == "outer"
    assert with_own_closure(torch.tanh) is torch.tanh


def test_a_variable_that_the_function_assigns_stays_shared() -> None:
    calls = 0

    def f() -> None:
        nonlocal calls
        calls += 1

    with_own_closure(f)()
    assert calls == 1


@pytest.mark.parametrize("way", ["plain", "higher_order", "mem_gc", "reversible"])
def test_a_variable_that_a_loop_binds_anew_does_not_reach_the_backward_pass(way: str) -> None:
    W = (0.4 * nn.init.orthogonal_(torch.empty(5, 5, dtype=torch.float64))).requires_grad_()
    start = torch.randn(3, 5, dtype=torch.float64)
    stop = StopRule(60, 0.0 if way == "reversible" else 1e-12)
    backward: Backward = Implicit(stop=StopRule(60, 1e-12), higher_order=way == "higher_order")
    backward = Reversible() if way == "reversible" else backward

    def gradient(closes_over: bool) -> Tensor:
        x, total = start, torch.zeros((), dtype=torch.float64)
        for _ in range(2):

            def f(z: Tensor, x: Tensor = x) -> Tensor:
                return torch.tanh(z @ W + x)

            def g(z: Tensor) -> Tensor:
                return torch.tanh(z @ W + x)  # noqa: B023

            chosen: Any = g if closes_over else f
            step = (lambda z: mem_gc(chosen, (z,))) if way == "mem_gc" else chosen  # noqa: B023
            z = fixed_point(step, torch.zeros_like(x), solver=FixedPointIter(), stop=stop,
                            backward=backward, on_failure="ignore").z  # fmt: skip
            total, x = total + z.square().sum(), 2 * x
        return torch.autograd.grad(total, W)[0]

    torch.testing.assert_close(gradient(closes_over=True), gradient(closes_over=False))
