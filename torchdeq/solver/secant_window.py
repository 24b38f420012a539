"""The window of Anderson acceleration of type I: secants."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from torchdeq.numbers import row_norm
from torchdeq.solver.base import FixedPointFn, Iterate
from torchdeq.solver.window import Window


class SecantWindow(Window):
    r"""The last `m - 1` differences of points and residuals (type I).

    With $\Delta z$ and $\Delta g$ as columns, $\gamma$ solves
    $\Delta Z^\top \Delta G\,\gamma = \Delta Z^\top g$, and the next point is
    $z + \tau g - (\Delta Z + \tau \Delta G) \gamma$: the multisecant form of Broyden's good update.
    """

    def __init__(self, z: Tensor, m: int, lam: float, ridge: float, restart: bool) -> None:
        super().__init__(z, m, lam, ridge, restart)
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.dZ = z.new_zeros(max(m - 1, 1), *z.shape, dtype=dtype)
        self.dG = torch.zeros_like(self.dZ)
        self.last: Iterate | None = None

    def evaluate(self, f: FixedPointFn, z: Tensor) -> Iterate:
        fz = f(z)
        it = Iterate(z, fz, fz - z)
        self.insert(it)
        return it

    def insert(self, it: Iterate) -> None:
        it = it._replace(g=it.residual)
        assert it.g is not None
        if self.last is None:
            self._set_unit(it.g, it.moderate)
        fresh = self._take_fresh(it.g)
        if self.last is not None and self.m > 1:
            slot = self.count % len(self.dZ)
            if self.restart:
                self._empty_full(slot)
            torch.sub(it.z, self.last.z, out=self.dZ[slot])
            torch.sub(it.g, self.last.residual, out=self.dG[slot])
            if fresh is not None:  # no step led to the first iterate of a sample
                self.dG[slot].index_fill_(0, fresh, 0.0)
            self.count += 1
        self.last = it

    def _empty_full(self, slot: int) -> None:
        """Forget all secants of samples with a full window, before those in `slot` enter."""
        if self._starts.differ:
            if full := self._starts.at_multiple(self.count, len(self.dZ)):
                rows = torch.tensor(full, device=self.dZ.device)
                self.dZ.index_fill_(1, rows, 0.0)
                self.dG.index_fill_(1, rows, 0.0)
        elif slot == 0:
            self.dZ.zero_()
            self.dG.zero_()

    def mix(self, tau: float) -> Tensor:
        assert self.last is not None
        z, g = (t.to(self.dZ.dtype) for t in (self.last.z, self.last.residual))
        dZ, dG = self.dZ.permute(1, 0, 2), self.dG.permute(1, 0, 2)  # (B, m - 1, D)
        unit = self.unit
        left = dZ if unit is None else dZ * unit
        A = torch.bmm(left, dG.mT).to(self.small)
        rhs = torch.bmm(left, g.unsqueeze(2)).to(self.small)
        sizes = row_norm(left).to(self.small) * row_norm(dG)
        ridge: Tensor | float = self.ridge
        if unit is not None:
            A, rhs, sizes = A * unit, rhs * unit, sizes * unit[:, :, 0]
            ridge = ridge * unit[:, :, 0].to(self.small).square()
        # The ridge is relative to the size of each secant; an unused slot becomes a row of the
        # identity.
        diagonal = A.diagonal(dim1=1, dim2=2)
        diagonal.add_(self.lam * sizes * diagonal.sign() + ridge)
        diagonal.add_((sizes == 0).to(self.small))
        gamma = torch.linalg.solve_ex(A, rhs)[0].to(z.dtype)
        finite = gamma.isfinite().all(1, keepdim=True)
        gamma = torch.where(finite, gamma, 0.0)
        step = torch.bmm(gamma.mT, dZ + tau * dG).squeeze(1)
        return (z + tau * g - step).to(self.dtype)

    def guard(self, growth: float) -> None:
        if self.last is None or not self.count:
            return
        g = self.last.residual
        previous_g = g - self.dG[(self.count - 1) % len(self.dG)]
        size, previous = (row_norm(t, keepdim=True) for t in (g, previous_g))
        grown = size > growth * previous
        self.dZ.copy_(torch.where(grown, 0.0, self.dZ))
        self.dG.copy_(torch.where(grown, 0.0, self.dG))

    def take(self, rows: Tensor) -> Self:
        self._check_settled()
        part = copy(self)
        at = rows.to(self.dZ.device)
        part.dZ, part.dG = self.dZ.index_select(1, at), self.dG.index_select(1, at)
        part.unit = None if self.unit is None else self.unit[at]
        part.last = None if self.last is None else self.last.take(at)
        part._starts = self._starts.take(rows)
        return part

    def put(self, rows: Tensor, z: Tensor) -> None:
        assert self.last is not None
        at = rows.to(z.device)
        for t in (self.dZ, self.dG):
            t.index_fill_(1, at, 0.0)
        # Without secants and with residual 0, the next point is the last one: the start.
        point, residual = self.last.z, self.last.residual
        self.last = Iterate(
            point.index_copy(0, at, z), self.last.fz, residual.index_fill(0, at, 0.0)
        )
        self._starts.put(rows.tolist(), len(point), self.count + 1)
        self._mark_fresh(at)
