"""Phantom gradients, backpropagation through time, and recomputation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck, gradgradcheck

from tests import problems
from tests.grad.references import saved_bytes
from torchdeq.functional import fixed_point
from torchdeq.grad import Phantom
from torchdeq.memory import mem_gc
from torchdeq.solver import FixedPointIter, StopRule


@pytest.mark.parametrize(("steps", "tau"), [(1, 1.0), (3, 1.0), (5, 0.6)])
def test_equals_the_papers_formula(steps: int, tau: float) -> None:
    """`A = tau sum_k (I - tau (I - J))^k`, k < steps, replaces the inverse of I - J."""
    M = problems.contraction(0.8, 6)
    b = torch.randn(3, 6, dtype=torch.float64, requires_grad=True)
    g = torch.randn(3, 6, dtype=torch.float64)
    z = fixed_point(lambda z: z @ M.mT + b, torch.zeros(3, 6, dtype=torch.float64),
                    stop=StopRule(300, 1e-13), backward=Phantom(grad=steps, tau=tau)).z  # fmt: skip
    eye = torch.eye(6, dtype=torch.float64)
    step = eye - tau * (eye - M)
    A = tau * sum(torch.linalg.matrix_power(step, k) for k in range(steps))
    torch.testing.assert_close(torch.autograd.grad(z, b, g)[0], g @ A)


def test_a_forward_budget_of_zero_is_backpropagation_through_time() -> None:
    f, z0 = problems.tanh_layer(batch=2, d=4)
    z0.requires_grad_()
    counted, calls = problems.counted(f)
    z = fixed_point(counted, z0, stop=StopRule(0), backward=Phantom(grad=12)).z
    assert len(calls) == 12
    expected = z0
    for _ in range(12):
        expected = f(expected)
    torch.testing.assert_close(z, expected)
    got, want = (torch.autograd.grad(t.sum(), z0)[0] for t in (z, expected))
    torch.testing.assert_close(got, want)

    def run(z: Tensor) -> Tensor:
        return fixed_point(f, z, stop=StopRule(0), backward=Phantom(grad=4, tau=0.5)).z

    assert gradcheck(run, (z0,))
    assert gradgradcheck(run, (z0,))


def test_which_states_are_returned() -> None:
    f, z0 = problems.tanh_layer()
    trajectory = [z0]
    for _ in range(6):
        trajectory.append(f(trajectory[-1]))

    def states(**options: Any) -> list[Tensor]:
        return fixed_point(f, z0, stop=StopRule(0), backward=Phantom(grad=6, **options)).states

    for options, expected in (
        ({}, [6]),
        ({"sup_gap": 2}, [2, 4, 6]),
        ({"sup_gap": 4}, [4]),
        ({"sup_loc": [1, 3]}, [1, 3, 6]),
    ):
        for state, k in zip(states(**options), expected, strict=True):
            assert torch.equal(state, trajectory[k])


def test_values_are_the_same_without_a_graph_and_tuples_work() -> None:
    def f(a: Tensor, b: Tensor) -> list[Tensor]:
        return [torch.cos(b), 0.5 * a + 1]

    z0, backward = (torch.zeros(2, 3), torch.zeros(2, 3)), Phantom(grad=3, tau=0.7)
    with_grad = fixed_point(f, z0, backward=backward, stop=StopRule(5, 0.0)).z
    with torch.no_grad():
        without = fixed_point(f, z0, backward=backward, stop=StopRule(5, 0.0)).z
    torch.testing.assert_close(list(with_grad), list(without), rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"grad": 0}, "must be a whole number >= 1, got 0"),
        ({"tau": 0.0}, "tau must lie"),
        ({"grad": 3, "sup_gap": 4}, "sup_gap 4 leaves no state of 3 steps"),
        ({"grad": 3, "sup_loc": [1, 5]}, r"within 1 to grad=3, got \[5\]"),
    ],
)
def test_refuses_nonsense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        Phantom(**options)


def test_recomputation_gives_the_same_gradients_and_masks() -> None:
    net = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Dropout(0.5), nn.Linear(32, 8)).double()
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)

    def run(recompute: bool) -> tuple[Tensor, ...]:
        torch.manual_seed(3)

        def f(z: Tensor) -> Tensor:  # x is closed over: it must get its gradient
            return 0.3 * net(z) + x

        step = (lambda z: mem_gc(f, (z,))) if recompute else f
        z = fixed_point(step, torch.zeros_like(x), solver=FixedPointIter(), stop=StopRule(0),
                        backward=Phantom(grad=5)).z  # fmt: skip
        return torch.autograd.grad(z.square().sum(), (x, *net.parameters()))

    torch.testing.assert_close(run(True), run(False))


def test_recomputation_keeps_no_activations() -> None:
    net = nn.Sequential(nn.Linear(8, 512), nn.Tanh(), nn.Linear(512, 8))
    z = torch.zeros(16, 8)

    # Only the states between the steps remain.
    assert saved_bytes(lambda: mem_gc(net, (mem_gc(net, (z,)),))) <= 2 * z.nbytes
    assert saved_bytes(lambda: net(net(z))) > 10 * z.nbytes


def test_recomputation_inside_function_transforms_is_a_plain_call() -> None:
    x = torch.randn(3, dtype=torch.float64)
    grad = torch.func.grad(lambda x: mem_gc(torch.sin, (x,)).sum())(x)
    torch.testing.assert_close(grad, torch.cos(x))
    assert mem_gc(lambda: 3) == 3


def test_recomputation_updates_running_statistics_once_and_sees_the_same_parameters() -> None:
    def gradients(recompute: bool) -> tuple[Any, ...]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        other = {k: v.detach() * 2 for k, v in net.named_parameters()}
        x = torch.randn(8, 4, requires_grad=True)

        def call() -> Tensor:
            step = (lambda z: mem_gc(net, (z,))) if recompute else net
            z = step(step(x))
            return z.square().mul(torch.linspace(0, 1, 4)).sum()

        own = torch.autograd.grad(call(), (x, *net.parameters()))
        with torch.nn.utils.stateless._reparametrize_module(net, other):
            swapped = call()
        first = torch.autograd.grad(swapped, x, retain_graph=True)
        second = torch.autograd.grad(swapped, x)
        return *own, *first, *second, *net.buffers()

    torch.testing.assert_close(gradients(True), gradients(False))


def test_recomputation_restores_autocast() -> None:
    net = nn.Linear(16, 16)
    x = torch.randn(4, 16, requires_grad=True)
    grads = []
    for recompute in (True, False):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = mem_gc(net, (x,)) if recompute else net(x)
        grads.append(torch.autograd.grad(z.float().square().sum(), (x, *net.parameters())))
    torch.testing.assert_close(*grads)
