r"""The small least-squares problem of GMRES, one column per product.

$\bar H$ is a row $h_0$ above an upper triangular matrix $T$. The vector $t$ with $t^\top \bar H =
0$ and $t_0 = 1$ follows from one substitution, a number per product, and says all: the smallest
residual is $\beta t / |t|^2$, its norm $\beta / |t|$, and the minimiser solves $T y = -\beta t_{1:}
/ |t|^2$. No factorisation is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_VOID = {torch.float64: 1e-20, torch.float32: 1e-8}  # stands for a length of zero
_MOST = {torch.float64: 1e200, torch.float32: 1e20}  # of |t|^2: the residual is less than rounding


class Hessenberg:
    """Columns of all systems of a batch; each counts as far as its own system goes.

    Args:
        beta: (B,) norms of the residuals at the start of the cycle.
        goal: (B,) norms to reach.
        running: (B,) whether each system takes part.
        size: columns at most.
        eps: the precision in which the columns were computed.
    """

    def __init__(self, beta: Tensor, goal: Tensor, running: Tensor, size: int, eps: float) -> None:
        self.beta, self.running, self.eps = beta, running, eps
        self.H = beta.new_zeros(len(beta), size + 1, size)
        self.enough = (beta / goal).square().clamp_max(_MOST[beta.dtype])  # of |t|^2
        self.count = 0
        # What decides who goes on, column by column.
        self._wanted = running
        self._t = beta.new_zeros(len(beta), size + 1)
        self._t[:, 0] = 1.0
        self._squares = torch.ones_like(beta)
        self._none = beta.new_zeros(())

    def push(self, h: Tensor) -> None:
        """Take in a column, (B, j + 2): the overlaps with the basis, and what is left."""
        self.H[:, : self.count + 2, self.count] = h
        self.count += 1

    def watch(self) -> None:
        """Decide which systems want another column after the latest one; columns must be finite."""
        j = self.count - 1
        column = self.H[:, : j + 2, j]
        length, reach = column[:, -1], torch.linalg.vector_norm(column, dim=1)
        overlap = torch.bmm(self._t[:, None, : j + 1], column[:, :-1, None]).view(-1)
        t = torch.addcdiv(self._none, overlap, length, value=-1)
        self._t[:, j + 1] = t
        self._squares.addcmul_(t, t)
        below = (self._squares < self.enough) & (length > 10 * self.eps * reach)
        self._wanted = self._wanted & below

    def any_wanted(self) -> bool:
        """Return whether a system wants another column; reads."""
        return bool(self._wanted.any())

    def minimise(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the minimisers (B, k), the residuals (B, k + 1) in the basis, and their norms.

        The norms, (B, k), are those after each product; NaN from a column on that is not finite.
        """
        k = self.count
        H = self.H[:, : k + 1, :k]
        reach = torch.linalg.vector_norm(H, dim=1)  # (B, k) |A v|
        length = H.diagonal(-1, 1, 2)
        finite = reach < torch.inf
        ordinary = length > 10 * self.eps * reach  # else what is left is rounding
        ended = finite & ~ordinary
        # A column counts if its system runs, and all before it are ordinary.
        before = torch.cat((self.running[:, None], ordinary & finite), dim=1).cumprod(1)[:, :-1] > 0
        counts = before & finite
        broken = (before & ~finite).cumsum(1) > 0
        # Exhausted, the space holds the solution: the length stands for zero.
        length = torch.where(ended, _VOID[H.dtype] * reach, length)
        t = self._null(H, length, counts)
        squares = t.square().cumsum(1)  # (B, k + 1)
        counts = counts & (squares[:, :-1] < self.enough[:, None])
        # Unless A v lies in the space as well: then v is void.
        overlap = t[:, 1:].abs() * length
        void = ended & (overlap <= 100 * self.eps * reach * squares[:, :-1].sqrt())
        counts = counts & ~void
        t = torch.cat((t[:, :1], torch.where(counts, t[:, 1:], 0.0)), dim=1)
        squares = t.square().cumsum(1)
        c = t / squares[:, -1:]  # for a residual of norm 1: beta may be very large or small
        T = _triangle(H, length, counts)
        y = torch.linalg.solve_triangular(T, -c[:, 1:, None], upper=True).squeeze(2)
        y = torch.where(y.isfinite().all(1, keepdim=True), y, 0.0)
        sizes = torch.where(broken, torch.nan, squares[:, 1:].rsqrt())
        beta = self.beta[:, None]
        return beta * y, beta * c, beta * sizes

    @staticmethod
    def _null(H: Tensor, length: Tensor, counts: Tensor) -> Tensor:
        """Return (B, k + 1): `t`, by substitution through the columns that count."""
        first = torch.where(counts, H[:, 0], 0.0)
        T = _triangle(H, length, counts)
        rest = torch.linalg.solve_triangular(T.mT, -first[:, :, None], upper=False).squeeze(2)
        return torch.cat((torch.ones_like(rest[:, :1]), rest), dim=1)


def _triangle(H: Tensor, length: Tensor, counts: Tensor) -> Tensor:
    """Return (B, k, k): H below its first row, with the identity for columns that do not count."""
    T = torch.where(counts[:, None, :], H[:, 1:], 0.0)
    T.diagonal(0, 1, 2).copy_(torch.where(counts, length, 1.0))
    return T
