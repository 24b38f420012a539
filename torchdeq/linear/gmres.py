"""GMRES: the smallest residual over a growing Krylov space, restarted when the basis is full."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver, System

_STAGNANT = (
    0.999  # a full cycle that leaves this share of every residual will not do better next time
)


@LINEAR.register("gmres")
@dataclass(frozen=True, kw_only=True)
class GMRES(LinearSolver):
    r"""Restarted GMRES (Saad and Schultz, 1986).

    .. math:: x = x_0 + V_k y, \qquad y = \arg\min_y |\beta e_1 - \bar H_k y|, \qquad
              A V_k = V_{k+1} \bar H_k

    The basis is orthogonalised twice (classical Gram-Schmidt as batched products) in the working
    precision, the small least-squares problem is solved in double precision. Memory: ``restart +
    1`` states.

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

    def run(self, system: System, x0: Tensor | None) -> Tensor:
        x, r = system.start(x0)
        size = torch.linalg.vector_norm(r, dim=1)
        system.note(size)
        while system.left and not system.finished(size):
            since = system.notes
            trial, trial_r = self._cycle(system, x, r, size)
            trial_size = torch.linalg.vector_norm(trial_r, dim=1)
            if self.confirm and system.left:
                promised = system.solved(trial_size)
                trial_r = system.b - system.product(trial)
                trial_size = torch.linalg.vector_norm(trial_r, dim=1)
                # What the product itself rounds off says nothing against the promise.
                slack = torch.minimum(_rounding(system.b, trial), 0.5 * system.goal)
                near = promised & (trial_size <= system.goal + slack)
                trial_size = torch.where(near, torch.minimum(trial_size, system.goal), trial_size)
            better = trial_size < size  # False for a NaN
            stuck = system.over(trial_size) | ~(trial_size < _STAGNANT * size)
            x, r = (torch.where(better[:, None], *p) for p in ((trial, x), (trial_r, r)))
            size = torch.where(better, trial_size, size)
            system.correct(since, torch.where(trial_size.isfinite(), size, trial_size))
            if system.checks and bool(stuck.all()):
                break
        return x

    def _cycle(self, system: System, x: Tensor, r: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        """Up to ``restart`` products; returns the new x and its residual by the recurrence."""
        reserve = self.confirm and system.left > 1
        k = min(self.restart, system.left - reserve)
        eps = torch.finfo(r.dtype).eps
        V = r.new_empty(k + 1, *r.shape)
        torch.div(r, torch.where(beta > 0, beta, 1.0)[:, None], out=V[0])
        H = r.new_zeros(len(r), k + 1, k, dtype=torch.float64)
        # t spans the left null space of H, so |residual| = beta / |t|, one entry a product.
        t = torch.ones_like(H[:, :1, 0])
        dims = torch.zeros_like(beta, dtype=torch.long)  # products that count for each system
        running = ~system.over(beta)
        V[0].nan_to_num_(0.0, 0.0, 0.0)
        size = beta
        for j in range(k):
            Av = system.product(V[j])
            reach = torch.linalg.vector_norm(Av, dim=1)
            usable = running & reach.isfinite()
            Av = torch.where(usable[:, None], Av, 0.0)
            w = self._orthogonalise(Av, V[: j + 1], H[:, : j + 1, j])
            length = torch.linalg.vector_norm(w, dim=1).double()
            ended = length <= 10 * eps * reach  # what is left is rounding: the space is exhausted
            length = torch.where(ended, 0.0, length)
            H[:, j + 1, j] = length
            torch.div(w, torch.where(ended, torch.inf, length).to(w.dtype)[:, None], out=V[j + 1])
            overlap = -(t * H[:, : j + 1, j]).sum(1)
            # Exhausted, the residual is zero, unless A v lies in the space as well: then v is void.
            void = ended & (overlap.abs() <= 100 * eps * reach * torch.linalg.vector_norm(t, dim=1))
            t_new = torch.where(ended, torch.inf, overlap / length)
            t = torch.cat((t, torch.where(void | ~usable, 0.0, t_new)[:, None]), dim=1)
            dims += usable & ~void
            estimate = (beta.double() / torch.linalg.vector_norm(t, dim=1)).to(beta.dtype)
            size = torch.where(usable, estimate, torch.where(running, torch.nan, size))
            running = usable & ~ended & ~system.over(size)
            system.note(size)
            if system.checks and not bool(running.any()):
                k = j + 1
                break
        return self._minimise(x, V[: k + 1], H[:, : k + 1, :k], beta, dims)

    @staticmethod
    def _orthogonalise(w: Tensor, V: Tensor, h: Tensor) -> Tensor:
        """Take the basis out of ``w`` twice; ``h`` (B, j) receives the coefficients."""
        w = w.unsqueeze(1)
        for _ in range(2):
            c = torch.bmm(w, V.permute(1, 2, 0))  # (B, 1, j)
            w = torch.baddbmm(w, c, V.permute(1, 0, 2), alpha=-1)
            h += c.squeeze(1)
        return w.squeeze(1)

    @staticmethod
    def _minimise(
        x: Tensor, V: Tensor, H: Tensor, beta: Tensor, dims: Tensor
    ) -> tuple[Tensor, Tensor]:
        """x + V y and its residual V (beta e1 - H y), each system in its own dimensions."""
        k = H.shape[2]
        idle = torch.arange(k, device=H.device) >= dims[:, None]  # a column that must not count
        shifted = torch.eye(k + 1, k + 1, dtype=H.dtype, device=H.device)[:, 1:]
        H = torch.where(idle[:, None, :], shifted, H)
        Q, R = torch.linalg.qr(H)
        rhs = beta.double().nan_to_num(0.0, 0.0, 0.0)[:, None] * Q[:, 0]
        y = torch.linalg.solve_triangular(R, rhs.unsqueeze(2), upper=True)  # (B, k, 1)
        y = torch.where(y.isfinite().all(1, keepdim=True), y, 0.0)
        c = -H @ y
        c[:, 0, 0] += beta
        rows = V.permute(1, 0, 2)
        x = x + torch.bmm(y.to(x.dtype).mT, rows[:, :k]).squeeze(1)
        return x, torch.bmm(c.to(x.dtype).mT, rows).squeeze(1)


def _rounding(b: Tensor, x: Tensor) -> Tensor:
    """(B,) how large the residual of an exact solution may look in this precision."""
    sizes: Tensor = torch.linalg.vector_norm(b, dim=1) + 2 * torch.linalg.vector_norm(x, dim=1)
    return sizes * (4 * torch.finfo(b.dtype).eps)
