"""The window of Anderson acceleration of type II: images mixed by least squares."""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from torchdeq.solver.base import SMALL, FixedPointFn, Iterate
from torchdeq.solver.window import Window

#: Keeps the Gram matrix of a sample at its fixed point invertible.
TINY = {torch.float64: 1e-300, torch.float32: 1e-30}


class ImageWindow(Window):
    r"""The last `m` images and residuals, mixed by least squares (type II).

    $\min_\alpha |\sum_i \alpha_i g_i|$ under $\sum_i \alpha_i = 1$ has the Lagrange conditions
    $G^\top G\,\alpha \sim 1$; a new residual adds one row and one column to $G^\top G$. The small
    system is always m by m: an unused slot is a row of the identity with 0 on the right-hand side,
    so its weight is 0. Where squares of residuals could leave the range, products are taken in
    units of the first residual of each sample.
    """

    def __init__(self, z: Tensor, m: int, lam: float, ridge: float, restart: bool) -> None:
        super().__init__(z, m, lam, ridge, restart)
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.F = z.new_empty(m, *z.shape, dtype=dtype)
        self.G = torch.empty_like(self.F)
        self.eye = torch.eye(m, dtype=self.small, device=z.device)
        self.one_hot = self.eye.to(dtype)[:, None, :, None].unbind(0)  # m times (1, m, 1)
        # The diagonal grows by lam relative to each residual, so it does not depend on the scale.
        self.scales = (1 + self.lam * self.eye)[:, None, None].unbind(0)  # m times (1, 1, m)
        self.shifts = ((ridge + TINY[self.small]) * self.eye)[:, None, None].unbind(0)
        self.gram = self.eye.repeat(len(z), 1, 1)
        self.rhs = self.gram.new_zeros(len(z), m, 1)
        # A large image exists in its slot alone; a small one also as a tensor that lasts.
        self.in_slots = self.dtype == dtype and z.numel() > SMALL
        self._only: Tensor | None = None  # (B, D) the image, as long as there is no other
        self.guarded = False  # whether single samples may have emptied their windows
        self._make_views()

    def _make_views(self) -> None:
        """Make the views that every step needs: a view costs as much as a small operation."""
        self._F, self._G = self.F.permute(1, 0, 2), self.G.permute(1, 0, 2)  # (B, m, D)
        self._Gt = self._G.mT
        self._images, self._residuals = self.F.unbind(0), self.G.unbind(0)  # m times (B, D)
        self._left = self.G.unsqueeze(2).unbind(0)  # m times (B, 1, D)
        self._rows = self.gram.unsqueeze(2).unbind(1)  # m times (B, 1, m)
        self._columns = self.gram.unsqueeze(3).unbind(2)  # m times (B, m, 1)
        self._alpha = self.F.new_empty(self.rhs.shape)

    @property
    def newest(self) -> int:
        """Return the slot of the newest iterate."""
        return (self.count - 1) % self.m

    def evaluate(self, f: FixedPointFn, z: Tensor) -> Iterate:
        slot = self.count % self.m
        image = self._images[slot]
        if self.in_slots:
            f(z, into=image)
            fz = image
        else:
            fz = f(z)
            image.copy_(fz)
        g = torch.sub(fz, z, out=self._residuals[slot])
        square = self._push(slot)
        return Iterate(z, fz, g, fresh=not self.in_slots, lasts=self.m - 1, square=square)

    def insert(self, it: Iterate) -> None:
        slot = self.count % self.m
        self.F[slot] = it.fz
        torch.sub(it.fz, it.z, out=self.G[slot])
        if not self.count:
            self._set_unit(self.G[slot], it.moderate)
        self._only = None if self.count else it.fz
        self._push(slot)

    def mix(self, tau: float) -> Tensor:
        r"""Return $\sum_i \alpha_i [f(z_i) - (1 - \tau) g_i]$, (B, D)."""
        only, self._only = self._only, None
        if only is not None and tau == 1:
            return only  # not a copy: it is also the best state so far
        alpha, F, G = self._weights(), self._F, self._G
        if self.count < self.m:  # the other slots are uninitialised memory
            alpha, F, G = alpha[:, : self.count], F[:, : self.count], G[:, : self.count]
        z = torch.bmm(alpha.mT, F)
        if tau != 1:
            z = torch.baddbmm(z, alpha.mT, G, alpha=tau - 1)
        return z.squeeze(1).to(self.dtype)

    def guard(self, growth: float) -> None:
        if self.count < 2:
            return
        squares = self.gram.diagonal(dim1=1, dim2=2)  # (B, m) |g|^2
        newest, before = self.newest, (self.count - 2) % self.m
        grown = (squares[:, newest] > growth**2 * squares[:, before]).view(-1, 1, 1)
        only = self.eye[newest].view(1, -1, 1)
        drop = grown & ((only * only.mT) == 0)
        self.gram.copy_(torch.where(drop, self.eye, self.gram))
        self.rhs.copy_(torch.where(grown, only, self.rhs))
        self.guarded = True

    def take(self, rows: Tensor) -> Self:
        self._check_settled()
        part = copy(self)
        at = rows.to(self.F.device)
        part.F, part.G = self.F.index_select(1, at), self.G.index_select(1, at)
        part.gram, part.rhs = self.gram[at], self.rhs[at]
        part.unit = None if self.unit is None else self.unit[at]
        part._only = None if self._only is None else self._only.index_select(0, at)
        part._starts = self._starts.take(rows)
        part._make_views()
        return part

    def put(self, rows: Tensor, z: Tensor) -> None:
        at, n = rows.to(z.device), min(self.count, self.m)
        for t in (self.F, self.G):
            t[:n].index_fill_(1, at, 0.0)
        # An empty window has NaN weights, so the next point is the newest image: the start.
        self._images[self.newest].index_copy_(0, at, z.to(self.F.dtype))
        self._empty(at)
        self._starts.put(rows.tolist(), len(self.gram), self.count)
        self._mark_fresh(at)
        self._only, self.guarded = None, True

    def _empty(self, rows: Tensor) -> None:
        """Remove all iterates of some of the samples from the small system."""
        self.gram.index_copy_(0, rows, self.eye.expand(len(rows), -1, -1))
        self.rhs.index_fill_(0, rows, 0.0)

    def _push(self, slot: int) -> Tensor | None:
        """Add the residual in `slot` to the small system; return (B,) its squared norm.

        None if that is only known in units of the first residual.
        """
        self._take_fresh(self._residuals[slot])
        if self.restart:
            self._empty_full(slot)
        if self.count < self.m or self.restart or self.guarded:
            self.rhs[:, slot] = 1.0
        self.count += 1
        n = min(self.count, self.m)
        Gt, row, column = self._Gt, self._rows[slot], self._columns[slot]
        scale, shift = self.scales[slot], self.shifts[slot]
        if n < self.m:
            Gt, row, column = Gt[:, :, :n], row[:, :, :n], column[:, :n]
            scale, shift = scale[:, :, :n], shift[:, :, :n]
        # The vector on the left: twice as fast as rows times vector.
        if self.unit is None:
            dots = torch.bmm(self._left[slot], Gt)  # (B, 1, n)
        else:
            dots = torch.bmm(self._left[slot] * self.unit, Gt) * self.unit
            if self.ridge:
                shift = shift * self.unit.to(shift.dtype).square()
        square = dots[:, 0, slot] if self.unit is None else None
        if self.restart or self.guarded:
            dots = torch.where(self.rhs[:, :n].mT > 0, dots, 0.0)
        column.copy_(dots.mT)
        torch.addcmul(shift, dots, scale, out=row)
        return square

    def _empty_full(self, slot: int) -> None:
        """Empty the windows that are full, before the iterate in `slot` enters."""
        if self._starts.differ:
            if full := self._starts.at_multiple(self.count, self.m):
                self._empty(torch.tensor(full, device=self.gram.device))
        elif slot == 0:
            self.gram.copy_(self.eye.expand_as(self.gram))
            self.rhs.zero_()

    def _weights(self) -> Tensor:
        """Return the mixing weights, (B, m, 1); a sample with NaN weights takes a plain step."""
        w = torch.linalg.solve_ex(self.gram, self.rhs)[0]  # neither raises nor reads the device
        alpha = torch.div(w, w.sum(1, keepdim=True), out=self._alpha)
        return torch.where(alpha == alpha, alpha, self.one_hot[self.newest])
