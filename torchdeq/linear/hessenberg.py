r"""The small least-squares problem of GMRES, one column per product.

$\bar H$ is a row $h_0$ above an upper triangular matrix $T$. The vector $t$ with $t^\top \bar H =
0$ and $t_0 = 1$ follows by substitution, one number per product, and gives the solution: the
smallest residual is $\beta t / |t|^2$, its norm is $\beta / |t|$, and the minimiser solves $T y =
-\beta t_{1:} / |t|^2$. No factorisation is needed.
"""

from __future__ import annotations

import torch
from torch import Tensor

_FEW = 64  # systems
_TINY = {torch.float64: 1e-20, torch.float32: 1e-8}  # replaces a length of zero
_MAX_SQUARE = {torch.float64: 1e200, torch.float32: 1e20}  # |t|^2 at a residual of mere rounding


class Hessenberg:
    r"""The matrices $\bar H$ of a batch of systems, each used up to its own last column.

    Args:
        beta: (B,) norms of the residuals at the start of the cycle.
        goal: (B,) norms to reach.
        running: (B,) whether each system takes part in the cycle.
        size: the maximum number of columns.
        eps: the precision in which the columns are computed.
        on_host: whether the tensors are in the memory of the host.
    """

    def __init__(
        self,
        beta: Tensor,
        goal: Tensor,
        running: Tensor,
        size: int,
        eps: float,
        on_host: bool = False,
    ) -> None:
        self.beta, self.running, self.eps = beta, running, eps
        self.H = beta.new_zeros(len(beta), size + 1, size)
        # (B,) |t|^2 at which the residual reaches its goal.
        self.enough = (beta / goal).square().clamp_max(_MAX_SQUARE[beta.dtype])
        self.count = 0
        self._active = running  # whether each system needs another column
        self._t = beta.new_zeros(len(beta), size + 1)
        self._t[:, 0] = 1.0
        self._square = torch.ones_like(beta)  # (B,) |t|^2
        self._zero = beta.new_zeros(())
        # Few flags on the host are Python's: six operations on tiny tensors take longer.
        few = on_host and len(beta) <= _FEW
        self._few: list[bool] | None = running.tolist() if few else None
        self._enough_list: list[float] = self.enough.tolist() if few else []

    def push(self, h: Tensor) -> None:
        """Append a column, (B, j + 2): the coefficients in the basis, then the remaining length."""
        self.H[:, : self.count + 2, self.count] = h
        self.count += 1

    def update_active(self) -> None:
        """Decide which systems need another column after the latest one.

        A system does not if it has reached its goal, or its space is exhausted, or the column is
        not finite.
        """
        j = self.count - 1
        column = self.H[:, : j + 2, j]
        length, size = column[:, -1], torch.linalg.vector_norm(column, dim=1)
        overlap = torch.bmm(self._t[:, None, : j + 1], column[:, :-1, None]).view(-1)
        t = torch.addcdiv(self._zero, overlap, length, value=-1, out=self._t[:, j + 1])
        self._square.addcmul_(t, t)
        if self._few is None:
            unsolved = (self._square < self.enough) & (length > 10 * self.eps * size)
            self._active = self._active & unsolved
            return
        values = zip(*(v.tolist() for v in (self._square, length, size)), strict=True)
        self._few = [
            active and square < enough and rest > 10 * self.eps * whole
            for active, enough, (square, rest, whole) in zip(
                self._few, self._enough_list, values, strict=True
            )
        ]

    def any_active(self) -> bool:
        """Return whether any system needs another column. Reads the values."""
        return bool(self._active.any()) if self._few is None else any(self._few)

    def minimise(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the minimisers (B, k), the residuals (B, k + 1) in the basis, and their norms.

        The norms, (B, k), are those after each product; NaN from the first non-finite column on.
        """
        k = self.count
        H = self.H[:, : k + 1, :k]
        size = torch.linalg.vector_norm(H, dim=1)  # (B, k) |A v|
        length = H.diagonal(-1, 1, 2)
        finite = size < torch.inf
        ordinary = length > 10 * self.eps * size  # otherwise only rounding is left
        exhausted = finite & ~ordinary
        # A column is used if its system runs and all columns before it are ordinary.
        before = torch.cat((self.running[:, None], ordinary & finite), dim=1).cumprod(1)[:, :-1] > 0
        used = before & finite
        broken = (before & ~finite).cumsum(1) > 0
        # An exhausted space contains the solution: a tiny length makes the residual vanish.
        length = torch.where(exhausted, _TINY[H.dtype] * size, length)
        t = self._null_vector(H, length, used)
        squares = t.square().cumsum(1)  # (B, k + 1)
        used = used & (squares[:, :-1] < self.enough[:, None])
        # Unless A v is a combination of the columns before: then v contributes nothing.
        overlap = t[:, 1:].abs() * length
        useless = exhausted & (overlap <= 100 * self.eps * size * squares[:, :-1].sqrt())
        used = used & ~useless
        t = torch.cat((t[:, :1], torch.where(used, t[:, 1:], 0.0)), dim=1)
        squares = t.square().cumsum(1)
        c = t / squares[:, -1:]  # for a residual of norm 1: beta may be very large or small
        T = _triangle(H, length, used)
        y = torch.linalg.solve_triangular(T, -c[:, 1:, None], upper=True).squeeze(2)
        y = torch.where(y.isfinite().all(1, keepdim=True), y, 0.0)
        sizes = torch.where(broken, torch.nan, squares[:, 1:].rsqrt())
        beta = self.beta[:, None]
        return beta * y, beta * c, beta * sizes

    @staticmethod
    def _null_vector(H: Tensor, length: Tensor, used: Tensor) -> Tensor:
        """Return (B, k + 1) the vector $t$, by substitution through the used columns."""
        first = torch.where(used, H[:, 0], 0.0)
        T = _triangle(H, length, used)
        rest = torch.linalg.solve_triangular(T.mT, -first[:, :, None], upper=False).squeeze(2)
        return torch.cat((torch.ones_like(rest[:, :1]), rest), dim=1)


def _triangle(H: Tensor, length: Tensor, used: Tensor) -> Tensor:
    """Return (B, k, k) the matrix $T$ below the first row, with unit columns for unused ones."""
    T = torch.where(used[:, None, :], H[:, 1:], 0.0)
    T.diagonal(0, 1, 2).copy_(torch.where(used, length, 1.0))
    return T
