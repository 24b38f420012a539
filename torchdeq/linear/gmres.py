"""GMRES: the smallest residual over a growing Krylov space, restarted when the basis is full."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver
from torchdeq.linear.hessenberg import Hessenberg
from torchdeq.linear.system import System
from torchdeq.numbers import from_host, row_norm, small_dtype, to_host

# A full cycle that leaves this share of a residual will not do better next time.
_STAGNANT = 0.999


@LINEAR.register("gmres")
@dataclass(frozen=True, kw_only=True)
class GMRES(LinearSolver):
    r"""Restarted GMRES (Saad and Schultz, 1986).

    $$x = x_0 + V_k y, \qquad y = \arg\min_y |\beta e_1 - \bar H_k y|, \qquad
    A V_k = V_{k+1} \bar H_k$$

    The basis is orthogonalised twice (classical Gram-Schmidt as batched products) in the working
    precision. The small algebra is done in float64 on the host, which reads one row per system
    every `check_every` products; without a tolerance nothing is read, and it stays on the device,
    in the best precision that the device has. Memory: `restart + 1` states.

    Args:
        restart: products before the basis is thrown away.
        confirm: spend one product per cycle on measuring the residual, instead of trusting the
            recurrence, which in low precision, for nearly singular systems and for rows that are
            not independent promises too much.
    """

    restart: int = 30
    confirm: bool = True

    def __post_init__(self) -> None:
        if self.restart < 1:
            raise ValueError(f"restart must be at least 1, got {self.restart}")

    @property
    def confirms(self) -> bool:
        return self.confirm

    def run(self, system: System) -> Tensor:
        x, r = system.start()
        size = row_norm(r)
        system.note(size)
        if system.finished(size):
            return x
        done, eps = system.over(size), torch.finfo(r.dtype).eps
        while system.left:
            before, promise, nfe, trial, trial_r = self._cycle(system, x, r, size, done)
            trial_size, length, stalled = promise, row_norm(trial), None
            if self.confirm and system.left:
                trial_r = system.b - system.product(trial)
                trial_size = row_norm(trial_r)
                # What the product itself rounds off says nothing against the promise.
                rounding = 4 * eps * (system.size + 2 * length)
                limit = system.goal + torch.minimum(rounding, 0.5 * system.goal)
                near = system.solved(promise) & (trial_size <= limit)
                met = torch.minimum(trial_size, (1 - 4 * eps) * system.goal)
                trial_size = torch.where(near, met, trial_size)
                # At the floor of the precision a promise is broken, or the cycle gains nothing.
                idle = (trial_size > 2 * promise) | ~(trial_size < 0.9 * size)
                least = torch.fmin(trial_size, size)
                stalled = idle & ~done & ~system.solved(least) & system.at_floor(least, length)
            better = (trial_size < size) & system.sensible(trial_size, length)
            stuck = system.over(trial_size) | ~(better & (trial_size < _STAGNANT * size))
            x, r = (torch.where(better[:, None], *p) for p in ((trial, x), (trial_r, r)))
            size = torch.where(better, trial_size, size)
            notes = torch.maximum(before, size)  # estimates below what was measured are too good
            last = torch.where(trial_size < torch.inf, size, torch.nan)
            system.note_many(torch.cat((notes[:-1], last[None])), nfe)
            if system.checks:
                if stalled is not None:
                    system.stall(stalled)
                    stuck = stuck | stalled
                done = done | stuck
                if bool(done.all()):
                    break
        return x

    def _cycle(
        self, system: System, x: Tensor, r: Tensor, beta: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor, list[int], Tensor, Tensor]:
        """Make up to `restart` products.

        Returns the recurrence's residual norms by product, (K, B), and at the end, (B,); the
        products made when each was known; the new x and its residual by the recurrence.
        """
        k = min(self.restart, max(1, system.left - self.confirm) + system.knows_first)
        V = r.new_empty(k + 1, *r.shape)
        torch.div(r, torch.where(beta > 0, beta, 1.0)[:, None], out=V[0])
        every = system.stop.check_every if system.checks else k
        small = self._small(system, beta, done, k)
        rows: list[Tensor] = []
        nfe: list[int] = []
        for j in range(k):
            if system.knows_first:
                w = system.take_first() / torch.where(beta > 0, beta, 1.0)[:, None]
            else:
                w = system.product(V[j])
            rows.append(_extend(V, j, w))
            nfe.append(system.products)
            if len(rows) == every or j == k - 1 or not system.left:
                for h in _send(rows, system.checks):
                    small.push(h)
                    if system.checks:
                        small.watch()
                rows = []
                if not system.left or (system.checks and not small.any_wanted()):
                    break
        k = len(nfe)
        y, c, sizes = small.minimise()
        # One transfer back: the coefficients of x and of its residual, the residual norms.
        packed = from_host(torch.cat((y, c, sizes), dim=1), r)
        y, c, sizes = packed.split((k, k + 1, k), dim=1)
        basis = V[: k + 1].transpose(0, 1)  # (B, k + 1, D)
        new = torch.baddbmm(x.unsqueeze(1), y.unsqueeze(1), basis[:, :k]).squeeze(1)
        residual = torch.bmm(c.unsqueeze(1), basis).squeeze(1)
        return sizes.mT, sizes[:, -1], nfe, new, residual

    @staticmethod
    def _small(system: System, beta: Tensor, done: Tensor, k: int) -> Hessenberg:
        """Return the small algebra of a cycle, where it belongs."""
        eps = torch.finfo(beta.dtype).eps
        facts = torch.stack((beta, system.goal, done.to(beta.dtype)))
        facts = to_host(facts) if system.checks else facts.to(small_dtype(beta.device))
        return Hessenberg(facts[0], facts[1], facts[2] == 0, k, eps)


def _extend(V: Tensor, j: int, w: Tensor) -> Tensor:
    """Write the next basis vector; returns its coefficients and the length of the rest, (B, j + 2).

    A row of the basis whose length is zero or not finite is zero: the other systems never see it.
    """
    w = w.unsqueeze(1)
    basis = V[: j + 1]
    rows, columns = basis.transpose(0, 1), basis.permute(1, 2, 0)
    c = torch.bmm(w, columns)  # (B, 1, j + 1)
    w = torch.baddbmm(w, c, rows, alpha=-1)
    again = torch.bmm(w, columns)
    w = torch.baddbmm(w, again, rows, alpha=-1)
    length = row_norm(w)
    torch.div(w.squeeze(1), length, out=V[j + 1]).nan_to_num_(0.0, 0.0, 0.0)
    return torch.cat((c.add_(again).squeeze(1), length), dim=1)


def _send(rows: Sequence[Tensor], away: bool) -> list[Tensor]:
    """Return the rows, in one transfer if they leave the device."""
    if not away:
        small = small_dtype(rows[0].device)
        return [row.to(small) for row in rows]
    if len(rows) == 1:
        return [to_host(rows[0])]
    return list(to_host(torch.cat(list(rows), dim=1)).split([r.shape[1] for r in rows], dim=1))
