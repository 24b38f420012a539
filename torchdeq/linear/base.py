"""The base class of matrix-free linear solvers, and their registry."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.linear.system import LinearSolution, Matvec, System
from torchdeq.registry import Registry, check_class
from torchdeq.stopping import StopRule


class LinearSolver(ABC):
    """The base class of linear solvers. Subclasses are frozen dataclasses with options as fields.

    A subclass defines `run(system)`, which asks the `System` for its start and for products, and
    records residuals in it.
    """

    @property
    def confirms(self) -> bool:
        """Return whether the solver measures the residual that it reports by a product.

        If not, the residual comes from a recurrence, which may be wrong in low precision.
        """
        return False

    @torch.no_grad()
    def solve(
        self,
        matvec: Matvec,
        b: Tensor,
        stop: StopRule,
        x0: Tensor | None = None,
        goal: Tensor | None = None,
        *,
        eps: float | None = None,
        first: Tensor | None = None,
        scale: Tensor | None = None,
        peers: Peers = ALONE,
        spans: bool = False,
    ) -> LinearSolution:
        """Solve every system of the batch.

        A batch whose rows depend on each other is one system: pass it as (1, B D). A row of `b` or
        `x0` with a NaN or an infinity gives a row of NaN with the status NONFINITE and does not
        affect the others.

        Args:
            matvec: the product with `A`, (B, D) to (B, D), row by row.
            b: right-hand sides, (B, D).
            stop: at most `max_iter` products; `"rel"` is relative to $|b|$; the host reads the
                residuals every `check_every` products.
            x0: the start; None is zero and costs no product.
            goal: (B,) Euclidean residual norms to reach, instead of the tolerance in `stop`.
            eps: the machine epsilon of the products if that is coarser than the dtype of `b` says.
                A system whose residual reaches this limit is STALLED.
            first: the product `A b` if the caller has computed it; it does not count again.
            scale: (B,) divisors of the residuals, applied before comparisons and reports.
            peers: the processes that make the same products together.
            spans: whether each row of `b` is the part in this process of a row that continues in
                the others.
        """
        system = System(
            matvec, b, stop, goal,
            x0=x0, eps=eps, first=first, scale=scale, peers=peers, spans=spans,
        )  # fmt: skip
        if not stop.max_iter:
            return system.solution(torch.zeros_like(system.b) if system.x0 is None else system.x0)
        with AutocastState(b.device).suspended():
            x = self.run(system)
        if not isinstance(x, Tensor) or x.shape != b.shape:
            got = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
            raise TypeError(
                f"{type(self).__name__}.run must return the solutions, a tensor of the shape of b, "
                f"{tuple(b.shape)}: got {got}"
            )
        return system.solution(x)

    @abstractmethod
    def run(self, system: System) -> Tensor:
        """Return the solutions, (B, D)."""


LINEAR: Registry[type[LinearSolver]] = Registry("linear solver")


def register_linear_solver(name: str, solver: type[LinearSolver]) -> None:
    """Register a linear solver under a name, e.g. for the option `b_solver`.

    Args:
        name: the name, which no fixed-point solver may have.
        solver: a frozen dataclass derived from `LinearSolver` with `run(system)`, which returns the
            solutions, (B, D).
    """
    runs = getattr(solver, "run", None) is not LinearSolver.run
    check_class(solver, LinearSolver, "a linear solver", "run", runs)
    LINEAR.register(name, solver)
