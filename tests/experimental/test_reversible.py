"""Reversible iteration: its gradient is that of the same iteration, unrolled."""

from __future__ import annotations

import copy
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import gradcheck

from tests import problems
from tests.grad.references import saved_bytes
from torchdeq.experimental import Reversible
from torchdeq.experimental.double_double import DoubleDouble
from torchdeq.functional import fixed_point
from torchdeq.grad import Phantom
from torchdeq.memory import mem_gc
from torchdeq.solver import Anderson, ConvergenceWarning, FixedPointIter, StopRule


def unrolled(f: Any, z0: Tensor, steps: int, tau: float) -> Tensor:
    """Iterate the two coupled states as the paper writes them; return the later one."""
    y = z = z0
    for k in range(steps):
        if k % 2 == 0:
            y = (1 - tau) * y + tau * f(z)
        else:
            z = (1 - tau) * z + tau * f(y)
    return y if steps % 2 else z


def run(f: Any, z0: Any, steps: int, tau: float = 0.8) -> Any:
    return fixed_point(f, z0, stop=StopRule(steps, 0.0), backward=Reversible(tau=tau)).z


@pytest.mark.parametrize("steps", [0, 1, 2, 7, 12])
@pytest.mark.parametrize("tau", [0.3, 0.8])
def test_equals_the_unrolled_iteration_in_value_and_gradient(steps: int, tau: float) -> None:
    W = problems.contraction(0.9, 5).requires_grad_()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    z0 = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W.mT + x)

    got, expected = run(f, z0, steps, tau), unrolled(f, z0, steps, tau)
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
    inputs = (W, x, z0)
    grads = [torch.autograd.grad(z.sin().sum(), inputs, allow_unused=True) for z in (got, expected)]
    torch.testing.assert_close(*grads, rtol=0, atol=1e-10)


def test_passes_gradcheck_over_tensor_tuple_and_dict_states() -> None:
    W = problems.contraction(0.5, 4).requires_grad_()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    zero = torch.zeros(2, 4, dtype=torch.float64)

    def pair(a: Tensor, b: Tensor, W: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        return torch.tanh(b @ W.mT + x), 0.4 * torch.sin(a)

    def of_tuple(W: Tensor, x: Tensor) -> Tensor:
        a, b = run(lambda a, b: pair(a, b, W, x), (zero, zero), 8)
        return a + b.square()

    def of_dict(W: Tensor, x: Tensor) -> Tensor:
        def f(z: dict[str, Tensor], x: Tensor) -> dict[str, Tensor]:
            a, b = pair(z["a"], z["b"], W, x)
            return {"a": a, "b": b}

        z = fixed_point(f, {"a": zero, "b": zero}, (x,), stop=StopRule(8, 0.0),
                        backward=Reversible()).z  # fmt: skip
        return z["a"] * z["b"]

    assert gradcheck(lambda W, x: run(lambda z: torch.tanh(z @ W.mT + x), zero, 8), (W, x))
    assert gradcheck(of_tuple, (W, x))
    assert gradcheck(of_dict, (W, x))


def test_calls_f_once_a_step_each_way_and_converges_to_the_fixed_point() -> None:
    f, z0 = problems.tanh_layer(gain=0.6)
    x = torch.zeros_like(z0).requires_grad_()
    counted, calls = problems.counted(lambda z: f(z) + x)
    solution = fixed_point(counted, z0, stop=StopRule(60, 1e-8), backward=Reversible())
    assert len(calls) == 60 == solution.stats.nfe
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.z, f(solution.z), rtol=0, atol=1e-8)
    solution.z.sum().backward()
    assert len(calls) == 120


def test_memory_does_not_grow_with_steps() -> None:
    net = nn.Sequential(nn.Linear(16, 64), nn.Tanh(), nn.Linear(64, 16))
    z0 = torch.zeros(8, 16)

    def saved(steps: int) -> int:
        return saved_bytes(lambda: run(lambda z: 0.5 * net(z), z0, steps))

    assert 0 < saved(4) == saved(12) == saved(80)


def test_masks_autocast_and_running_statistics_are_repeated() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.4))
    twin = copy.deepcopy(net)
    x = torch.randn(16, 8, requires_grad=True)

    def gradients(net: nn.Module, step: Any) -> tuple[Tensor, ...]:
        torch.manual_seed(5)
        with torch.autocast("cpu", dtype=torch.bfloat16):
            z = step(lambda z: 0.3 * net(z) + x, torch.zeros_like(x))
        return torch.autograd.grad(z.float().square().sum(), (x, *net.parameters()))

    got = gradients(net, lambda f, z0: run(f, z0, 6))
    expected = gradients(twin, lambda f, z0: unrolled(f, z0, 6, 0.8))
    for a, b in zip(got, expected, strict=True):
        torch.testing.assert_close(a, b, rtol=0.05, atol=0.05 * float(b.abs().max()))
    for a, b in zip(net.buffers(), twin.buffers(), strict=True):
        torch.testing.assert_close(a, b)


def test_single_precision_survives_a_long_way_back() -> None:
    f, z0 = problems.tanh_layer(batch=8, d=32, gain=0.8, dtype=torch.float32)
    x = torch.zeros_like(z0).requires_grad_()
    got, expected = (
        torch.autograd.grad(step(lambda z: f(z) + x, z0, 40, 0.8).square().sum(), x)[0]
        for step in (run, unrolled)
    )
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


def test_twofold_numbers_carry_twice_the_digits() -> None:
    z = torch.randn(20, dtype=torch.float64)
    steps, c = torch.randn(30, 20, dtype=torch.float64), 0.2
    number, exact = DoubleDouble.of(z), [Fraction(float(v)) for v in z]
    for t in steps:
        number = number.times(c).plus(t)
        exact = [v * Fraction(c) + Fraction(float(s)) for v, s in zip(exact, t, strict=True)]
    sums = [Fraction(float(h)) + Fraction(float(lo)) for h, lo in zip(*number, strict=True)]
    assert max(abs(float(s / e - 1)) for s, e in zip(sums, exact, strict=True)) < 1e-30
    for t in steps.flip(0):
        number = number.plus(-t).over(c)
    torch.testing.assert_close(number.hi, z, rtol=0, atol=1e-9)  # 5^30 times 1e-32, and some


@pytest.mark.parametrize("steps", [6, 12, 30])
def test_many_elements_survive_in_single_precision(steps: int) -> None:
    """If one of many elements rounds differently in the backward pass, f has another value."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.Tanh())
    x = torch.randn(4, 8, 16, 16, requires_grad=True)
    got, expected = (
        torch.autograd.grad(
            step(lambda z: 0.6 * net(z) + x, torch.zeros_like(x), steps, 0.75).square().mean(), x
        )[0]
        for step in (run, unrolled)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=2e-6 * float(expected.abs().max()))


def test_double_precision_survives_forty_steps_near_the_edge() -> None:
    f, z0 = problems.tanh_layer(gain=0.95)
    x = torch.zeros_like(z0).requires_grad_()
    got, expected = (
        torch.autograd.grad(step(lambda z: f(z) + x, z0, 40, 0.8).square().sum(), x)[0]
        for step in (run, unrolled)
    )
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-5)


def test_warns_when_the_way_back_is_lost() -> None:
    x = torch.randn(4, 8, dtype=torch.float64, requires_grad=True)
    z = run(lambda z: torch.tanh(0.99 * z + x), torch.zeros_like(x), 60, tau=0.95)
    with pytest.warns(ConvergenceWarning, match="lost precision"):
        z.sum().backward()


def test_under_function_transforms_it_is_unrolled() -> None:
    W = problems.contraction(0.9, 5)
    x = torch.randn(3, 5, dtype=torch.float64)

    def loss(step: Any) -> Any:
        return lambda x: step(lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), 6, 0.8).sum()

    for transform in (torch.func.grad, torch.func.hessian):
        torch.testing.assert_close(transform(loss(run))(x), transform(loss(unrolled))(x))


def test_says_what_it_cannot_do() -> None:
    x = torch.randn(2, 3, requires_grad=True)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(0.5 * z + x)

    z0 = torch.zeros_like(x)
    with pytest.raises(ValueError, match=r"tau must lie in \(0, 1\)"):
        Reversible(tau=1.0)
    with pytest.raises(ValueError, match="fixed_point_iter without options, got Anderson"):
        fixed_point(f, z0, solver=Anderson(), backward=Reversible())
    with pytest.raises(ValueError, match="drop compact=True"):
        fixed_point(f, z0, backward=Reversible(), compact=True)
    with pytest.raises(ValueError, match="drop record"):
        fixed_point(f, z0, backward=Reversible(), record=[(3, Phantom())])
    with pytest.raises(RuntimeError, match="first order"):
        torch.autograd.grad(run(f, z0, 3).sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="without a graph"):
        torch.autograd.grad(run(lambda z: torch.tanh(z + x).detach(), z0, 2).sum(), x)


def test_takes_the_plain_solver_by_name_and_runs_without_a_graph() -> None:
    f, z0 = problems.tanh_layer()
    with torch.no_grad():
        quiet = fixed_point(f, z0, solver=FixedPointIter(), stop=StopRule(9, 0.0),
                            backward=Reversible()).z  # fmt: skip
    torch.testing.assert_close(quiet, unrolled(f, z0, 9, 0.75))
    assert not run(f, z0, 3).requires_grad  # nothing to differentiate


def test_works_with_recomputation_inside_f() -> None:
    net = nn.Sequential(nn.Linear(4, 4), nn.Tanh()).double()
    x = torch.randn(2, 4, dtype=torch.float64, requires_grad=True)
    z0 = torch.zeros_like(x)
    grads = [
        torch.autograd.grad(run(f, z0, 5).sum(), (x, *net.parameters()))
        for f in (lambda z: mem_gc(lambda z: net(z) + x, (z,)), lambda z: net(z) + x)
    ]
    torch.testing.assert_close(*grads)
