"""The presets have the published budgets."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from deq_zoo.lm.presets import IMPLICIT, UNROLLED
from tests.zoo.lm.nets import draw_ids, make_model

STEPS = 35  # of the authors' Broyden method


def take_broyden_steps(g: Callable[[Tensor], Tensor], z: Tensor, steps: int) -> tuple[Tensor, int]:
    """Run good Broyden from `z` with a dense inverse Jacobian; return the best iterate.

    Also return the number of evaluations of g(z) = f(z) - z, for vectors `z`.
    """
    inverse = -torch.eye(len(z), dtype=z.dtype)
    value, calls = g(z), 1
    best, lowest = z, value.norm() / (value + z).norm()
    for _ in range(steps):
        dz = -inverse @ value
        z, before = z + dz, value
        value, calls = g(z), calls + 1
        dg = value - before
        inverse = inverse + torch.outer(dz - inverse @ dg, dz @ inverse) / (dz @ inverse @ dg)
        residual = value.norm() / (value + z).norm()
        if residual < lowest:
            best, lowest = z, residual
    return best, calls


@torch.no_grad()
def test_the_forward_budget_of_implicit_presets_is_that_of_35_steps_of_broyden() -> None:
    model = make_model("original", IMPLICIT.with_options(f_tol=0.0))
    for name, p in model.named_parameters():
        if name.endswith("_net.weight_g"):
            p.fill_(1.0)  # slow enough that every step counts
    out = model(torch.arange(24)[None] * 7 % 11)

    def g(z: Tensor) -> Tensor:
        return out.f(z.view(1, 24, 8)).flatten() - z

    z, calls = take_broyden_steps(g, torch.zeros(192).double(), STEPS)
    fewer, _ = take_broyden_steps(g, torch.zeros(192).double(), STEPS - 1)
    assert out.stats.nfe == calls == 36
    torch.testing.assert_close(out.z.flatten(), z, atol=1e-11, rtol=0)
    assert float((fewer - z).abs().max()) > 1e-9


def test_the_backward_budget_has_a_product_for_every_step() -> None:
    """Starting at zero costs the authors one more product, whose result is the cotangent."""
    model = make_model("original", IMPLICIT.with_options(f_tol=0.0, b_tol=0.0)).train()
    assert count_products(model) == STEPS


def count_products(model: Any) -> int:
    calls: list[int] = []

    def log_call(stats: Any) -> None:
        calls.append(stats.nfe)

    out = model(draw_ids(1, 6), backward_writer=log_call)
    out.z.square().sum().backward()
    (products,) = calls
    return int(products)


@pytest.mark.parametrize("training", [False, True])
def test_unrolled_presets_take_twelve_steps(training: bool) -> None:
    model = make_model("redesigned", UNROLLED).train(training)
    out = model(draw_ids())
    z = torch.zeros(2, 6, 8).double()
    for _ in range(12):
        z = out.f(z)
    torch.testing.assert_close(out.z, z)
