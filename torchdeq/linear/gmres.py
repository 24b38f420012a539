"""GMRES: the smallest residual over a growing Krylov space, restarted when the basis is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.checks import require_whole
from torchdeq.linear.base import LINEAR, LinearSolver
from torchdeq.linear.hessenberg import Hessenberg
from torchdeq.linear.system import System
from torchdeq.numbers import from_host, small_dtype, to_host

# A cycle that leaves more than this fraction of a residual: the next one will not do better.
_STAGNANT = 0.999


class _Cycle(NamedTuple):
    """The result of one cycle, with residuals by the recurrence (estimates, not measured)."""

    x: Tensor  # (B, D)
    residual: Tensor  # (B, D)
    estimates: Tensor  # (K, B) the residual norm after each product
    nfe: list[int]  # the number of products behind each estimate


@LINEAR.register("gmres")
@dataclass(frozen=True, kw_only=True)
class GMRES(LinearSolver):
    r"""Restarted GMRES (Saad and Schultz, 1986).

    $$x = x_0 + V_k y, \qquad y = \arg\min_y |\beta e_1 - \bar H_k y|, \qquad
    A V_k = V_{k+1} \bar H_k$$

    The basis is orthogonalised twice (classical Gram-Schmidt as batched products) in the working
    precision. With a tolerance, the small linear algebra runs in float64 on the host, which reads
    one row per system every `check_every` products. Without a tolerance the host reads nothing: the
    small linear algebra runs on the device, in its best precision. Memory: `restart + 1` states.

    Args:
        restart: the number of products after which a cycle ends and discards its basis.
        confirm: whether to spend one product per cycle on measuring the residual. The recurrence
            alone underestimates it in low precision, for nearly singular systems and for rows that
            depend on each other.
    """

    restart: int = 30
    confirm: bool = True

    def __post_init__(self) -> None:
        require_whole("restart", self.restart)

    @property
    def confirms(self) -> bool:
        return self.confirm

    def run(self, system: System) -> Tensor:
        x, r = system.start()
        size = system.norm(r)
        system.record(size)
        if system.finished(size):
            return x
        done = system.over(size)
        while system.left:
            cycle = self._cycle(system, x, r, size, done)
            trial_r, trial_size, stalled = cycle.residual, cycle.estimates[-1], None
            length = system.norm(cycle.x)
            if self.confirm and system.left:
                trial_r = system.b - system.product(cycle.x)
                trial_size = _measured(system, system.norm(trial_r), cycle.estimates[-1], length)
                # At the floor of the precision the estimate is too low, or the cycle gains nothing.
                idle = (trial_size > 2 * cycle.estimates[-1]) | ~(trial_size < 0.9 * size)
                least = torch.fmin(trial_size, size)
                stalled = idle & ~done & ~system.solved(least) & system.at_floor(least, length)
            better = (trial_size < size) & system.sensible(trial_size, length)
            stuck = system.over(trial_size) | ~(better & (trial_size < _STAGNANT * size))
            x, r = (torch.where(better[:, None], *p) for p in ((cycle.x, x), (trial_r, r)))
            size = torch.where(better, trial_size, size)
            sizes = torch.maximum(cycle.estimates, size)  # estimates below `size` are too low
            last = torch.where(trial_size < torch.inf, size, torch.nan)
            system.record_many(torch.cat((sizes[:-1], last[None])), cycle.nfe)
            if system.checks:
                if stalled is not None:
                    system.stall(stalled)
                    stuck = stuck | stalled
                done = done | stuck
                if system.every(done, now=True):
                    break
        return x

    def _cycle(self, system: System, x: Tensor, r: Tensor, beta: Tensor, done: Tensor) -> _Cycle:
        """Make up to `restart` products and minimise the residual over their space.

        Args:
            system: the systems.
            x: (B, D) the solutions so far.
            r: (B, D) their residuals.
            beta: (B,) the norms of these residuals.
            done: (B,) whether each system has finished.
        """
        V, small, nfe = self._basis(system, r, beta, done)
        k = len(nfe)
        y, c, sizes = small.minimise()
        # One transfer back: the coefficients of x and of its residual, the residual norms.
        packed = from_host(torch.cat((y, c, sizes), dim=1), r)
        y, c, sizes = packed.split((k, k + 1, k), dim=1)
        basis = V[: k + 1].transpose(0, 1)  # (B, k + 1, D)
        x = torch.baddbmm(x.unsqueeze(1), y.unsqueeze(1), basis[:, :k]).squeeze(1)
        residual = torch.bmm(c.unsqueeze(1), basis).squeeze(1)
        return _Cycle(x, residual, sizes.mT, nfe)

    def _basis(
        self, system: System, r: Tensor, beta: Tensor, done: Tensor
    ) -> tuple[Tensor, Hessenberg, list[int]]:
        """Return a basis (k + 1, B, D), its Hessenberg matrices, and the products at each column.

        Ends after `restart` products, with the budget, or once no system needs another column.
        """
        k = min(self.restart, max(1, system.left - self.confirm) + system.has_first_product)
        V = r.new_empty(k + 1, *r.shape)
        torch.div(r, torch.where(beta > 0, beta, 1.0)[:, None], out=V[0])
        every = system.stop.interval if system.checks else k
        small = _hessenberg(system, beta, done, k)
        rows: list[Tensor] = []
        nfe: list[int] = []
        for j in range(k):
            if system.has_first_product:
                w = system.take_first_product() / torch.where(beta > 0, beta, 1.0)[:, None]
            else:
                w = system.product(V[j])
            rows.append(_extend(system, V, j, w))
            nfe.append(system.products)
            if len(rows) == every or j == k - 1 or not system.left:
                for h in _transfer(rows, to_the_host=system.checks):
                    small.push(h)
                    if system.checks:
                        small.update_active()
                rows = []
                if not system.left or (system.checks and not system.any(small.any_active())):
                    break
        return V, small, nfe


def _measured(system: System, size: Tensor, estimate: Tensor, length: Tensor) -> Tensor:
    """Return (B,) measured residual norms, below the goal where only rounding keeps them above it.

    The product that measures a residual rounds as well: if the estimate met the goal and the
    measured norm misses it by no more than this rounding, the system counts as solved.

    Args:
        system: the systems.
        size: (B,) norms of measured residuals.
        estimate: (B,) the norms by the recurrence.
        length: (B,) norms of the solutions.
    """
    eps = torch.finfo(size.dtype).eps
    rounding = 4 * eps * (system.size + 2 * length)
    limit = system.goal + torch.minimum(rounding, 0.5 * system.goal)
    near = system.solved(estimate) & (size <= limit)
    return torch.where(near, torch.minimum(size, (1 - 4 * eps) * system.goal), size)


def _hessenberg(system: System, beta: Tensor, done: Tensor, k: int) -> Hessenberg:
    """Return the small algebra of a cycle, on the host if the systems have a tolerance."""
    eps = torch.finfo(beta.dtype).eps
    values = torch.stack((beta, system.goal, done.to(beta.dtype)))
    values = to_host(values) if system.checks else values.to(small_dtype(beta.device))
    return Hessenberg(values[0], values[1], values[2] == 0, k, eps, on_host=system.checks)


def _extend(system: System, V: Tensor, j: int, w: Tensor) -> Tensor:
    """Write basis vector `j + 1`; return (B, j + 2) its coefficients and the remaining norm.

    A row whose remaining norm is zero or not finite becomes zero: no NaN reaches other systems.
    """
    w = w.unsqueeze(1)
    basis = V[: j + 1]
    rows, columns = basis.transpose(0, 1), basis.permute(1, 2, 0)
    c = system.total(torch.bmm(w, columns))  # (B, 1, j + 1)
    w = torch.baddbmm(w, c, rows, alpha=-1)
    correction = system.total(torch.bmm(w, columns))
    w = torch.baddbmm(w, correction, rows, alpha=-1)
    length = system.norm(w)
    torch.div(w.squeeze(1), length, out=V[j + 1]).nan_to_num_(0.0, 0.0, 0.0)
    return torch.cat((c.add_(correction).squeeze(1), length), dim=1)


def _transfer(rows: Sequence[Tensor], to_the_host: bool) -> Sequence[Tensor]:
    """Return the rows where the small algebra is, after at most one transfer to the host."""
    if not to_the_host:
        return rows  # the small algebra converts them
    if len(rows) == 1:
        return [to_host(rows[0])]
    return list(to_host(torch.cat(list(rows), dim=1)).split([r.shape[1] for r in rows], dim=1))
