r"""The linear system behind every implicit gradient: $u = J^\top u + g$.

**Scaling, one rule.** The solve divides the residual of a system by the norm of the cotangent of
that system, before it compares the residual with the tolerance and reports it. So a tolerance means
the same for every loss. A system is one sample where samples are solved side by side, and the whole
batch where samples are coupled. The residual of a sample whose cotangent is zero is divided by the
largest cotangent norm of its batch. For a whole batch, the solve scales the right-hand side to norm
1. For samples side by side, it divides only the residuals: scaled right-hand sides would be another
system if the samples turned out to be coupled.

**Coupling that the caller has not declared.** One additional product, with the cotangent of each
sample rescaled, shows whether samples depend on each other. This test can miss a dependence, so the
solve also verifies its answer. A linear solver that measures the residual of its answer has done
so; any other linear solver treats the batch as one system. A quasi-Newton method combines several
iterates into its answer, so the solve spends one more product on the residual. Plain iteration
needs no test: it is right for dependent samples, too, if all samples return the same iterate.
Without a tolerance the solve must not read from the device: then a linear solver treats the batch
as one system, and all samples of any other method return the same iterate.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from math import inf
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from torchdeq import _torch
from torchdeq.coupling import Coupling
from torchdeq.distributed.peers import ALONE, Peers
from torchdeq.failures import BACKWARD, report_failures
from torchdeq.grad.affine import AffineSystem, Product
from torchdeq.grad.probing import ROUNDINGS, probe_coupling
from torchdeq.grad.shine import Shine
from torchdeq.linear import LinearSolution, LinearSolver, Neumann
from torchdeq.notes import note
from torchdeq.numbers import row_norm, unit_rows
from torchdeq.solver import FixedPointIter, SimpleFixedPointIter
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, relative
from torchdeq.trace import Trace

if TYPE_CHECKING:
    from torchdeq.grad.implicit import Implicit

_LOOSE = 10  # factor by which the residual of an image may exceed that of its point
_COUPLED = (
    "samples depend on each other: the backward pass solves the batch as one system; coupled=True "
    "does the same in the forward pass, and saves the products of the test for coupling"
)


def solve_adjoint(
    method: Implicit,
    vjp: Product,
    g: Tensor,
    coupled: Coupling,
    eps: float,
    peers: Peers = ALONE,
) -> Tensor:
    """Return `u` with `u = vjp(u) + g`; call the method's writer, and report failures.

    Args:
        method: the solver, its budget and tolerance, and the policy for failures.
        vjp: products with the transposed Jacobian, (N, B, D) to (N, B, D).
        g: (N, B, D) cotangents of N independent batches with B samples each.
        coupled: whether the samples of a batch depend on each other; None tests for it.
        eps: the precision in which `f` computes.
        peers: the processes that evaluate `f` together, and so make the same products.
    """
    n, batch, d = g.shape
    peers = peers.with_group(method.stop.sync_stop)

    def product(v: Tensor) -> Tensor:
        return vjp(v.view(n, batch, d)).reshape(v.shape)

    system = _AdjointSystem(method.solver, method.stop, product, eps, peers, batch)
    with peers.backward():
        u, stats = system.solve(g, coupled)
    if method.writer is not None:
        method.writer(stats)
    if method.on_failure != "ignore" and method.stop.goal and method.stop.max_iter:
        report_failures(stats, method.on_failure, BACKWARD, peers)
    return u.view_as(g).to(g.dtype)  # norms in single precision promote half types


def solve_batched_cotangents(
    solve: Callable[[Product, Tensor], Tensor], product: Product, g: Tensor
) -> Tensor:
    """Solve for the several cotangents of `is_grads_batched`: N batches that share one Jacobian.

    Args:
        solve: called with a product on (N, B, D) and the cotangents (N, B, D).
        product: the product with the transposed Jacobian, on tensors with the hidden dimension of
            `is_grads_batched`.
        g: the cotangents, (B, D) with that hidden dimension.
    """
    level = _torch.legacy_batch_level()
    cotangents = _torch.without_legacy_batch(g, level, 1)  # (N, B, D)

    def products(v: Tensor) -> Tensor:
        batched = product(_torch.with_legacy_batch(v, level))
        return _torch.without_legacy_batch(batched, level, len(cotangents))

    return _torch.with_legacy_batch(solve(products, cotangents), level)


@dataclass(frozen=True)
class _AdjointSystem(AffineSystem):
    """The adjoint systems of all batches, with the solver and its budget.

    In the methods, `rows` are (N B, D), one system per sample; `batches` are (N, B D), one system
    per batch. A batch that is one system is one together with those of all other processes that
    evaluate `f` together: a collective may couple them.

    Args:
        batch: samples of one batch.
    """

    batch: int = 1

    def solve(self, g: Tensor, coupled: Coupling) -> LinearSolution:
        """Solve for the cotangents (N, B, D), as one system or row by row."""
        linear = isinstance(self.solver, LinearSolver)
        g = g.contiguous()  # the cotangent of a sum is one expanded number
        rows, batches = g.flatten(0, 1), g.flatten(1)
        loose = linear and self.stop.rtol is None and self.stop.goal >= 1
        if loose or not self.stop.max_iter:
            return self._take_cotangent(rows)
        if coupled or (self.batch < 2 and not self.peers.synchronised):
            return self._solve_as_one_system(batches)
        if isinstance(self.solver, Neumann):
            return replace(self, solver=FixedPointIter())._solve_row_by_row(rows)
        if isinstance(self.solver, (FixedPointIter, SimpleFixedPointIter)):
            return self._solve_row_by_row(rows)
        if coupled is False:
            return self._solve_row_by_row(rows, shared=False)
        if self._can_probe:
            return self._solve_after_probing(rows, batches)
        return self._solve_balanced(rows, batches) if linear else self._solve_row_by_row(rows)

    def _take_cotangent(self, rows: Tensor) -> LinearSolution:
        """Return `g`, the Jacobian-free gradient, without a product.

        It is all there is without a budget. And zero, from which a linear solver starts, has the
        relative residual 1: it would return zero for a tolerance of 1 or more.
        """
        residual = torch.where(row_norm(rows) < inf, 1.0, torch.nan)[None]
        if not self.stop.max_iter:
            residual = residual[:0]  # no residual was measured
        trace = Trace(residual, residual, [0] * len(residual))
        return LinearSolution(rows, SolverStat.from_trace(trace, self.stop, 0, self.eps))

    @property
    def _can_probe(self) -> bool:
        """Return whether the budget allows a test for coupling, and the answer can be verified."""
        verified = not isinstance(self.solver, LinearSolver) or self.solver.confirms
        return verified and bool(self.stop.goal) and self.stop.max_iter > 3

    def _solve_after_probing(self, rows: Tensor, batches: Tensor) -> LinearSolution:
        """Solve row by row, unless products show that rows depend on each other."""
        peers = self.peers
        # Processes with the same samples must make the same products.
        rank = peers.rank if peers.synchronised and not peers.have_same(rows) else 0
        first, dependent = probe_coupling(self.product, rows, self.batch, self.eps, rank)
        if peers.any(dependent):
            note(_COUPLED)
            return self._solve_as_one_system(batches, spent=2)
        if isinstance(self.solver, LinearSolver):
            solution = self._solve_row_by_row(rows, first, spent=2)
            refuted = bool(solution.stats.failed.any())
        else:
            reserved = replace(self, stop=replace(self.stop, max_iter=self.stop.max_iter - 1))
            solution = reserved._solve_row_by_row(rows, first, spent=2, shared=False)
            solution, refuted = self._verify(rows, solution)
        spent = solution.stats.nfe
        if peers.any(refuted) and spent < self.stop.max_iter:
            joint = self._solve_as_one_system(batches, spent)
            if bool(joint.stats.converged.all()):  # the same in all processes: one system
                note(_COUPLED)
                return joint
        return solution

    def _verify(self, rows: Tensor, solution: LinearSolution) -> tuple[LinearSolution, bool]:
        """Measure the residual of a solution; return whether it refutes the reported status.

        The solution that comes back has the corrected status and residuals.
        """
        u, stats = solution
        stats.nfe += 1
        image, scale = self.product(u) + rows, self._scales(rows)
        size, norm = row_norm(image - u) / scale, row_norm(image) / scale
        met = self.stop.measure(size, norm) <= _LOOSE * self.stop.goal
        met |= size <= ROUNDINGS * self.eps * norm  # solved up to rounding
        wrong = stats.converged & ~met
        if not bool(wrong.any()):
            return solution, False
        status = torch.where(wrong, int(Status.MAX_ITER), stats.status).to(torch.int8)
        values = dict(stats.items()) | {"abs_lowest": size, "rel_lowest": relative(size, norm)}
        return LinearSolution(u, SolverStat(values, nfe=stats.nfe, status=status)), True

    def _solve_row_by_row(
        self, rows: Tensor, first: Tensor | None = None, spent: int = 0, shared: bool = True
    ) -> LinearSolution:
        """Solve one system per sample, with residuals relative to the cotangent of the sample.

        Args:
            rows: the cotangent of each sample.
            first: the product with `rows`, if it is one of those `spent`.
            spent: the number of products so far.
            shared: whether a fixed-point method returns the same iterate for all samples.
        """
        return self.run(rows, self._scales(rows), first, spent, shared)

    def _scales(self, rows: Tensor) -> Tensor:
        """Return (rows,) the row norms; for a zero row, the largest finite norm of its batch."""
        size = row_norm(rows)
        if not len(rows):  # this process has no samples, others may have some
            return size
        finite = torch.where(size < inf, size, 0.0)
        largest = finite.view(-1, self.batch).amax(1).repeat_interleave(self.batch)
        return torch.where(size == 0, torch.where(largest == 0, 1.0, largest), size)

    def _solve_as_one_system(self, batches: Tensor, spent: int = 0) -> LinearSolution:
        """Solve one system per batch; all samples of a batch get the same status."""
        if isinstance(self.solver, Shine) and self.batch > 1:
            broyden = replace(self, solver=self.solver.without_memory())
            return broyden._solve_as_one_system(batches, spent)
        b, size = unit_rows(batches)
        if self.peers.synchronised:
            size = self.peers.norm(batches, keepdim=True)
            b = (batches / torch.where(size == 0, 1.0, size)).to(batches.dtype)
        u, stats = self.run(b, spent=spent, spans=True)
        if self.batch == 1:
            return LinearSolution(u * size, stats)
        values = {key: value.repeat_interleave(self.batch, 0) for key, value in stats.items()}
        status = stats.status.repeat_interleave(self.batch)
        return LinearSolution(u * size, SolverStat(values, nfe=stats.nfe, status=status))

    def _solve_balanced(self, rows: Tensor, batches: Tensor) -> LinearSolution:
        """Solve a batch as one system in variables of equal size, without reading from the device.

        The samples may be independent, though they share one Krylov space here. So the residual of
        each sample counts relative to its own cotangent, and a cotangent that is not finite does
        not affect other samples.
        """
        finite = (row_norm(rows) < inf)[:, None]
        scale = self._scales(torch.where(finite, rows, 0.0))[:, None]
        b = torch.where(finite, rows / scale, 0.0).view_as(batches)

        def product(v: Tensor) -> Tensor:
            image: Tensor = self.product(v.view_as(rows) * scale) / scale
            return image.view_as(v)

        u, stats = replace(self, product=product)._solve_as_one_system(b)
        return LinearSolution(torch.where(finite, u.view_as(rows) * scale, torch.nan), stats)
