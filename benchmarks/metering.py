"""What one evaluation costs a solver beside `f`: counts by the meter, the same on every machine.

The map is a shift, so that no solver reaches its tolerance within the budget, and every figure is
the difference of two budgets: what a solve does once cancels.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from benchmarks.accelerator import Meter
from benchmarks.tally import Tally

BUDGETS = (14, 44)
PRODUCTS = (8, 28)  # within one cycle of GMRES
SIZES = {"small": (32, 64), "large": (4, 1 << 14)}
STATES = ("tensor", "tuple")
STOPS = {"no tolerance": (0.0, 1), "tolerance": (1e-12, 1), "every 5": (1e-12, 5)}
FIGURES = ("launches", "allocations", "reads", "uploads", "host", "read", "written")


class Cell(NamedTuple):
    """One row of the table."""

    solver: str
    state: str
    size: str
    stop: str
    device: str  # "cpu" or "accelerator", which is simulated

    @property
    def key(self) -> str:
        return ", ".join(self)


class Shift:
    r"""The map $f(z)_i = \tanh(0.97 z_{i-1} + x_i)$, which the meter does not count.

    Args:
        meter: the meter to pause.
        shape: of the state, or of each of its three tensors.
        parts: the number of tensors.
    """

    def __init__(self, meter: Meter, shape: tuple[int, int], parts: int) -> None:
        rng = torch.Generator().manual_seed(0)
        self._meter, self.calls = meter, 0
        self._x = [meter.put(0.1 * torch.randn(shape, generator=rng)) for _ in range(parts)]
        start = [meter.put(torch.zeros(shape)) for _ in range(parts)]
        self.z0: Any = start[0] if parts == 1 else tuple(start)

    def __call__(self, *z: Tensor) -> Any:
        """Return the image of a state."""
        self.calls += 1
        with self._meter.paused():
            shifted = [0.97 * t.roll(1, 1) for t in (z[-1], *z[:-1])]
            images = [torch.tanh(s + x) for s, x in zip(shifted, self._x, strict=True)]
        return images[0] if len(images) == 1 else tuple(images)

    def jvp(self, z: Tensor, v: Tensor) -> Tensor:
        """Return the derivative at `z` along `v`."""
        self.calls += 1
        with self._meter.paused():
            return 0.97 * v.roll(1, 1) * (1 - torch.tanh(0.97 * z.roll(1, 1) + self._x[0]) ** 2)


class MeterBench:
    """The requests about counts."""

    contestant: Any

    def count(self, solver: str, state: str, size: str, stop: str, device: str) -> dict[str, float]:
        """Return the figures of one evaluation in a solve."""
        tol, every = STOPS[stop]
        shape, parts = SIZES[size], 1 if state == "tensor" else 3

        def solve(meter: Meter, calls: int) -> int:
            f = Shift(meter, shape, parts)
            with meter:
                self.contestant.metered_solve(f, f.z0, solver, calls, tol, every)
            return f.calls

        return _figures(solve, BUDGETS, device, 4 * parts * shape[0] * shape[1])

    def count_products(
        self, solver: str, state: str, size: str, stop: str, device: str
    ) -> dict[str, float]:
        """Return the figures of one product in a linear solve, beside the product itself."""
        tol, every = STOPS[stop]
        shape = SIZES[size]

        def solve(meter: Meter, products: int) -> int:
            f = Shift(meter, shape, 1)
            b = meter.put(torch.ones(shape) + torch.arange(shape[1]) % 7)
            with meter:
                self.contestant.metered_linear(
                    lambda v: v - f.jvp(f.z0, v), b, solver, products, tol, every
                )
            return f.calls

        return _figures(solve, PRODUCTS, device, 4 * shape[0] * shape[1])


def _figures(
    solve: Callable[[Meter, int], int], budgets: tuple[int, int], device: str, state: int
) -> dict[str, float]:
    """Return the difference of two budgets per evaluation; bytes in units of the state."""
    tallies: list[Tally] = []
    calls: list[int] = []
    for budget in budgets:
        meter = Meter(simulated=device == "accelerator")
        calls.append(solve(meter, budget))
        tallies.append(meter.tally)
    few, many = tallies
    spent = calls[1] - calls[0]
    units = {"read": state, "written": state}
    return {
        name: round((getattr(many, name) - getattr(few, name)) / spent / units.get(name, 1), 2)
        for name in FIGURES
    }
