"""The library on an accelerator: the numbers of the CPU, and no reads where none are promised.

`make test-gpu` runs these tests where there is an accelerator. Without one they run on the CPU, and
only show that the tests themselves work.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from torch import Tensor, nn

from torchdeq import (
    Implicit,
    Phantom,
    StopRule,
    VariationalDropout,
    apply_norm,
    fixed_point,
    get_deq,
    jac_reg,
    reset_deq,
    reset_norm,
)
from torchdeq.grad import make_adjoint_solver
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS, make_solver, solve

REQUIRED = "TORCHDEQ_REQUIRE_ACCELERATOR"


@pytest.fixture(scope="module")
def device() -> torch.device:
    if torch.accelerator.is_available():
        found = torch.accelerator.current_accelerator()
        assert found is not None
        return found
    if os.environ.get(REQUIRED):
        pytest.fail("torch finds no accelerator on this machine")
    return torch.device("cpu")


@contextmanager
def no_reads(device: torch.device) -> Iterator[None]:
    """Raise at a synchronisation of the host with the device, on devices that can tell."""
    if device.type != "cuda":
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def weights(device: torch.device) -> tuple[Tensor, Tensor]:
    W = 0.8 * nn.init.orthogonal_(torch.empty(32, 32))
    return W.to(device), torch.randn(8, 32).to(device)


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_solver_finds_the_fixed_point_of_the_cpu(name: str, device: torch.device) -> None:
    W, x = weights(torch.device("cpu"))
    stop = StopRule(max_iter=100, tol=1e-5, mode="rel")
    answers = []
    for place in (torch.device("cpu"), device):
        V, y = W.to(place), x.to(place)
        z0 = torch.zeros_like(y)
        solution = solve(lambda z, V=V, y=y: torch.tanh(z @ V + y), z0, make_solver(name, {}), stop)
        assert solution.z.device.type == place.type
        answers.append(solution.z.cpu())
    torch.testing.assert_close(*answers, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_solve_without_a_tolerance_reads_nothing(name: str, device: torch.device) -> None:
    W, x = weights(device)
    stop = StopRule(max_iter=12, tol=0.0)

    def run() -> Tensor:
        return solve(
            lambda z: torch.tanh(z @ W + x), torch.zeros_like(x), make_solver(name, {}), stop
        ).z

    run()  # the first call may build handles of libraries
    with no_reads(device):
        z = run()
    assert bool(z.isfinite().all())


@pytest.mark.parametrize("name", [*SOLVERS, *LINEAR])
def test_an_adjoint_solver_gives_the_gradient_of_the_cpu(name: str, device: torch.device) -> None:
    W, x = weights(torch.device("cpu"))
    gradients = []
    for place in (torch.device("cpu"), device):
        V = W.to(place).requires_grad_()
        y = x.to(place)
        backward = Implicit(
            solver=make_adjoint_solver(name, {}), stop=StopRule(max_iter=100, tol=1e-5)
        )
        stop = StopRule(max_iter=100, tol=1e-6, mode="rel")
        z = fixed_point(
            lambda z, V=V, y=y: torch.tanh(z @ V + y),
            torch.zeros_like(y),
            backward=backward,
            stop=stop,
            on_failure="ignore",
        ).z
        z.square().sum().backward()
        assert V.grad is not None
        gradients.append(V.grad.cpu())
    torch.testing.assert_close(*gradients, atol=1e-3, rtol=1e-3)


@pytest.mark.parametrize("options", [{"ift": True}, {"grad": 3, "tau": 0.8}, {"n_states": 3}])
def test_a_normalised_layer_with_dropout_trains(
    options: dict[str, object], device: torch.device
) -> None:
    layer = nn.Sequential(nn.Linear(32, 32), VariationalDropout(0.1)).to(device)
    apply_norm(layer, "spectral_norm")
    deq = get_deq(f_solver="anderson", **options)
    reset_deq(layer)
    x = torch.randn(8, 32, device=device)
    states, stats = deq(lambda z: torch.tanh(layer(z) + x), torch.zeros_like(x))
    states[-1].square().mean().backward()
    gradients = [p.grad for p in layer.parameters() if p.grad is not None]
    assert gradients
    assert all(g.device.type == device.type and bool(g.isfinite().all()) for g in gradients)
    assert stats.nfe > 0


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_reaches_the_map_and_its_adjoint(dtype: torch.dtype, device: torch.device) -> None:
    layer = nn.Linear(32, 32).to(device)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    x = torch.randn(8, 32, device=device)
    with torch.autocast(device.type, dtype):
        stop = StopRule(max_iter=40, tol=1e-2, mode="rel")
        backward = Implicit(stop=StopRule(max_iter=40, tol=1e-2))
        z0 = torch.zeros_like(x)
        z = fixed_point(lambda z: torch.tanh(layer(z) + x), z0, stop=stop, backward=backward).z
    z.float().square().mean().backward()
    assert layer.weight.grad is not None
    assert bool(layer.weight.grad.isfinite().all())


def test_jacobian_regularisation_and_phantom_gradients_run(device: torch.device) -> None:
    layer = nn.Linear(32, 32).to(device)
    apply_norm(layer, "weight_norm")
    reset_norm(layer)
    x = torch.randn(8, 32, device=device)
    stop, z0 = StopRule(max_iter=20, tol=0.0), torch.zeros_like(x)
    z = fixed_point(lambda z: torch.tanh(layer(z) + x), z0, stop=stop, backward=Phantom(grad=3)).z
    inner = z.detach().requires_grad_()
    (z.square().mean() + jac_reg(torch.tanh(layer(inner) + x), inner)).backward()
    assert all(p.grad is not None for p in layer.parameters())
