"""Linear systems with a budget: products, recorded residuals and the end of a solve."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.autocast import AutocastState
from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.stats import SolverStat
from torchdeq.stopping import StopRule, precision_floor
from torchdeq.trace import Trace

Matvec = Callable[[Tensor], Tensor]  # (B, D) -> (B, D), linear, row by row


class LinearSolution(NamedTuple):
    """The solutions, (B, D), with residuals and status of every system."""

    x: Tensor
    stats: SolverStat


class System:
    """A batch of systems `A x = b` with a budget: counts products, records residuals, stops.

    Right-hand sides in half precision are solved in single precision; only `matvec` gets their own
    dtype. A system whose `b` or start is not finite is invalid: the solver sees zeros in its place,
    so that no NaN enters a product, and its solution is NaN.

    A linear solver uses these attributes:

    - `b` (B, D): right-hand sides; `size` (B,): their norms; `x0`: the start, or None for zero;
    - `goal` (B,): residual norms at which systems are solved;
    - `checks`: whether the solve has a tolerance; if not, it must read nothing from the device;
    - `stop`: the stop rule; `products`: products so far; `left`: products that remain.

    In a distributed program a row may continue in other processes, and all of them must make the
    same products: norms and sums over rows come from `norm` and `total`, decisions from `every`,
    `finished` and `any`.
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
        peers: Peers = ALONE,
        spans: bool = False,
    ) -> None:
        _check_inputs(b, x0, first)
        self._peers, self._rows = peers, peers if spans else ALONE
        self._work_dtype, self._dtype = torch.promote_types(b.dtype, torch.float32), b.dtype
        size = self.norm(b)
        self._invalid = ~size.isfinite()  # (B,)
        if x0 is not None:
            self._invalid = self._invalid | ~self.norm(x0).isfinite()
        self.b, self.size = self._valid(b), torch.where(self._invalid, 0.0, size)
        self.x0 = None if x0 is None else self._valid(x0)
        self._first = None if first is None else self._valid(first)
        self._start_norm = torch.zeros_like(size) if self.x0 is None else self.norm(self.x0)
        self.stop, self.products = stop, 0
        # (B,) divisors of residuals in comparisons and reports.
        self._scale = torch.full_like(size, stop.length(b.shape[1]))
        if scale is not None:
            self._scale = self._scale * scale
        self.goal = self._goals() if goal is None else goal.to(size.dtype)
        self.checks = bool(stop.goal) or goal is not None
        self.eps = max(torch.finfo(b.dtype).eps, eps or 0.0)
        self._matvec, self._autocast = matvec, AutocastState(b.device)
        self._sizes: list[Tensor] = []
        self._nfe: list[int] = []
        self._stalled: Tensor | None = None  # (B,) the record at which each stalled, else -1
        self._last_read: int | None = None  # products when the device was last read

    def _valid(self, t: Tensor) -> Tensor:
        """Return a tensor in the working precision, with zeros for invalid systems."""
        return torch.where(self._invalid[:, None], 0.0, t.to(self._work_dtype))

    def _goals(self) -> Tensor:
        """Return (B,) the residual norm at which each system is solved, by the stop rule."""
        stop = self.stop
        if stop.rtol is not None and stop.atol is not None:
            return torch.add(stop.rtol * self.size, stop.atol * self._scale)
        return stop.goal * (self.size if stop.mode == "rel" else self._scale)

    def norm(self, rows: Tensor) -> Tensor:
        """Return (B,) the norms of rows, (B, D)."""
        return self._rows.norm(rows)

    def total(self, sums: Tensor) -> Tensor:
        """Return sums over whole rows, such as inner products, from the sums in this process."""
        return self._rows.total(sums)

    @property
    def left(self) -> int:
        """Return how many products the budget still allows."""
        return self.stop.max_iter - self.products

    @property
    def has_first_product(self) -> bool:
        """Return whether the caller passed the product with `b` and the solver has not used it."""
        return self._first is not None

    def take_first_product(self) -> Tensor:
        """Return the product with `b` that the caller passed; a solver may take it once."""
        assert self._first is not None
        first, self._first = self._first, None
        return first

    def product(self, x: Tensor) -> Tensor:
        """Return `A x` and count it, unless `x` is `b` and the caller passed this product."""
        if x is self.b and self.has_first_product:
            return self.take_first_product()
        if not self.left:
            raise RuntimeError(
                f"a linear solver asked for more than its {self.stop.max_iter} products"
            )
        self.products += 1
        with self._autocast.restored():
            y = self._matvec(x.to(self._dtype))
        if y.shape != x.shape:
            raise ValueError(
                f"matvec must keep the shape: got {tuple(y.shape)}, expected {tuple(x.shape)}"
            )
        return y.to(x.dtype)

    def start(self) -> tuple[Tensor, Tensor]:
        """Return the first x and its residual; a zero start needs no product."""
        if self.x0 is None:
            return torch.zeros_like(self.b), self.b
        return self.x0, self.b - self.product(self.x0)

    def solved(self, residual: Tensor) -> Tensor:
        """Return (B,) whether each residual norm is at most its goal."""
        return residual <= self.goal

    def over(self, residual: Tensor) -> Tensor:
        """Return (B,) whether each system is solved, or has a residual that is not finite."""
        return ~((residual > self.goal) & (residual < inf))

    def finished(self, residual: Tensor) -> bool:
        """Return whether `over` holds for every system; reads the device as seldom as `every`."""
        return self.checks and self.every(self.over(residual))

    def every(self, flags: Tensor, now: bool = False) -> bool:
        """Return whether all flags are set, as far as the host may read them.

        The host reads one flag every `check_every` products, or `now`. In between, and without a
        tolerance, it reads nothing and the answer is False.
        """
        if not self.checks:
            return False
        since = 0 if self._last_read is None else self.products - self._last_read
        if not now and 0 < since < self.stop.interval:
            return False
        self._last_read = self.products
        return not self.any(not bool(flags.all()))

    def any(self, flag: bool) -> bool:
        """Return whether a flag of the host is set, in any of the processes."""
        return self._peers.any(flag)

    def record(self, residual: Tensor) -> None:
        """Record residual norms, (B,), after the products so far."""
        self.record_many(residual[None], [self.products])

    def record_many(self, residuals: Tensor, products: Sequence[int]) -> None:
        """Record residual norms, (K, B), after the given numbers of products."""
        self._sizes.extend(residuals.unbind(0))
        self._nfe.extend(products)

    def correct(self, since: int, residual: Tensor) -> None:
        """Raise estimates to the true residual where that is larger.

        Args:
            since: the value of `record_count` before the first of these estimates.
            residual: (B,) true residual norms.
        """
        for i in range(since, len(self._sizes)):
            self._sizes[i] = torch.maximum(self._sizes[i], residual)

    @property
    def record_count(self) -> int:
        """Return how many residual norms of each system the solver has recorded."""
        return len(self._sizes)

    def at_floor(self, residual: Tensor, length: Tensor) -> Tensor:
        """Return (B,) whether residuals have reached the limit of the precision of products.

        Args:
            residual: (B,) true residual norms.
            length: (B,) norms of the solutions.
        """
        floor = precision_floor(self.eps)
        least = floor * torch.maximum(self.size, length)
        # A nearly singular system may have a solution so large that its rounding exceeds b.
        flags: Tensor = (residual <= least) & (residual <= max(floor, self.eps**0.5) * self.size)
        return flags

    def sensible(self, residual: Tensor, length: Tensor) -> Tensor:
        """Return (B,) whether solutions are of moderate size or have small residuals.

        In a singular system, an enormous solution may reduce the residual only a little.

        Args:
            residual: (B,) true residual norms.
            length: (B,) norms of the solutions.
        """
        limit = max(1e5, torch.finfo(self._work_dtype).eps ** -0.5)
        moderate = length <= limit * (self.size + self._start_norm)
        flags: Tensor = moderate | (residual <= 0.01 * self.size)
        return flags

    def stall(self, flags: Tensor) -> None:
        """Record that systems have stalled at the last recorded residual."""
        if self._stalled is None:
            self._stalled = torch.full_like(flags, -1, dtype=torch.long)
        new = flags & (self._stalled < 0)
        self._stalled = torch.where(new, self.record_count - 1, self._stalled)

    def solution(self, x: Tensor) -> LinearSolution:
        """Return solutions with the statistics of the recorded residuals."""
        sizes = torch.stack(self._sizes) if self._sizes else self.size.new_empty(0, len(self.size))
        sizes = torch.where(self._invalid, torch.nan, sizes) / self._scale
        # |b| takes the place of |f(z)| in a fixed-point solve: "rel" is relative to it.
        norms = (self.size / self._scale).expand_as(sizes)
        trace = Trace(sizes, norms, self._nfe, self._stalled)
        stop = replace(self.stop, return_final=False)
        if stop.mode == "rel" and stop.tol:  # without the epsilon of "rel", for very small rows
            stop = replace(stop, tol=None, rtol=stop.tol, atol=0.0)
        stats = SolverStat.from_trace(trace, stop, self.products, self.eps)
        x = torch.where(self._invalid[:, None], torch.nan, x)
        return LinearSolution(x.to(self._dtype), stats)


def _check_inputs(b: Tensor, x0: Tensor | None, first: Tensor | None) -> None:
    """Raise `ValueError` unless `b` is a matrix and the start and first product have its shape."""
    if b.dim() != 2 or not b.is_floating_point():
        raise ValueError(
            f"b must be a floating-point matrix (B, D), got {b.dtype} {tuple(b.shape)}"
        )
    for name, t in (("x0", x0), ("first", first)):
        if t is not None and t.shape != b.shape:
            raise ValueError(
                f"{name} must have the shape of b, {tuple(b.shape)}, got {tuple(t.shape)}"
            )
    if first is not None and x0 is not None:
        raise ValueError(
            "first, the product with b, is the first product of a zero start: drop x0 or first"
        )
