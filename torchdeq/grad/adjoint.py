r"""The linear system behind every implicit gradient: $u = J^\top u + g$.

How it is scaled. The answer is linear in $g$, so a tolerance is relative to $|g|$ and means the
same for every loss: relative to each sample's own cotangent where samples are solved side by side,
and to the whole cotangent where they are one system (`coupled`). Only one system at a time is
rescaled to norm 1; rescaling samples side by side would make another system of coupled ones.

How coupling is found where nobody has declared it. One product more, with the rows of the cotangent
rescaled, shows whether rows depend on each other. It need not show everything, so the answer is
tested beside it: a Krylov method measures the residual of its answer anyway (one that does not
takes the batch as one system), and for a quasi-Newton method, whose answer is put together from
several iterates, one more product does. Plain iteration takes no sample apart from the others: it
is right without any of this if all samples keep the same iterate. Without a tolerance nothing may
be read from the device: there a Krylov method takes the batch as one system, and every other one
keeps the same iterate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache
from math import inf
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq.grad.shine import Shine
from torchdeq.linear import LinearSolver, Neumann
from torchdeq.notes import note
from torchdeq.numbers import row_norm
from torchdeq.solver import (
    BACKWARD,
    Coupling,
    FixedPointIter,
    SimpleFixedPointIter,
    Solver,
    SolverStat,
    Status,
    StopRule,
    report_failures,
    solve,
)
from torchdeq.solver.stopping import relative

if TYPE_CHECKING:
    from torchdeq.grad.implicit import Implicit

Product = Callable[[Tensor], Tensor]

_SLACK = 64  # roundings by which two products of the same rows may differ
_LOOSE = 10  # by how much the residual of an image may exceed that of its point
_COUPLED = (
    "samples depend on each other: the backward pass takes the batch as one system; coupled=True "
    "does so in the forward pass too, and saves the products that find out"
)


def solve_adjoint(
    method: Implicit, vjp: Product, g: Tensor, coupled: Coupling, eps: float
) -> Tensor:
    """Return `u` with `u = vjp(u) + g`; report to the method's writer, and failures.

    Args:
        method: solver, budget and tolerance; what to do about failures.
        vjp: products with the transposed Jacobian, (N, B, D) to (N, B, D).
        g: (N, B, D) cotangents of N independent problems with B samples each.
        coupled: whether the samples of a problem depend on each other; None finds out.
        eps: the precision in which `f` computes.
    """
    n, batch, d = g.shape

    def product(v: Tensor) -> Tensor:
        return vjp(v.view(n, batch, d)).reshape(v.shape)

    system = _System(method.solver, method.stop, product, eps, batch)
    u, stats, size = system.solve(g, coupled)
    if method.writer is not None:
        method.writer(stats if size is None else _relative_to(size, stats))
    if method.on_failure != "ignore" and method.stop.goal and method.stop.max_iter:
        report_failures(stats, method.on_failure, BACKWARD)
    return u.view_as(g)


def on_all_cotangents(
    solve: Callable[[Product, Tensor], Tensor], product: Product, g: Tensor
) -> Tensor:
    """Solve for several cotangents at once (`is_grads_batched`): problems with one Jacobian.

    Args:
        solve: called with products on (N, B, D) and the cotangents (N, B, D).
        product: with the transposed Jacobian, on tensors that carry the batch of cotangents.
        g: such a tensor.
    """
    level = _torch.legacy_batch_level()
    cotangents = _torch.without_legacy_batch(g, level, 1)  # (N, B, D)

    def products(v: Tensor) -> Tensor:
        batched = product(_torch.with_legacy_batch(v, level))
        return _torch.without_legacy_batch(batched, level, len(cotangents))

    return _torch.with_legacy_batch(solve(products, cotangents), level)


def _relative_to(size: Tensor, stats: SolverStat) -> SolverStat:
    """Return the statistics with absolute residuals divided by (rows,) sizes."""
    size = torch.where(size > 0, size, 1.0)
    values = dict(stats.items())
    values["abs_lowest"] = stats["abs_lowest"] / size
    values["abs_trace"] = stats["abs_trace"] / size[:, None]
    return SolverStat(values, nfe=stats.nfe, status=stats.status)


class _Answer(NamedTuple):
    u: Tensor
    stats: SolverStat
    size: Tensor | None = None  # (rows,) what absolute residuals are still to be divided by


@dataclass(frozen=True)
class _System:
    """A solver with its budget, and the products it may ask for."""

    solver: Solver[Any] | LinearSolver
    stop: StopRule
    product: Product
    eps: float
    batch: int  # samples of one problem

    def solve(self, g: Tensor, coupled: Coupling) -> _Answer:
        g = g.contiguous()  # the cotangent of a sum is one number, repeated
        rows, problems = g.flatten(0, 1), g.flatten(1)
        krylov = isinstance(self.solver, LinearSolver)
        if not self.stop.max_iter or (krylov and self.stop.rtol is None and self.stop.goal >= 1):
            # Without a product: the Jacobian-free gradient. A tolerance of 1 asks for no more, and
            # a linear solver, which starts from zero, would give less.
            none = solve(self.product, rows, FixedPointIter(), self.stop, on_failure="ignore")
            return _Answer(rows, none.stats)
        if self.batch < 2:
            return self._scaled(rows)
        if coupled:
            return self._together(problems)
        if isinstance(self.solver, Neumann):
            return replace(self, solver=FixedPointIter())._row_by_row(rows)
        if isinstance(self.solver, (FixedPointIter, SimpleFixedPointIter)):
            return self._row_by_row(rows)
        if coupled is False:
            return self._row_by_row(rows, shared=False)
        if self._probes:
            return self._found_out(rows, problems)
        return self._equilibrated(rows) if krylov else self._row_by_row(rows)

    def _equilibrated(self, rows: Tensor) -> _Answer:
        """Solve a whole problem as one system in variables of equal size, without a host read.

        The samples may be independent after all, and then each counts relative to its own
        cotangent, and one that is not finite must not spoil the others.
        """
        size = row_norm(rows)
        finite = size < inf
        scale = self._scales(torch.where(finite[:, None], rows, 0.0))[:, None]
        b = torch.where(finite[:, None], rows / scale, 0.0).view(-1, self.batch * rows.shape[1])

        def product(v: Tensor) -> Tensor:
            image: Tensor = self.product(v.view_as(rows) * scale) / scale
            return image.view_as(v)

        u, stats, _ = replace(self, product=product)._together(b)
        answer = torch.where(finite[:, None], u.view_as(rows) * scale, torch.nan)
        return _Answer(answer, stats)

    @property
    def _probes(self) -> bool:
        """Whether products may be spent on finding coupling, and the answer is safe beside them."""
        tested = not isinstance(self.solver, LinearSolver) or self.solver.confirms
        return tested and bool(self.stop.goal) and self.stop.max_iter > 3

    def _found_out(self, rows: Tensor, problems: Tensor) -> _Answer:
        """Solve row by row, unless products show that rows depend on each other."""
        b, size = _unit(rows)
        factors = _factors(self.batch, b.dtype, b.device).repeat(len(problems), 1)
        first, second = self.product(b), self.product(factors * b)
        if _differ(second, factors * first, self.eps):
            note(_COUPLED)
            return self._together(problems, spent=2)
        if isinstance(self.solver, LinearSolver):
            answer = self._row_by_row(rows, first * size, spent=2)
            refuted = bool(answer.stats.failed.any())
        else:
            tested = replace(self, stop=replace(self.stop, max_iter=self.stop.max_iter - 1))
            answer = tested._row_by_row(rows, first * size, spent=2, shared=False)
            answer, refuted = self._tested(rows, answer)
        spent = answer.stats.nfe
        if refuted and spent < self.stop.max_iter:
            joint = self._together(problems, spent)
            if bool(joint.stats.converged.all()):
                note(_COUPLED)
                return joint
        return answer

    def _tested(self, rows: Tensor, answer: _Answer) -> tuple[_Answer, bool]:
        """Measure the residual of an answer; return whether samples are not solved after all."""
        u, stats, _ = answer
        stats.nfe += 1
        image, scale = self.product(u) + rows, self._scales(rows)
        true, norm = row_norm(image - u) / scale, row_norm(image) / scale
        met = self.stop.measure(true, norm) <= _LOOSE * self.stop.goal
        met |= true <= _SLACK * self.eps * norm  # rounding
        wrong = stats.converged & ~met
        if not bool(wrong.any()):
            return answer, False
        status = torch.where(wrong, int(Status.MAX_ITER), stats.status).to(torch.int8)
        values = dict(stats.items()) | {"abs_lowest": true, "rel_lowest": relative(true, norm)}
        return _Answer(u, SolverStat(values, nfe=stats.nfe, status=status)), True

    def _row_by_row(
        self, rows: Tensor, first: Tensor | None = None, spent: int = 0, shared: bool = True
    ) -> _Answer:
        """Solve for the cotangent as it is, residuals relative to that of each sample.

        The system is not rescaled: with coupled rows it would be another one.

        Args:
            rows: the cotangent of each sample.
            first: the product with it, if it was made among those `spent`.
            spent: products made so far.
            shared: whether a fixed-point method keeps the same iterate for all samples.
        """
        if isinstance(self.solver, LinearSolver):
            stop = self.stop
            if stop.rtol is not None and stop.atol is not None:  # both are meant for norm 1
                stop = replace(stop, tol=stop.rtol + stop.atol, rtol=None, atol=None)
            relative = replace(self, stop=replace(stop, mode="rel"))
            return relative._run(rows, first, spent)._replace(size=row_norm(rows))
        return self._run(rows, first, spent, self._scales(rows), shared)

    def _scales(self, rows: Tensor) -> Tensor:
        """Return (rows,) what residuals are relative to; for a zero row, the problem's largest."""
        size = row_norm(rows)
        largest = size.view(-1, self.batch).amax(1).repeat_interleave(self.batch)
        return torch.where(size == 0, torch.where(largest == 0, 1.0, largest), size)

    def _scaled(self, matrix: Tensor, spent: int = 0) -> _Answer:
        """Solve one system per row, for right-hand sides of norm 1."""
        b, size = _unit(matrix)
        u, stats, _ = self._run(b, None, spent)
        return _Answer(u * size, stats)

    def _together(self, problems: Tensor, spent: int = 0) -> _Answer:
        """Solve one system per problem; its samples share one status."""
        u, stats, _ = self._scaled(problems, spent)
        values = {key: value.repeat_interleave(self.batch, 0) for key, value in stats.items()}
        status = stats.status.repeat_interleave(self.batch)
        return _Answer(u, SolverStat(values, nfe=stats.nfe, status=status))

    def _run(
        self,
        b: Tensor,
        first: Tensor | None,
        spent: int,
        scale: Tensor | None = None,
        shared: bool = False,
    ) -> _Answer:
        """Run the solver on what is left of the budget.

        Args:
            b: right-hand sides.
            first: the product with `b`, if it was made among those `spent`.
            spent: products made so far.
            scale: (rows,) what residuals of a fixed-point method are relative to.
            shared: whether that method keeps the same iterate for all samples.
        """
        # Residuals are relative to the cotangent: the mean over numbers would cancel.
        stop = replace(self.stop, max_iter=self.stop.max_iter - spent, norm="l2")
        solver = self.solver
        if isinstance(solver, LinearSolver):
            stop = stop if stop.tol is None else replace(stop, mode="rel")
            known = None if first is None else b - first
            u, stats = solver.solve(
                lambda v: v - self.product(v), b, stop, eps=self.eps, first=known
            )
        else:
            if first is not None:  # the solver asks for it, and counts it, itself
                stop, spent = replace(stop, max_iter=stop.max_iter + 1), spent - 1
            # From b itself: the image of zero, known without a product.
            start = solver.start(b) if isinstance(solver, Shine) else b
            found = solve(
                _Affine(self.product, b, first), start, solver, stop, on_failure="ignore",
                scale=scale, eps=self.eps, shared=shared,
            )  # fmt: skip
            u, stats = found.z, found.stats
        stats.nfe += spent
        return _Answer(u, stats)


class _Affine:
    r"""The map $u \mapsto J^\top u + b$, with the product that a Newton method needs."""

    def __init__(self, product: Product, b: Tensor, first: Tensor | None = None) -> None:
        self.product, self.b, self.first = product, b, first

    def __call__(self, u: Tensor) -> Tensor:
        if self.first is not None and u.data_ptr() == self.b.data_ptr():
            return self.first + self.b
        return self.product(u) + self.b

    def jvp(self, u: Tensor, v: Tensor) -> Tensor:
        """Return the derivative along `v`: the map is affine."""
        return self.product(v)


def _unit(matrix: Tensor) -> tuple[Tensor, Tensor]:
    """Return the rows with norm 1, and their norms as a column; a zero row stays."""
    size = row_norm(matrix)[:, None]
    return (matrix / torch.where(size == 0, 1.0, size)).to(matrix.dtype), size


@cache
def _factors(batch: int, dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return (B, 1) signed powers of two, different for rows that are near each other.

    Scaling a row by one of them is exact, so products of independent rows scale exactly too.
    """
    steps = 8 if dtype == torch.float16 else 32  # exponents that leave room for the product
    i = torch.arange(batch)
    kind = (i + 7 * (i // (2 * steps))) % (2 * steps)
    signs = torch.where(kind % 2 == 0, 1.0, -1.0)
    return (signs * 2.0 ** (kind // 2 - steps // 2)).to(device, dtype)[:, None]


def _differ(a: Tensor, b: Tensor, eps: float) -> bool:
    """Return whether rows differ by more than rounding; reads the device."""
    if not a.numel():
        return False
    error = (a - b).abs().amax(1)
    size = torch.maximum(a.abs().amax(1), b.abs().amax(1))
    return bool((error > _SLACK * eps * size).any())  # never for a NaN
