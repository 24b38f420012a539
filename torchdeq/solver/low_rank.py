"""Low-rank operators: the inverse Jacobian of Broyden's method."""

from __future__ import annotations

from copy import copy
from math import prod
from typing import Self

import torch
from torch import Tensor

from torchdeq.solver.starts import Starts

_FIRST = 16  # terms to allocate at first
_LITTLE = 1 << 20  # numbers up to which all terms of the budget are allocated at once


class LowRank:
    r"""The operator $H = -I + \sum_i u_i v_i^\top$ for every sample.

    The terms are rows of the buffers `U` and `V`, (L, B, D), which without a limit grow by
    doubling. The caller writes a new term into row `rank`, and `extend` adds it to the operator.
    When `limit` terms have been added, the operator returns to its initial terms: none, or those of
    the operator that it is the transpose of.

    After `put` samples begin at different terms: those before the beginning of a sample are zero in
    its rows. Each sample then has a limit of its own, and terms that are zero for all samples leave
    the buffers.

    Args:
        z: (B, D) a state, for its shape, dtype and device.
        limit: terms to keep beside the initial ones; None keeps all.
    """

    def __init__(self, z: Tensor, limit: int | None) -> None:
        self.U, self.V = z.new_empty(0, *z.shape), z.new_empty(0, *z.shape)
        self.limit, self.rank, self.initial = limit, 0, 0
        self._starts = Starts()

    def transposed(self, limit: int | None) -> LowRank:
        r"""Return $H^\top$ as a separate operator that can grow by `limit` terms."""
        other = copy(self)
        other.U, other.V = self.V[: self.rank].clone(), self.U[: self.rank].clone()
        other.limit, other.initial, other._starts = limit, self.rank, Starts()
        return other

    def make_room(self, remaining: int) -> bool:
        """Make sure that a row is free; return whether this dropped all added terms.

        Each term depends on the terms before it, so dropping only the oldest would leave a wrong
        operator.

        Args:
            remaining: terms that the caller may still add, which limit the rows to allocate.
        """
        if self._starts.differ:
            self._make_room_by_row()
            return False
        dropped = self.limit is not None and self.rank - self.initial >= self.limit
        if dropped:
            self.rank = self.initial
        if self.rank == len(self.U):
            most = self.rank + remaining
            if self.limit is not None:  # allocate the few rows at once: unwritten memory is free
                self._grow(min(most, self.initial + self.limit))
            elif most * prod(self.U.shape[1:]) <= _LITTLE:
                self._grow(most)
            else:
                self._grow(min(most, max(_FIRST, 2 * self.rank)))
        return dropped

    def _make_room_by_row(self) -> None:
        """Make sure that a row is free: move the terms that are in use to the front, or grow."""
        first = min(self._starts.first, self.rank)
        used = self.rank - first
        if self.rank < len(self.U):
            return
        if 0 < 2 * used <= len(self.U):
            for t in (self.U, self.V):
                t[:used] = t[first : self.rank]  # the two parts do not overlap
        else:
            self.U, self.V = self.U[first : self.rank], self.V[first : self.rank]
            self.rank = used
            self._grow(max(_FIRST, 2 * used))
        self.rank = used
        self._starts.shift(first)

    def _grow(self, rows: int) -> None:
        """Enlarge the buffers to that many rows."""
        for name in ("U", "V"):
            old: Tensor = getattr(self, name)
            new = old.new_empty(rows, *old.shape[1:])
            new[: self.rank] = old[: self.rank]
            setattr(self, name, new)

    def extend(self) -> None:
        """Add the term that the caller has written into the free row."""
        self.rank += 1

    def matvec(self, x: Tensor) -> Tensor:
        """Return $H x$, (B, D)."""
        return self._product(self.U, self.V, x, None)

    def rmatvec(self, x: Tensor, out: Tensor | None = None) -> Tensor:
        r"""Return $H^\top x$, (B, D)."""
        return self._product(self.V, self.U, x, out)

    def take(self, rows: Tensor) -> Self:
        """Return the operator of some of the samples."""
        part = copy(self)
        at = rows.to(self.U.device)
        part.U, part.V = (t[: self.rank].index_select(1, at) for t in (self.U, self.V))
        part._starts = self._starts.take(rows)
        return part

    def put(self, rows: Tensor) -> None:
        """Start some of the samples again with $H = -I$.

        The next term is zero for them: it comes from their first evaluation, before any step.

        Args:
            rows: the numbers of these samples, on the host.
        """
        self._zero(rows.to(self.U.device))
        self._starts.put(rows.tolist(), self.U.shape[1], self.rank + 1)

    def drop_full_rows(self) -> Tensor | None:
        """Drop all terms of samples that have `limit` of them; return their rows, None if none."""
        if self.limit is None or not self._starts.differ:
            return None
        full = self._starts.older_than(self.rank, self.limit)
        if not full:
            return None
        rows = torch.tensor(full, device=self.U.device)
        self._zero(rows)
        self._starts.put(full, self.U.shape[1], self.rank)
        return rows

    def _zero(self, rows: Tensor) -> None:
        """Set all terms of some of the samples to zero."""
        for t in (self.U, self.V):
            t[self._starts.first : self.rank].index_fill_(1, rows, 0.0)

    def _product(self, left: Tensor, right: Tensor, x: Tensor, out: Tensor | None) -> Tensor:
        first, last = self._starts.first, self.rank
        if first >= last:
            return torch.neg(x, out=out)
        row = x.unsqueeze(1)
        # The vector on the left: twice as fast as rows times vector.
        coefficients = torch.bmm(row, right[first:last].permute(1, 2, 0))  # (B, 1, n)
        rows = left[first:last].permute(1, 0, 2)  # (B, n, D)
        out = None if out is None else out.unsqueeze(1)
        return torch.baddbmm(row, coefficients, rows, beta=-1, out=out).squeeze(1)
