"""Minus the identity plus a few rank-one terms: an inverse Jacobian as Broyden knows it."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor


class LowRank:
    r"""The operator :math:`H = -I + \sum_i u_i v_i^\top` for every sample.

    Rows lie in buffers ``[L, B, D]``; the oldest term gives way to the newest once ``limit`` are
    kept. Products return the inner products too, so that a term can be taken out of one afterwards.
    """

    def __init__(self, z: Tensor, limit: int | None) -> None:
        rows = 16 if limit is None else limit
        self.U = z.new_empty(rows, *z.shape)
        self.V = torch.empty_like(self.U)
        self.limit, self.count = limit, 0

    @property
    def used(self) -> int:
        return min(self.count, len(self.U))

    def make_room(self) -> int:
        """The slot of the next term; it takes no part in products until it is filled."""
        if self.limit is None and self.count == len(self.U):
            self.U, self.V = (torch.cat((t, torch.empty_like(t))) for t in (self.U, self.V))
        return self.count % len(self.U)

    def matvec(self, x: Tensor, skip: int | None = None) -> tuple[Tensor, Tensor]:
        """``H x`` (B, D) and the inner products of ``x`` with the ``v`` (B, 1, n)."""
        return self._product(self.U, self.V, x, skip, None)

    def rmatvec(self, x: Tensor, skip: int | None = None, out: Tensor | None = None) -> Tensor:
        r""":math:`H^\top x`, (B, D)."""
        return self._product(self.V, self.U, x, skip, out)[0]

    def take(self, rows: Tensor) -> Self:
        """The operator of some of the samples."""
        part = copy(self)
        part.U, part.V = self.U.index_select(1, rows), self.V.index_select(1, rows)
        return part

    def _product(
        self, left: Tensor, right: Tensor, x: Tensor, skip: int | None, out: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        n, row = self.used, x.unsqueeze(1)
        if n < len(left):
            left, right = left[:n], right[:n]
        # The vector on the left: twice as fast as rows times vector.
        coefficients = torch.bmm(row, right.permute(1, 2, 0))  # (B, 1, n)
        if skip is not None and skip < n:
            coefficients[:, :, skip] = 0.0
        out = None if out is None else out.unsqueeze(1)
        y = torch.baddbmm(row, coefficients, left.permute(1, 0, 2), beta=-1, out=out)
        return y.squeeze(1), coefficients
