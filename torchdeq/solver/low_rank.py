"""Minus the identity plus a few rank-one terms: an inverse Jacobian as Broyden knows it."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

_FIRST = 16  # rows reserved for the first terms


class LowRank:
    r"""The operator :math:`H = -I + \sum_i u_i v_i^\top` for every sample.

    Rows lie in buffers ``[L, B, D]``, which without a limit grow by doubling. A term is written
    into the free slot and counts from :meth:`extend` on; with a limit, the operator falls back to
    what it began with, :math:`-I` or the terms it was given, when that many have been added.

    Args:
        z: (B, D) a state: its shape, dtype and device.
        limit: terms kept beside those it was given; None keeps all.
    """

    def __init__(self, z: Tensor, limit: int | None) -> None:
        self.U, self.V = z.new_empty(0, *z.shape), z.new_empty(0, *z.shape)
        self.limit, self.rank, self.given = limit, 0, 0

    def transposed(self, limit: int | None) -> LowRank:
        r"""Return :math:`H^\top` as an operator of its own, with room for ``limit`` terms more."""
        other = copy(self)
        other.U, other.V = self.V[: self.rank].clone(), self.U[: self.rank].clone()
        other.limit, other.given = limit, self.rank
        return other

    def make_room(self, coming: int) -> bool:
        """Make sure that a slot is free; return whether all terms had to go for that.

        Each term was learnt on top of those before it, so dropping the oldest alone would leave
        nonsense: the operator starts over instead.

        Args:
            coming: terms that may still come; no row is reserved for more.
        """
        dropped = self.limit is not None and self.rank - self.given >= self.limit
        if dropped:
            self.rank = self.given
        if self.rank == len(self.U):
            most = self.rank + coming
            if self.limit is None:
                self._grow(min(most, max(_FIRST, 2 * self.rank)))
            else:  # few enough to reserve at once: memory that is not written costs nothing
                self._grow(min(most, self.given + self.limit))
        return dropped

    def _grow(self, rows: int) -> None:
        for name in ("U", "V"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(rows, *old.shape[1:])
            new[: self.rank] = old[: self.rank]
            setattr(self, name, new)

    def extend(self) -> None:
        """Count the term that was written into the free slot."""
        self.rank += 1

    def matvec(self, x: Tensor) -> Tensor:
        """``H x``, (B, D)."""
        return self._product(self.U, self.V, x, None)

    def rmatvec(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        r""":math:`H^\top x`, (B, D)."""
        return self._product(self.V, self.U, x, out)

    def take(self, rows: Tensor) -> Self:
        """The operator of some of the samples."""
        part = copy(self)
        part.U, part.V = (t[: self.rank].index_select(1, rows) for t in (self.U, self.V))
        return part

    def _product(self, left: Tensor, right: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        n = self.rank
        if not n:
            return torch.neg(x, out=out)
        row = x.unsqueeze(1)
        # The vector on the left: twice as fast as rows times vector.
        coefficients = torch.bmm(row, right[:n].permute(1, 2, 0))  # (B, 1, n)
        rows = left[:n].permute(1, 0, 2)  # (B, n, D)
        out = None if out is None else out.unsqueeze(1)
        return torch.baddbmm(row, coefficients, rows, beta=-1, out=out).squeeze(1)
