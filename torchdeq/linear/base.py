"""Matrix-free linear solvers: `A x = b` for a batch of systems known only through products."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.numbers import row_norm
from torchdeq.registry import Registry, check_class
from torchdeq.stats import SolverStat, Trace
from torchdeq.stopping import StopRule, precision_floor

Matvec = Callable[[Tensor], Tensor]  # (B, D) -> (B, D), linear, row by row


class LinearSolution(NamedTuple):
    """The solutions, (B, D), with residuals and status of every system."""

    x: Tensor
    stats: SolverStat


class System:
    """`A x = b` with a budget: counts products, notes residuals, knows when all are solved.

    Half-precision right-hand sides are solved in single precision; only the products see their
    dtype. A system whose `b` or start is not finite is lost: inside it is a system with nothing on
    the right, so that no NaN enters a product, and its answer is NaN.
    """

    def __init__(
        self,
        matvec: Matvec,
        b: Tensor,
        stop: StopRule,
        goal: Tensor | None = None,
        *,
        x0: Tensor | None = None,
        eps: float | None = None,
        first: Tensor | None = None,
        scale: Tensor | None = None,
    ) -> None:
        if b.dim() != 2 or not b.is_floating_point():
            raise ValueError(
                f"b must be a floating-point matrix (B, D), got {b.dtype} {tuple(b.shape)}"
            )
        for name, given in (("x0", x0), ("first", first)):
            if given is not None and given.shape != b.shape:
                raise ValueError(
                    f"{name} must have the shape of b, {tuple(b.shape)}, got {tuple(given.shape)}"
                )
        if first is not None and x0 is not None:
            raise ValueError("first is the product with b, the first residual of a zero start: "
                             "drop x0 or first")  # fmt: skip
        self._dtype = torch.promote_types(b.dtype, torch.float32)
        self._given = b.dtype
        size = row_norm(b)
        self.lost = ~size.isfinite()  # (B,)
        if x0 is not None:
            self.lost = self.lost | ~row_norm(x0).isfinite()
        self.b, self.size = self._kept(b), torch.where(self.lost, 0.0, size)
        self.x0 = None if x0 is None else self._kept(x0)
        self._first = None if first is None else self._kept(first)
        self._reach = torch.zeros_like(size) if self.x0 is None else row_norm(self.x0)
        self.stop, self.products = stop, 0
        #: Residuals are divided by this before they are compared and reported.
        self.root = torch.full_like(size, stop.length(b.shape[1]))
        if scale is not None:
            self.root = self.root * scale
        self.goal = self._goals() if goal is None else goal.to(size.dtype)
        # Without a tolerance nothing is read back.
        self.checks = bool(stop.goal) or goal is not None
        self.eps = max(torch.finfo(b.dtype).eps, eps or 0.0)
        self._matvec, self._autocast = matvec, AutocastState(b.device)
        self._sizes: list[Tensor] = []
        self._nfe: list[int] = []
        self._stalled: Tensor | None = None  # (B,) the note at which each system stalled, else -1
        self._looked: int | None = None  # products made when the device was last read

    def _kept(self, t: Tensor) -> Tensor:
        """Return a tensor in the working precision, with zeros for systems that are lost."""
        return torch.where(self.lost[:, None], 0.0, t.to(self._dtype))

    def _goals(self) -> Tensor:
        """Return (B,) the residual at which each system is solved."""
        stop = self.stop
        if stop.rtol is not None and stop.atol is not None:
            return torch.add(stop.rtol * self.size, stop.atol * self.root)
        return stop.goal * (self.size if stop.mode == "rel" else self.root)

    @property
    def left(self) -> int:
        """Products that may still be made."""
        return self.stop.max_iter - self.products

    @property
    def knows_first(self) -> bool:
        """Whether the product with `b` is known and not used yet."""
        return self._first is not None

    def take_first(self) -> Tensor:
        """Return the known product with `b`; it can be taken once."""
        assert self._first is not None
        first, self._first = self._first, None
        return first

    def product(self, x: Tensor) -> Tensor:
        """Return `A x`, counted, unless it is the product with `b` itself and known."""
        if x is self.b and self.knows_first:
            return self.take_first()
        self.products += 1
        with self._autocast.restored():
            y = self._matvec(x.to(self._given))
        if y.shape != x.shape:
            raise ValueError(
                f"matvec must keep the shape: got {tuple(y.shape)}, expected {tuple(x.shape)}"
            )
        return y.to(x.dtype)

    def start(self, x0: Tensor | None) -> tuple[Tensor, Tensor]:
        """Return the first x and its residual; a zero start needs no product."""
        if x0 is None:
            return torch.zeros_like(self.b), self.b
        x = x0.to(self.b.dtype)
        return x, self.b - self.product(x)

    def solved(self, residual: Tensor) -> Tensor:
        """Return (B,) whether each residual norm is small enough; a zero one always is."""
        return residual <= self.goal

    def over(self, residual: Tensor) -> Tensor:
        """Return (B,) whether nothing more can be done: solved, or not finite."""
        return ~((residual > self.goal) & (residual < inf))

    def finished(self, residual: Tensor) -> bool:
        """Return whether every system is solved or not finite; reads as `every` does."""
        return self.checks and self.every(self.over(residual))

    def every(self, flags: Tensor, now: bool = False) -> bool:
        """Return whether all flags are known to be set.

        Reads one flag every `check_every` products, or `now`, and nothing without a tolerance.
        """
        if not self.checks:
            return False
        since = 0 if self._looked is None else self.products - self._looked
        if not now and 0 < since < self.stop.check_every:
            return False
        self._looked = self.products
        return bool(flags.all())

    def note(self, residual: Tensor) -> None:
        """Take down residual norms (B,) after the products made so far."""
        self.note_many(residual[None], [self.products])

    def note_many(self, residuals: Tensor, products: Sequence[int]) -> None:
        """Take down residual norms (K, B), each after that many products."""
        self._sizes.extend(residuals.unbind(0))
        self._nfe.extend(products)

    def correct(self, since: int, residual: Tensor) -> None:
        """Replace estimates noted since then by the true residual where that is larger."""
        for i in range(since, len(self._sizes)):
            self._sizes[i] = torch.maximum(self._sizes[i], residual)

    @property
    def notes(self) -> int:
        return len(self._sizes)

    def at_floor(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return (B,) whether residuals are as small as the precision of products lets them be.

        Args:
            residual: (B,) true residual norms.
            x: (B,) norms of the solutions.
        """
        floor = precision_floor(self.eps)
        least = floor * torch.maximum(self.size, x)
        # The answer of a nearly singular system may be so large that its rounding drowns b.
        flags: Tensor = (residual <= least) & (residual <= max(floor, self.eps**0.5) * self.size)
        return flags

    def sensible(self, residual: Tensor, x: Tensor) -> Tensor:
        """Return (B,) whether solutions of norm `x` are worth having for residuals of that norm.

        A singular system suggests enormous ones that solve next to nothing: those very much larger
        than the right-hand side must leave little of it.
        """
        most = max(1e5, torch.finfo(self._dtype).eps ** -0.5)
        flags: Tensor = (x <= most * (self.size + self._reach)) | (residual <= 0.01 * self.size)
        return flags

    def stall(self, flags: Tensor) -> None:
        """Take down that systems have stalled at the latest note."""
        if self._stalled is None:
            self._stalled = torch.full_like(flags, -1, dtype=torch.long)
        self._stalled = torch.where(flags & (self._stalled < 0), self.notes - 1, self._stalled)

    def solution(self, x: Tensor) -> LinearSolution:
        sizes = torch.stack(self._sizes) if self._sizes else self.size.new_empty(0, len(self.size))
        sizes = torch.where(self.lost, torch.nan, sizes) / self.root
        # |b| stands where |f(z)| stands in a fixed-point solve, so that "rel" is relative to it.
        norms = (self.size / self.root).expand_as(sizes)
        trace = Trace(sizes, norms, self._nfe, self._stalled)
        stop = replace(self.stop, return_final=False)
        if stop.mode == "rel" and stop.tol:  # exactly relative: no row is too small to be solved
            stop = replace(stop, tol=None, rtol=stop.tol, atol=0.0)
        stats = SolverStat.from_trace(trace, stop, self.products, self.eps)
        x = torch.where(self.lost[:, None], torch.nan, x)
        return LinearSolution(x.to(self._given), stats)


class LinearSolver(ABC):
    """A method for `A x = b`. Subclasses are frozen dataclasses whose fields are the options."""

    @property
    def confirms(self) -> bool:
        """Return whether reported residuals were measured at the answer, by a product."""
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
    ) -> LinearSolution:
        """Solve every system of the batch.

        A batch whose rows depend on each other is one system: pass it as (1, B D). A row of `b` or
        `x0` with a NaN or an infinity gives a row of NaN, status NONFINITE; the others are solved
        as if alone.

        Args:
            matvec: the product with `A`, (B, D) to (B, D); rows do not mix.
            b: right-hand sides, (B, D).
            stop: `max_iter` products at most; `"rel"` is relative to $|b|$; the residuals are read
                back from the device every `check_every` products.
            x0: the start; zero, which costs no product, if None.
            goal: (B,) residual norms (Euclidean) to reach, instead of the tolerance in `stop`.
            eps: the precision of the products if that is coarser than the dtype of `b` says. At its
                floor a system is STALLED.
            first: the product `A b` if it is known already; it is not counted again.
            scale: (B,) the solve divides residuals by it before it compares and reports them.
        """
        system = System(matvec, b, stop, goal, x0=x0, eps=eps, first=first, scale=scale)
        if not stop.max_iter:
            return system.solution(torch.zeros_like(system.b) if system.x0 is None else system.x0)
        with AutocastState(b.device).suspended():
            return system.solution(self.run(system, system.x0))

    @abstractmethod
    def run(self, system: System, x0: Tensor | None) -> Tensor:
        """Return the solutions, (B, D)."""


LINEAR: Registry[type[LinearSolver]] = Registry("linear solver")


def register_linear_solver(name: str, solver: type[LinearSolver]) -> None:
    """Make a linear solver known by name, e.g. for the option `b_solver`.

    Args:
        name: its name, which no fixed-point solver may have.
        solver: a frozen dataclass derived from `LinearSolver` with
            `run(system, x0)`, which returns the solutions, (B, D).
    """
    runs = getattr(solver, "run", None) is not LinearSolver.run
    check_class(solver, LinearSolver, "a linear solver", "run", runs)
    LINEAR.register(name, solver)
