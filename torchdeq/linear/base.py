"""Matrix-free linear solvers: ``A x = b`` for a batch of systems known only through products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.registry import Registry
from torchdeq.solver.stats import SolverStat, Trace
from torchdeq.solver.stopping import StopRule

Matvec = Callable[[Tensor], Tensor]  # (B, D) -> (B, D), linear, row by row


class LinearSolution(NamedTuple):
    """The solutions, (B, D), with residuals and status of every system."""

    x: Tensor
    stats: SolverStat


class System:
    """``A x = b`` with a budget: counts products, notes residuals, knows when all are solved.

    Half-precision right-hand sides are solved in single precision; only the products see their
    dtype.
    """

    def __init__(self, matvec: Matvec, b: Tensor, stop: StopRule, goal: Tensor | None) -> None:
        if b.dim() != 2 or not b.is_floating_point():
            raise ValueError(
                f"b must be a floating-point matrix (B, D), got {b.dtype} {tuple(b.shape)}"
            )
        self.b = b.to(torch.promote_types(b.dtype, torch.float32))
        self.size = torch.linalg.vector_norm(self.b, dim=1)
        self.stop, self.products = stop, 0
        self.goal = self._goals() if goal is None else goal
        self.checks = (
            bool(stop.goal) or goal is not None
        )  # without a tolerance nothing is read back
        self._matvec, self._dtype, self._autocast = matvec, b.dtype, AutocastState(b.device)
        self._sizes: list[Tensor] = []
        self._nfe: list[int] = []

    def _goals(self) -> Tensor:
        """(B,) the residual at which each system is solved."""
        stop = self.stop
        if stop.rtol is not None and stop.atol is not None:
            return torch.add(stop.rtol * self.size, stop.atol)
        tol = stop.goal
        return tol * self.size if stop.mode == "rel" else torch.full_like(self.size, tol)

    @property
    def left(self) -> int:
        """Products that may still be made."""
        return self.stop.max_iter - self.products

    def product(self, x: Tensor) -> Tensor:
        """``A x``, counted."""
        self.products += 1
        with self._autocast.restored():
            y = self._matvec(x.to(self._dtype))
        if y.shape != x.shape:
            raise ValueError(
                f"matvec must keep the shape: got {tuple(y.shape)}, expected {tuple(x.shape)}"
            )
        return y.to(x.dtype)

    def start(self, x0: Tensor | None) -> tuple[Tensor, Tensor]:
        """The first x and its residual; a zero start needs no product."""
        if x0 is None:
            return torch.zeros_like(self.b), self.b
        x = x0.to(self.b.dtype)
        return x, self.b - self.product(x)

    def solved(self, residual: Tensor) -> Tensor:
        """(B,) whether each residual norm is small enough; a zero one always is."""
        return (residual <= self.goal) | (residual == 0)

    def over(self, residual: Tensor) -> Tensor:
        """(B,) whether nothing more can be done: solved, or not finite."""
        return self.solved(residual) | ~residual.isfinite()

    def finished(self, residual: Tensor) -> bool:
        """Whether that holds for all; reads one flag, and none without a tolerance."""
        return self.checks and bool(self.over(residual).all())

    def note(self, residual: Tensor) -> None:
        """Residual norms (B,) after the products made so far."""
        self._sizes.append(residual)
        self._nfe.append(self.products)

    def correct(self, since: int, residual: Tensor) -> None:
        """Estimates noted since then were too good where the true residual misses the goal."""
        missed = residual > self.goal
        for i in range(since, len(self._sizes)):
            estimate = self._sizes[i]
            worse = torch.maximum(estimate, residual)
            self._sizes[i] = torch.where(missed & (estimate <= self.goal), worse, estimate)

    @property
    def notes(self) -> int:
        return len(self._sizes)

    def solution(self, x: Tensor) -> LinearSolution:
        sizes = torch.stack(self._sizes) if self._sizes else self.size.new_empty(0, len(self.size))
        # |b| stands where |f(z)| stands in a fixed-point solve, so that "rel" is relative to it.
        trace = Trace(sizes, self.size.expand_as(sizes), self._nfe)
        stop = replace(self.stop, return_final=False)
        stats = SolverStat.from_trace(trace, stop, self.products, torch.finfo(sizes.dtype).eps)
        return LinearSolution(x.to(self._dtype), stats)


class LinearSolver(ABC):
    """A method for ``A x = b``. Subclasses are frozen dataclasses whose fields are the options."""

    @torch.no_grad()
    def solve(
        self,
        matvec: Matvec,
        b: Tensor,
        stop: StopRule,
        x0: Tensor | None = None,
        goal: Tensor | None = None,
    ) -> LinearSolution:
        """Solve every system of the batch.

        Args:
            matvec: the product with ``A``, (B, D) to (B, D); rows do not mix.
            b: right-hand sides, (B, D).
            stop: ``max_iter`` products at most; ``"rel"`` is relative to :math:`|b|`.
            x0: the start; zero, which costs no product, if None.
            goal: (B,) residual norms to reach, instead of the tolerance in ``stop``.
        """
        system = System(matvec, b, stop, goal)
        if not stop.max_iter:
            return system.solution(torch.zeros_like(b) if x0 is None else x0)
        with AutocastState(b.device).suspended():
            return system.solution(self.run(system, x0))

    @abstractmethod
    def run(self, system: System, x0: Tensor | None) -> Tensor:
        """The solutions, (B, D)."""


LINEAR: Registry[type[LinearSolver]] = Registry("linear solver")
