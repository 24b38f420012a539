"""Reports about solves that do not converge, by failure policy."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq import (
    Anderson,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    FixedPointIter,
    Implicit,
    StopRule,
    fixed_point,
    get_deq,
    get_solver,
    solve,
)
from torchdeq.solver import SOLVERS

NAMES = [name for name in SOLVERS if SOLVERS[name].watches]


def caught(run: Any) -> list[str]:
    """Return the convergence warnings of a call."""
    with warnings.catch_warnings(record=True) as all_warnings:
        warnings.simplefilter("always")
        run()
    return [str(w.message) for w in all_warnings if w.category is ConvergenceWarning]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("training", [True, False])
def test_a_spent_forward_budget_is_normal_in_the_papers_interface(
    name: str, training: bool
) -> None:
    f, z0 = problems.tanh_layer(gain=0.99)
    assert get_deq().config.on_failure == "auto"
    for deq in (get_deq(f_solver=name, f_max_iter=3, f_tol=1e-9),
                get_deq(f_solver=name, f_max_iter=3, f_tol=1e-9, on_failure="auto")):  # fmt: skip
        assert not caught(lambda deq=deq: deq.train(training)(f, z0))
    assert not caught(lambda: get_solver(name)(f, z0, max_iter=3, tol=1e-9))
    deq = get_deq(f_solver=name, f_max_iter=3, f_tol=1e-9, on_failure="warn").train(training)
    assert "MAX_ITER" in caught(lambda: deq(f, z0))[0]
    deq.on_failure = "raise"
    with pytest.raises(ConvergenceError, match="MAX_ITER 4"):
        deq(f, z0)


def test_the_typed_interface_warns_by_default() -> None:
    f, z0 = problems.tanh_layer(gain=0.99)
    stop = StopRule(3, 1e-9)
    assert caught(lambda: solve(f, z0, Anderson(), stop))
    assert caught(lambda: fixed_point(f, z0, stop=stop))
    assert not caught(lambda: solve(f, z0, Anderson(), stop, on_failure="auto"))
    assert not caught(lambda: fixed_point(f, z0, stop=stop, on_failure="auto"))


def test_a_reversible_iteration_may_spend_its_budget_too() -> None:
    f, z0 = problems.tanh_layer(gain=0.99)
    deq = get_deq(backward="reversible", tau=0.5, f_max_iter=3, f_tol=1e-9)
    assert not caught(lambda: deq(f, z0))
    deq.on_failure = "warn"
    assert caught(lambda: deq(f, z0))


def test_auto_warns_of_divergence_and_of_nonfinite_states() -> None:
    z0 = torch.ones(2, 3, dtype=torch.float64)
    deq = get_deq(f_max_iter=30)
    (text,) = caught(lambda: deq(lambda z: 3 * z + 1, z0))  # never better than the start
    assert "DIVERGED" in text
    assert "MAX_ITER" not in text
    (text,) = caught(lambda: deq(lambda z: 0.5 * z / (z.abs() > 0.3), z0))
    assert "NONFINITE" in text
    rates = torch.tensor([[0.999], [3.0]], dtype=torch.float64)  # the first spends its budget only
    (text,) = caught(lambda: deq(lambda z: rates * z + 1, z0))
    assert "DIVERGED" in text
    assert "MAX_ITER" not in text


def test_auto_does_not_warn_of_a_residual_that_grew_after_a_good_state() -> None:
    """Plain iteration comes near a saddle, which is the returned state, before it diverges."""
    rates = torch.tensor([[0.1, 1.5]], dtype=torch.float64)
    b = torch.tensor([[1.0, 1e-3]], dtype=torch.float64)
    z0 = torch.zeros_like(b)

    def f(z: Tensor) -> Tensor:
        return rates * z + b

    stop = StopRule(40, 1e-9)
    assert "DIVERGED" in caught(lambda: solve(f, z0, FixedPointIter(), stop))[0]
    stats = solve(f, z0, FixedPointIter(), stop, on_failure="ignore").stats
    assert float(stats.abs_lowest) < 0.01 * float(stats.abs_trace[0, 0])
    assert not caught(lambda: solve(f, z0, FixedPointIter(), stop, on_failure="auto"))
    assert not caught(lambda: get_deq(f_max_iter=40, f_tol=1e-9)(f, z0))


@pytest.mark.parametrize("options", [{}, {"b_solver": "gmres"}, {"b_solver": "broyden"}])
def test_auto_warns_of_an_implicit_backward_above_its_tolerance(options: dict[str, Any]) -> None:
    W = problems.contraction(0.99, 12).requires_grad_()
    x = torch.randn(2, 12, dtype=torch.float64)
    deq = get_deq(ift=True, f_solver="anderson", f_max_iter=60, b_max_iter=2, **options)
    (z,), _ = deq(lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x))
    (text,) = caught(lambda: z.square().sum().backward())
    assert "the backward solve" in text
    assert "MAX_ITER" in text
    backward = Implicit(solver=Broyden(), stop=StopRule(2, 1e-9), on_failure="auto")
    z = fixed_point(lambda z: torch.tanh(z @ W.mT + x), torch.zeros_like(x), backward=backward,
                    on_failure="ignore").z  # fmt: skip
    assert "MAX_ITER" in caught(lambda: z.square().sum().backward())[0]


def test_without_a_tolerance_no_policy_reports_anything() -> None:
    for policy in ("auto", "warn", "raise"):
        deq = get_deq(f_tol=0.0, f_max_iter=5, on_failure=policy)
        assert not caught(lambda deq=deq: deq(lambda z: 3 * z + 1, torch.ones(2, 3)))
