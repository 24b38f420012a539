"""Solves whose rows are positions of texts: a position finishes with all positions before it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdeq import DEQConfig, Solver, StopRule
from torchdeq.core import DEQBase, DEQIndexing, DEQSliced

_LEAST = 1e-30  # a divisor for images of zeros, whose residuals no relative rule allows


@dataclass(frozen=True, kw_only=True)
class InOrder(Solver[Any]):
    r"""Another solver, whose residuals are the largest so far along each text.

    $$r_t \to a_t \max_{s \le t} \frac{r_s}{a_s}$$

    with the residual $a_t$ that the stop rule allows at a tolerance of 1, e.g. $|f(z)_t|$.

    The map of a position depends on the positions before it, so its own residual can be small while
    an earlier position still moves. With this residual a position has converged when all before it
    have, too. Later positions have no effect on earlier ones.

    Args:
        inner: the solver, which treats every row on its own.
        length: positions of a text; the rows are texts one after the other.
        stop: the rule that says when a residual has met the tolerance.
    """

    inner: Solver[Any]
    length: int
    stop: StopRule

    def at(self, f: Any, z: Tensor) -> Any:
        return self._in_order(self.inner.at(f, z))

    def init(self, it: Any) -> Any:
        return self.inner.init(it._replace(g=None))

    def step(self, f: Any, it: Any, state: Any) -> tuple[Any, Any]:
        it, state = self.inner.step(f, it._replace(g=None), state)
        return self._in_order(it), state

    def _in_order(self, it: Any) -> Any:
        """Return an iterate with rows in place of the residual that have the norms to compare."""
        size = it.residual.norm(dim=1)
        allowed = self._allowed(it.fz)
        largest = (size / allowed).view(-1, self.length).cummax(1).values.flatten()
        g = torch.zeros_like(it.fz)
        g[:, 0] = largest * allowed
        return it._replace(g=g, square=None)

    def _allowed(self, fz: Tensor) -> Tensor:
        """Return the Euclidean norm of the residual of each row that the rule measures as 1."""
        norm, length = fz.norm(dim=1), self.stop.length(fz.shape[1])
        measured = self.stop.measure(torch.ones_like(norm), norm / length)
        return (length / measured).clamp_min(_LEAST)


class _InOrderDEQ(DEQBase):
    """A core whose calls may name the `length` of texts among the options of the solver."""

    def make_solver(self, options: Mapping[str, Any]) -> Solver[Any]:
        """Return the forward solver; with `length` above 1, its rows finish in order."""
        own = dict(options)
        length = own.pop("length", 1)
        solver = super().make_solver(own)
        if length == 1:
            return solver
        if type(solver).run is not Solver.run:
            raise ValueError(
                f"{type(solver).__name__} is not one update rule, so its positions cannot finish "
                "in order: set f_solver to anderson, broyden or fixed_point_iter"
            )
        return InOrder(inner=solver, length=length, stop=self.config.f_stop)


class InOrderSliced(_InOrderDEQ, DEQSliced):
    """The core `sliced` with positions that finish in order."""


class InOrderIndexing(_InOrderDEQ, DEQIndexing):
    """The core `indexing` with positions that finish in order."""


def get_deq_in_order(options: DEQConfig) -> DEQBase:
    """Return a DEQ module whose rows are positions: one system in the backward pass."""
    cores = {"sliced": InOrderSliced, "indexing": InOrderIndexing}
    if options.core not in cores:
        raise ValueError(f"an attractor has the cores {' and '.join(cores)}, got {options.core!r}")
    deq: DEQBase = cores[options.core](options, coupled=options.get("coupled", "adjoint"))
    deq.make_solver({"length": 2})  # raises an error now if the solver has no order
    return deq
