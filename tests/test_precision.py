"""Half precision: solves end at the floor of f, and scaled losses give the gradients of plain ones.

The floor of a map is the residual that its rounding allows: below it nothing improves, and a solve
that asks for less must end as STALLED, without spending its budget and without a warning.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq import ConvergenceWarning, Implicit, SolverStat, Status, StopRule, fixed_point
from torchdeq.linear import LINEAR
from torchdeq.solver import SOLVERS

HALF = {"bf16": torch.bfloat16, "fp16": torch.float16}
REACHED = {"bf16": 1e-2, "fp16": 1e-3}  # the tolerances of the zoo
BUDGET = 200

#: Solvers that decide when to stop; the others spend their budget, whatever the precision is.
WATCHING = [name for name in SOLVERS if SOLVERS[name]().watches]
#: Newton's line search moves z by less than f resolves. So it can shrink the residual of a state in
#: single precision far below the floor of f, slowly: the solve is not at its end there.
ENDING = [name for name in WATCHING if name != "newton_krylov"]
every_precision = pytest.mark.parametrize("precision", list(HALF))
every_way = pytest.mark.parametrize("half_state", [False, True])


def layer_map(precision: str, half_state: bool) -> tuple[Callable[..., Tensor], Tensor, Tensor]:
    """Return a map with a layer in half precision, its start and its input.

    The state itself is in half precision, or in single precision under autocast.
    """
    torch.manual_seed(1)
    layer = nn.Linear(32, 32)
    with torch.no_grad():
        layer.weight.mul_(0.7 / torch.linalg.matrix_norm(layer.weight, 2))
    x = torch.randn(6, 32)
    if half_state:
        layer, x = layer.to(HALF[precision]), x.to(HALF[precision])
    x = x.requires_grad_()
    return (lambda z: torch.tanh(layer(z) + x)), torch.zeros_like(x), x


def block(precision: str, half_state: bool) -> AbstractContextManager[Any]:
    return nullcontext() if half_state else torch.autocast("cpu", HALF[precision])


def ended_at_the_floor(stats: SolverStat, precision: str) -> None:
    assert float(stats["rel_lowest"].max()) < REACHED[precision]
    names = {Status(code).name for code in stats.status.tolist()}
    assert names <= {"STALLED", "CONVERGED"}
    assert stats.nfe < BUDGET / 2


@every_precision
@every_way
@pytest.mark.parametrize("name", ENDING)
def test_a_forward_solve_ends_at_the_floor(name: str, precision: str, half_state: bool) -> None:
    f, z0, _ = layer_map(precision, half_state)
    stop = StopRule(BUDGET, 1e-9, mode="rel")
    with warnings.catch_warnings(), torch.no_grad(), block(precision, half_state):
        warnings.simplefilter("error", ConvergenceWarning)
        ended_at_the_floor(fixed_point(f, z0, solver=SOLVERS[name](), stop=stop).stats, precision)


@every_precision
@every_way
@pytest.mark.parametrize("name", [*ENDING, *LINEAR])
def test_an_adjoint_solve_ends_at_the_floor(name: str, precision: str, half_state: bool) -> None:
    f, z0, x = layer_map(precision, half_state)
    solver = SOLVERS[name]() if name in SOLVERS else LINEAR[name]()
    written: list[SolverStat] = []
    backward = Implicit(solver=solver, stop=StopRule(BUDGET, 1e-9), writer=written.append)
    with warnings.catch_warnings():
        warnings.simplefilter("error", ConvergenceWarning)
        with block(precision, half_state):
            z = fixed_point(f, z0, stop=StopRule(30, 0.0), backward=backward).z
        z.float().square().sum().backward()
    ended_at_the_floor(written[0], precision)
    assert x.grad is not None
    assert bool(x.grad.isfinite().all())


@every_precision
@pytest.mark.parametrize("name", [*WATCHING, *LINEAR])
def test_the_tolerances_of_the_zoo_are_met(name: str, precision: str) -> None:
    f, z0, _ = layer_map(precision, half_state=False)
    tol, written = REACHED[precision], list[SolverStat]()
    forward = SOLVERS[name]() if name in SOLVERS else None
    solver = SOLVERS[name]() if name in SOLVERS else LINEAR[name]()
    backward = Implicit(solver=solver, stop=StopRule(60, tol), writer=written.append)
    with block(precision, half_state=False):
        out = fixed_point(f, z0, solver=forward, stop=StopRule(60, tol, "rel"), backward=backward)
    out.z.square().sum().backward()
    assert bool(out.stats.converged.all())
    assert bool(written[0].converged.all())


class ScaledTraining:
    """A small model with an implicit gradient under fp16 autocast, and a scaler on the CPU."""

    def __init__(
        self, scale: float = 2.0**16, precision: torch.dtype | None = torch.float16
    ) -> None:
        torch.manual_seed(2)
        self.layer, self.head = nn.Linear(16, 16), nn.Linear(16, 1)
        with torch.no_grad():
            self.layer.weight.mul_(0.5)
        self.x, self.y = torch.randn(8, 16), torch.randn(8, 1)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=1000)
        self.optimizer = torch.optim.SGD(self.parameters(), lr=0.1)
        self.precision = precision

    def parameters(self) -> list[nn.Parameter]:
        return [*self.layer.parameters(), *self.head.parameters()]

    def loss(self, size: float = 1.0) -> Tensor:
        mixed = nullcontext() if self.precision is None else torch.autocast("cpu", self.precision)
        backward = Implicit(stop=StopRule(40, 1e-3))
        with mixed:
            z = fixed_point(lambda z: torch.tanh(self.layer(z) + self.x), torch.zeros_like(self.x),
                            stop=StopRule(40, 1e-3, "rel"), backward=backward).z  # fmt: skip
            return size * (self.head(z).float() - self.y).square().mean()

    def gradients(self, size: float = 1.0) -> list[Tensor]:
        """Return the gradients after the scaler has divided by its scale."""
        self.optimizer.zero_grad()
        self.scaler.scale(self.loss(size)).backward()
        self.scaler.unscale_(self.optimizer)
        return [p.grad.clone() for p in self.parameters() if p.grad is not None]


@pytest.mark.parametrize("scale", [1.0, 2.0**8, 2.0**14])
def test_gradients_after_unscaling_do_not_depend_on_the_scale(scale: float) -> None:
    reference = ScaledTraining(1.0, precision=None).gradients()
    for g, wanted in zip(ScaledTraining(scale).gradients(), reference, strict=True):
        assert float((g - wanted).norm()) < 5e-3 * float(wanted.norm())
    other = ScaledTraining(2.0**4).gradients()
    for g, wanted in zip(ScaledTraining(scale).gradients(), other, strict=True):
        assert float((g - wanted).norm()) < 2e-3 * float(wanted.norm())


def test_scaling_keeps_gradients_that_fp16_would_lose() -> None:
    tiny = 1e-6  # the cotangents underflow in fp16
    reference = ScaledTraining(1.0, precision=None).gradients(tiny)
    lost, kept = ScaledTraining(1.0).gradients(tiny), ScaledTraining(2.0**16).gradients(tiny)
    errors = [
        [float((g - w).norm() / w.norm()) for g, w in zip(each, reference, strict=True)]
        for each in (lost, kept)
    ]
    assert max(errors[0]) > 0.1
    assert max(errors[1]) < 1e-2


def test_a_step_with_infinities_is_skipped_and_the_scale_halves() -> None:
    training = ScaledTraining(2.0**16)
    before = [p.detach().clone() for p in training.parameters()]
    training.optimizer.zero_grad()
    training.scaler.scale(training.loss(1e4)).backward()  # overflows fp16 on the way back
    training.scaler.step(training.optimizer)
    training.scaler.update()
    assert training.scaler.get_scale() == 2.0**15
    torch.testing.assert_close([p.detach() for p in training.parameters()], before, rtol=0, atol=0)
    for _ in range(20):  # the scale falls until a step is possible
        training.optimizer.zero_grad()
        training.scaler.scale(training.loss()).backward()
        training.scaler.step(training.optimizer)
        training.scaler.update()
    assert any(bool((p != q).any()) for p, q in zip(training.parameters(), before, strict=True))
    assert all(bool(p.isfinite().all()) for p in training.parameters())
