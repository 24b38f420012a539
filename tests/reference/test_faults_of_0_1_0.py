"""Faults of torchdeq 0.1.0 in the solve, each with the test it fails.

Only the interface of 0.1.0 is used, so the file can be run against that release as well.
"""

from __future__ import annotations

import warnings

import pytest
import torch
from torch import Tensor

from torchdeq.solver import get_solver

ALL = ["fixed_point_iter", "anderson", "broyden"]


@pytest.fixture(autouse=True)
def _quiet() -> None:
    warnings.simplefilter("ignore")


def _layer(batch: int = 4, gain: float = 0.9) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(3)
    W = torch.randn(16, 16, generator=generator)
    return gain * W / torch.linalg.matrix_norm(W, 2), torch.randn(batch, 16, generator=generator)


@pytest.mark.parametrize("name", ALL)
def test_a_nan_in_one_step_does_not_destroy_the_best_state(name: str) -> None:
    W, x = _layer()
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        fz = torch.tanh(z @ W.mT + x)
        return fz * torch.nan if calls == 6 else fz

    z, _, _ = get_solver(name)(f, torch.zeros_like(x), max_iter=6, tol=1e-9)
    assert z.isfinite().all()


def test_the_simple_iteration_takes_any_function() -> None:
    z, _, _ = get_solver("simple_fixed_point_iter")(torch.cos, torch.zeros(3), max_iter=60)
    torch.testing.assert_close(z, torch.full((3,), 0.7390851))


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("option", ["stopmode", "f_anderson_m", "lambda_"])
def test_a_misspelt_option_is_not_ignored(name: str, option: str) -> None:
    with pytest.raises(TypeError, match=option):
        get_solver(name)(torch.cos, torch.zeros(3, 1), **{option: "rel"})


@pytest.mark.parametrize("name", ALL)
def test_the_answer_does_not_depend_on_batch_mates(name: str) -> None:
    rates = torch.tensor([[0.2], [0.98]])
    x = torch.linspace(-1, 1, 32).view(2, 16)
    solver = get_solver(name)

    def both(z: Tensor) -> Tensor:
        return torch.tanh(rates * z + x)

    def easy(z: Tensor) -> Tensor:
        return torch.tanh(rates[:1] * z + x[:1])

    together, _, _ = solver(both, torch.zeros(2, 16), max_iter=100, tol=1e-3)
    alone, _, _ = solver(easy, torch.zeros(1, 16), max_iter=100, tol=1e-3)
    torch.testing.assert_close(together[:1], alone, atol=1e-6, rtol=0)


def test_anderson_without_regularisation_stands_on_a_fixed_point() -> None:
    """0.1.0 meets a singular matrix and aborts the batch."""
    z0 = torch.full((2, 4), 0.5)
    z, _, _ = get_solver("anderson")(lambda z: z * 1.0, z0, max_iter=10, tol=0.0, lam=0.0)
    torch.testing.assert_close(z, z0)


@pytest.mark.parametrize("budget", [1, 2])
def test_anderson_uses_a_budget_of_one_or_two(budget: int) -> None:
    """0.1.0 returns the start with a residual of 1e8."""
    W, x = _layer()
    z, _, info = get_solver("anderson")(
        lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), max_iter=budget
    )
    assert z.abs().sum() > 0
    assert (info["abs_lowest"] < 1e3).all()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("budget", [1, 5])
def test_the_budget_counts_evaluations(name: str, budget: int) -> None:
    """0.1.0's Broyden evaluates once more than it may, its Anderson at least twice."""
    W, x = _layer()
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.tanh(z @ W.mT + x)

    get_solver(name)(f, torch.zeros_like(x), max_iter=budget, tol=1e-9)
    assert calls == budget


@pytest.mark.parametrize("name", ALL)
def test_broyden_records_the_step_that_was_asked_for(name: str) -> None:
    """0.1.0 stores state k where k + 1 was asked for."""
    W, x = _layer()
    solver = get_solver(name)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W.mT + x)

    z0 = torch.zeros_like(x)
    _, states, _ = solver(f, z0, max_iter=12, tol=0.0, indexing=[4])
    expected, _, _ = solver(f, z0, max_iter=4, tol=0.0)
    torch.testing.assert_close(states[0], expected)


@pytest.mark.parametrize("name", ALL)
def test_early_convergence_does_not_shorten_the_recorded_states(name: str) -> None:
    _, states, _ = get_solver(name)(
        lambda z: 0.1 * z + 1, torch.zeros(2, 3), max_iter=40, tol=1e-3, indexing=[10, 20, 30, 40]
    )
    assert len(states) == 4


def test_broyden_does_not_reserve_memory_for_its_whole_budget() -> None:
    """0.1.0 allocates two buffers of max_iter states up front: here 8 GB."""
    largest = 0

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    z0 = torch.zeros(1, 1000)
    with Watch():
        get_solver("broyden")(lambda z: 0.5 * z + 1, z0, max_iter=10_000, tol=1e-4)
    assert largest <= 100 * z0.numel()


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_states_work(name: str, dtype: torch.dtype) -> None:
    """0.1.0's Anderson asks for an LU factorisation that half types do not have."""
    z0 = torch.zeros(3, 8, dtype=dtype)
    z, _, _ = get_solver(name)(lambda z: 0.5 * z + 1, z0, max_iter=30, tol=1e-2)
    assert z.dtype == dtype
    torch.testing.assert_close(z.float(), torch.full((3, 8), 2.0), atol=3e-2, rtol=0)


def test_anderson_needs_no_more_evaluations_than_plain_iteration() -> None:
    """0.1.0's absolute regularisation makes the weights uniform once residuals are small."""
    W, x = _layer(32, gain=0.95)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W.mT + x)

    z0 = torch.zeros_like(x)
    for tol in (1e-5, 1e-6):
        counts = {}
        for name in ("fixed_point_iter", "anderson"):
            _, _, info = get_solver(name)(f, z0, max_iter=100, tol=tol, stop_mode="rel")
            counts[name] = float(info["nstep"].max())
            assert (info["rel_lowest"] < tol * 1.01).all()
        assert counts["anderson"] <= counts["fixed_point_iter"]


@pytest.mark.parametrize("name", ALL)
def test_one_infinite_sample_leaves_the_others_alone(name: str) -> None:
    W, x = _layer()

    def f(z: Tensor) -> Tensor:
        fz = torch.tanh(z @ W.mT + x)
        return torch.cat((fz[:3], fz[3:] * torch.inf))

    z, _, info = get_solver(name)(f, torch.zeros_like(x), max_iter=60, tol=1e-5)
    assert z.isfinite().all()
    assert (info["abs_lowest"][:3] < 1e-4).all()
