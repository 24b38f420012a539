"""Windows of past iterates that Anderson acceleration mixes.

Buffers are slot-major, ``[m, B, D]``, and written in place: nothing is shifted or stacked.
Half-precision states are kept in single precision here, as weights of alternating sign would drown
in rounding. The small systems are in float64; a device that has none solves them in float32, with a
ridge that this precision can see, so that nothing has to be read back from it.
"""

from __future__ import annotations

from copy import copy
from typing import Self

import torch
from torch import Tensor

from torchdeq.numbers import row_norm, small_dtype, unit_scale
from torchdeq.solver.base import FixedPointFn, Iterate

#: Keeps the Gram matrix of a sample that sits on its fixed point invertible.
_TINY = {torch.float64: 1e-300, torch.float32: 1e-30}
#: The same for residuals that repeat, if the user asks for no regularisation.
_LEAST_LAM = {torch.float64: 1e-14, torch.float32: 1e-6}


class ImageWindow:
    r"""The last ``m`` images and residuals, mixed by least squares (type II).

    :math:`\min_\alpha |\sum_i \alpha_i g_i|` under :math:`\sum_i \alpha_i = 1` has the Lagrange
    conditions :math:`G^\top G\,\alpha \sim 1`; a new residual adds one row and one column to
    :math:`G^\top G`. The small system is always m by m: a slot that does not count is a row of the
    identity with 0 on the right, so its weight is 0. Products are taken in units of each sample's
    first residual where its squares could leave the range.
    """

    def __init__(self, z: Tensor, m: int, lam: float, ridge: float, restart: bool) -> None:
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.F = z.new_empty(m, *z.shape, dtype=dtype)
        self.G = torch.empty_like(self.F)
        self.dtype, self.count, self.restart = z.dtype, 0, restart
        small = small_dtype(z.device)
        self.eye = torch.eye(m, dtype=small, device=z.device)
        self.units = self.eye.to(dtype)[:, None, :, None].unbind(0)  # m times (1, m, 1)
        # The diagonal grows by lam relative to each residual, hence independent of its scale.
        lam = max(lam, _LEAST_LAM[small])
        self.scales = (1 + lam * self.eye)[:, None, None].unbind(0)  # (1, 1, m)
        self.shifts = ((ridge + _TINY[small]) * self.eye)[:, None, None].unbind(0)
        self.ridge = ridge
        self.unit: Tensor | None = None  # (B, 1, 1) over the size of the first residual
        self.gram = self.eye.repeat(len(z), 1, 1)
        self.rhs = self.gram.new_zeros(len(z), m, 1)
        self.forgetful = False  # whether samples have dropped slots of their own
        self._view()

    def _view(self) -> None:
        """Views that every step needs, made once: a view costs as much as a small operation."""
        self._F, self._G = self.F.permute(1, 0, 2), self.G.permute(1, 0, 2)  # (B, m, D)
        self._Gt = self._G.mT
        self._images, self._residuals = self.F.unbind(0), self.G.unbind(0)  # m times (B, D)
        self._left = self.G.unsqueeze(2).unbind(0)  # m times (B, 1, D)
        self._rows = self.gram.unsqueeze(2).unbind(1)  # m times (B, 1, m)
        self._columns = self.gram.unsqueeze(3).unbind(2)  # m times (B, m, 1)
        self._alpha = self.F.new_empty(self.rhs.shape)

    @property
    def newest(self) -> int:
        return (self.count - 1) % len(self.F)

    def evaluate(self, f: FixedPointFn, z: Tensor) -> Iterate:
        """``f`` at ``z``, with image and residual written straight into the next slot."""
        slot = self.count % len(self.F)
        image = self._images[slot]
        if self.dtype == image.dtype:
            fz = f(z, into=image)
        else:
            fz = f(z)
            image.copy_(fz)
        it = Iterate(z, fz, torch.sub(fz, z, out=self._residuals[slot]), fresh=fz is not image)
        self._push(slot)
        return it

    def insert(self, it: Iterate) -> None:
        """Take in an iterate that was evaluated elsewhere."""
        slot = self.count % len(self.F)
        self.F[slot] = it.fz
        torch.sub(it.fz, it.z, out=self.G[slot])
        self._push(slot)

    def mix(self, tau: float) -> Tensor:
        r"""(B, D): :math:`\sum_i \alpha_i [f(z_i) - (1 - \tau) g_i]`."""
        alpha, F, G = self._weights(), self._F, self._G
        if self.count < len(self.F):  # the rest of the buffers was never written
            alpha, F, G = alpha[:, : self.count], F[:, : self.count], G[:, : self.count]
        z = torch.bmm(alpha.mT, F)
        if tau != 1:
            z = torch.baddbmm(z, alpha.mT, G, alpha=tau - 1)
        return z.squeeze(1).to(self.dtype)

    def guard(self, growth: float) -> None:
        """Samples whose residual grew by more than ``growth`` forget all but the newest iterate."""
        if self.count < 2:
            return
        size = self.gram.diagonal(dim1=1, dim2=2)  # (B, m) |g|^2
        newest, before = self.newest, (self.count - 2) % len(self.F)
        grown = (size[:, newest] > growth**2 * size[:, before]).view(-1, 1, 1)
        only = self.eye[newest].view(1, -1, 1)
        drop = grown & ((only * only.mT) == 0)
        self.gram.copy_(torch.where(drop, self.eye, self.gram))
        self.rhs.copy_(torch.where(grown, only, self.rhs))
        self.forgetful = True

    def take(self, rows: Tensor) -> Self:
        """The window of some of the samples."""
        part = copy(self)
        part.F, part.G = self.F.index_select(1, rows), self.G.index_select(1, rows)
        part.gram, part.rhs = self.gram[rows], self.rhs[rows]
        part.unit = None if self.unit is None else self.unit[rows]
        part._view()
        return part

    def _push(self, slot: int) -> None:
        """Add the residual in ``slot`` to the small system."""
        m = len(self.F)
        if not self.count:
            unit = unit_scale(self.G[slot])
            self.unit = None if unit is None else unit[:, :, None]
        if self.restart and slot == 0:
            self.gram.copy_(self.eye.expand_as(self.gram))
            self.rhs.zero_()
        if self.count < m or self.restart or self.forgetful:
            self.rhs[:, slot] = 1.0
        self.count += 1
        n = min(self.count, m)
        Gt, row, column = self._Gt, self._rows[slot], self._columns[slot]
        scale, shift = self.scales[slot], self.shifts[slot]
        if n < m:
            Gt, row, column = Gt[:, :, :n], row[:, :, :n], column[:, :n]
            scale, shift = scale[:, :, :n], shift[:, :, :n]
        # The vector on the left: twice as fast as rows times vector.
        if self.unit is None:
            dots = torch.bmm(self._left[slot], Gt)  # (B, 1, n)
        else:
            dots = torch.bmm(self._left[slot] * self.unit, Gt) * self.unit
            if self.ridge:
                shift = shift * self.unit.to(shift.dtype).square()
        if self.restart or self.forgetful:
            dots = torch.where(self.rhs[:, :n].mT > 0, dots, 0.0)
        column.copy_(dots.mT)
        torch.addcmul(shift, dots, scale, out=row)

    def _weights(self) -> Tensor:
        """(B, m, 1) mixing weights; a sample without finite ones (a NaN) takes a plain step."""
        w = torch.linalg.solve_ex(self.gram, self.rhs)[0]  # neither raises nor reads the device
        alpha = torch.div(w, w.sum(1, keepdim=True), out=self._alpha)
        return torch.where(alpha == alpha, alpha, self.units[self.newest])


class SecantWindow:
    r"""The last ``m - 1`` differences of points and residuals (type I).

    With :math:`\Delta z` and :math:`\Delta g` as columns, :math:`\gamma` solves
    :math:`\Delta Z^\top \Delta G\,\gamma = \Delta Z^\top g`, and the next point is
    :math:`z + \tau g - (\Delta Z + \tau \Delta G) \gamma`: the multisecant form of Broyden's good
    update.
    """

    def __init__(self, z: Tensor, m: int, lam: float, ridge: float, restart: bool) -> None:
        dtype = torch.promote_types(z.dtype, torch.float32)
        self.dZ = z.new_zeros(max(m - 1, 1), *z.shape, dtype=dtype)
        self.dG = torch.zeros_like(self.dZ)
        self.dtype, self.count, self.restart = z.dtype, 0, restart
        self.keeps = m > 1
        self.small = small_dtype(z.device)
        self.lam, self.ridge = max(lam, _LEAST_LAM[self.small]), ridge
        self.unit: Tensor | None = None  # (B, 1, 1) over the size of the first residual
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
            unit = unit_scale(it.g)
            self.unit = None if unit is None else unit[:, :, None]
        if self.last is not None and self.keeps:
            slot = self.count % len(self.dZ)
            if self.restart and slot == 0:
                self.dZ.zero_()
                self.dG.zero_()
            torch.sub(it.z, self.last.z, out=self.dZ[slot])
            torch.sub(it.g, self.last.residual, out=self.dG[slot])
            self.count += 1
        self.last = it

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
        # Columns are scaled to the size of their secants: a slot never used is a row of the
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
        """Samples whose residual grew by more than ``growth`` forget their secants."""
        if self.last is None or not self.count:
            return
        g = self.last.residual
        before = g - self.dG[(self.count - 1) % len(self.dG)]
        now, then = (row_norm(t, keepdim=True) for t in (g, before))
        grown = now > growth * then
        self.dZ.copy_(torch.where(grown, 0.0, self.dZ))
        self.dG.copy_(torch.where(grown, 0.0, self.dG))

    def take(self, rows: Tensor) -> Self:
        part = copy(self)
        part.dZ, part.dG = self.dZ.index_select(1, rows), self.dG.index_select(1, rows)
        part.unit = None if self.unit is None else self.unit[rows]
        part.last = None if self.last is None else self.last.take(rows)
        return part
