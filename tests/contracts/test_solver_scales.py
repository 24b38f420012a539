"""Contracts of every registered solver for states of any scale, size and precision."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from tests.contracts.solvers import NAMES, WATCHING, run
from torchdeq.solver import Status, StopRule

SCALES = [1e-25, 1.0, 1e20]
RULES: list[dict[str, Any]] = [
    {"tol": 1e-3, "mode": "abs"},
    {"tol": 1e-3, "mode": "rel"},
    {"tol": None, "rtol": 1e-3, "atol": 0.0},
    {"tol": 0.0},
]
VARIANTS: list[tuple[str, dict[str, Any]]] = [(name, {}) for name in NAMES] + [
    ("anderson", {"type": 1}),
    ("anderson", {"safeguard": 2.0}),
    ("broyden", {"update": "bad"}),
    ("broyden", {"ls": True}),
    ("broyden", {"l_thres": 5}),
    ("newton_krylov", {"jacobian": "difference"}),
]


@pytest.mark.parametrize(("name", "options"), VARIANTS)
@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("d", [4, 6000])  # few numbers, and more than are summed in float64
def test_states_of_any_scale_are_solved(
    name: str, options: dict[str, Any], scale: float, rule: dict[str, Any], d: int
) -> None:
    """Solve f(z) = r z + s in float32, where squares leave the range; the answer is s / (1 - r)."""
    rates = torch.tensor([[0.5], [-0.3], [0.8]])
    if rule["tol"] and rule["mode"] == "abs":
        rule = rule | {"tol": 1e-3 * scale * d**0.5}
    exact = 1 / (1 - rates.double()).expand(3, d)
    solution = run(
        name, lambda z: rates * z + scale, torch.zeros(3, d), StopRule(100, **rule), options
    )
    if rule["tol"] and rule["mode"] == "rel" and scale < 1:
        return  # everything is small next to the published |f(z)| + 1e-9
    error = (solution.z.double() / scale - exact).norm(dim=1) / exact.norm(dim=1)
    assert (error < 1e-2).all()
    if name in WATCHING:
        assert rule["tol"] == 0.0 or solution.stats.converged.all()
        residual = (rates * solution.z + scale - solution.z).double().norm(dim=1)
        assert (residual <= 1.01 * solution.stats.abs_lowest.double() + 1e-6 * scale * d**0.5).all()


@pytest.mark.parametrize("name", WATCHING)
def test_half_an_answer_has_not_converged_however_small_it_is(name: str) -> None:
    stop = StopRule(2, None, rtol=1e-3, atol=0.0)
    solution = run(name, lambda z: 0.5 * z + 1e-25, torch.zeros(2, 8), stop)
    assert not solution.stats.converged.any()


@pytest.mark.parametrize(("name", "options"), VARIANTS)
def test_the_scale_of_the_state_does_not_change_the_path(
    name: str, options: dict[str, Any]
) -> None:
    """Powers of two are exact, so every step is the same but for its exponent."""
    W = problems.contraction(0.9, 12).float()
    x = torch.randn(3, 12)
    stop = StopRule(30, None, rtol=1e-4, atol=0.0)
    plain = run(name, lambda z: z @ W + x, torch.zeros(3, 12), stop, options)
    for scale in (2.0**-80, 2.0**66):
        solution = run(name, lambda z: z @ W + x * scale, torch.zeros(3, 12), stop, options)  # noqa: B023
        torch.testing.assert_close(solution.z / scale, plain.z, rtol=1e-3, atol=1e-4)
        assert abs(solution.stats.nfe - plain.stats.nfe) <= 2


@pytest.mark.parametrize("name", WATCHING)
def test_a_root_mean_square_tolerance_means_the_same_at_every_size(name: str) -> None:
    stop, x = StopRule(200, 1e-3, norm="rms"), torch.linspace(-1, 1, 10, dtype=torch.float64)

    def of_size(times: int) -> Any:
        shift = x.repeat(times)
        return run(name, lambda z: torch.cos(0.8 * z + shift), 0 * shift.expand(2, -1), stop)

    small, large = of_size(1).stats, of_size(500).stats
    assert small.nfe == large.nfe
    torch.testing.assert_close(small.abs_trace, large.abs_trace, rtol=1e-2, atol=1e-6)
    assert large.converged.all()
    torch.testing.assert_close(large.abs_trace[0, 0], torch.cos(x).square().mean().sqrt())


@pytest.mark.parametrize("name", WATCHING)
def test_a_map_of_coarse_precision_stalls_if_the_caller_declares_it(name: str) -> None:
    """f rounds to bfloat16 inside and returns float32: the solver cannot see it."""
    W = problems.contraction(0.8, 64).to(torch.bfloat16)
    b = torch.randn(4, 64)

    def f(z: Tensor) -> Tensor:
        return (z.to(torch.bfloat16) @ W).float() + b

    stop = StopRule(800, 1e-8, "rel")
    stats = run(name, f, torch.zeros(4, 64), stop, eps=torch.finfo(torch.bfloat16).eps).stats
    assert not stats.failed.any()
    assert (stats.status == Status.STALLED).any()
    assert stats.nfe < 800
    assert stats.abs_trace.shape[1] < 150
