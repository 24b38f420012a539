"""Minus the identity plus a few rank-one terms: an inverse Jacobian as Broyden knows it."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor


class LowRank:
    r"""The operator :math:`H = -I + \sum_i u_i v_i^\top` for every sample.

    Rows lie in buffers ``[L, B, D]``. A term is written into the free slot and counts from
    :meth:`extend` on; with a limit, the operator falls back to what it began with, :math:`-I` or
    the terms it was given, when that many have been added.
    """

    def __init__(self, z: Tensor, limit: int | None, given: int = 0) -> None:
        rows = 16 if limit is None else limit
        self.U = z.new_empty(given + rows, *z.shape)
        self.V = torch.empty_like(self.U)
        self.limit, self.rank, self.given = limit, given, given

    def transposed(self, limit: int | None) -> LowRank:
        r""":math:`H^\top` as an operator of its own, with room for ``limit`` terms more."""
        n = self.rank
        other = LowRank(self.U[0], limit, given=n)
        other.U[:n], other.V[:n] = self.V[:n], self.U[:n]
        return other

    def make_room(self) -> bool:
        """Make sure that a slot is free; True if all terms had to go for that.

        Each term was learnt on top of those before it, so dropping the oldest alone would leave
        nonsense: the operator starts over instead.
        """
        if self.rank < len(self.U):
            return False
        if self.limit is None:
            self.U, self.V = (torch.cat((t, torch.empty_like(t))) for t in (self.U, self.V))
            return False
        self.rank = self.given
        return True

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
        part.U, part.V = self.U.index_select(1, rows), self.V.index_select(1, rows)
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
