"""Autocast around a solve: gradients reach what was cast before without grad mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from torchdeq import Implicit, Phantom, StopRule, fixed_point, get_deq, jac_reg
from torchdeq.autocast import AutocastState

STOP = StopRule(15, 0.0)


def by_implicit(f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
    z: Tensor = fixed_point(f, z0, stop=STOP, backward=Implicit(stop=StopRule(40, 1e-3))).z
    return z


def by_phantom(f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
    z: Tensor = fixed_point(f, z0, stop=STOP, backward=Phantom(grad=4)).z
    return z


def by_the_regulariser(f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
    with torch.no_grad():
        z = fixed_point(f, z0, stop=STOP).z
    z = z.requires_grad_()
    return jac_reg(f(z), z, vecs=4)


def by_the_paper(f: Callable[[Tensor], Tensor], z0: Tensor) -> Tensor:
    states, _ = get_deq(f_max_iter=15, f_tol=0.0, grad=4)(f, z0)
    return states[-1]


@pytest.mark.parametrize("way", [by_implicit, by_phantom, by_the_regulariser, by_the_paper])
def test_weights_that_a_solve_has_cast_get_their_gradient(way: Callable[..., Tensor]) -> None:
    layer = nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    x = torch.randn(4, 16, requires_grad=True)  # without it a lost graph would raise

    def gradient(autocast: bool) -> Tensor:
        torch.manual_seed(1)
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            loss = (
                way(lambda z: torch.tanh(layer(z).float() + x), torch.zeros(4, 16)).square().sum()
            )
        layer.zero_grad()
        loss.backward()
        assert layer.weight.grad is not None
        return layer.weight.grad.clone()

    single, mixed = gradient(False), gradient(True)
    assert (single - mixed).norm() < 0.05 * single.norm()


def test_a_solve_leaves_no_casts_behind_that_lose_gradients() -> None:
    layer = nn.Linear(4, 4)
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            fixed_point(lambda z: 0.1 * layer(z), torch.zeros(2, 4), stop=STOP)
        assert layer(torch.ones(2, 4)).requires_grad


def test_autocast_is_suspended_and_restored() -> None:
    with torch.autocast("cpu", torch.bfloat16):
        state = AutocastState(torch.device("cpu"))
        with state.suspended():
            assert not torch.is_autocast_enabled("cpu")
            with state.restored():
                assert torch.is_autocast_enabled("cpu")
                assert torch.get_autocast_dtype("cpu") == torch.bfloat16
        assert torch.is_autocast_enabled("cpu")
