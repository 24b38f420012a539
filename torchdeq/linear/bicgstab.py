"""BiCGStab: short recurrences for non-symmetric systems, two products a step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver, System


@LINEAR.register("bicgstab")
@dataclass(frozen=True, kw_only=True)
class BiCGStab(LinearSolver):
    """Stabilised bi-conjugate gradients (van der Vorst, 1992).

    Seven states of memory whatever the number of steps. The recurrence's residual drifts from the
    true one in low precision, so when it claims success (or breaks down) one product measures the
    truth, and the method starts over from there if that is not good enough. In single precision it
    stalls earlier than GMRES.
    """

    def run(self, system: System, x0: Tensor | None) -> Tensor:
        x, r = system.start(x0)
        size = torch.linalg.vector_norm(r, dim=1)
        system.note(size)
        while system.left > 2 and not system.finished(size):
            since = system.notes
            trial = self._recurrence(system, x, r, size)
            trial_r = system.b - system.product(trial)
            trial_size = torch.linalg.vector_norm(trial_r, dim=1)
            better = trial_size < size  # False for a NaN
            x, r = (torch.where(better[:, None], *p) for p in ((trial, x), (trial_r, r)))
            size = torch.where(better, trial_size, size)
            system.correct(since, size)
            system.note(size)
            if system.checks and not bool(better.any()):
                return x  # the floor of the precision, or a breakdown that no new start cures
        while system.left and not system.finished(size):  # too few for that: steepest descent
            Ar = system.product(r)
            omega = _ratio(_dot(Ar, r), _dot(Ar, Ar))
            usable = omega.isfinite()
            x, r = torch.where(usable, x + omega * r, x), torch.where(usable, r - omega * Ar, r)
            size = torch.where(usable[:, 0], torch.linalg.vector_norm(r, dim=1), torch.nan)
            system.note(size)
        return x

    @staticmethod
    def _recurrence(system: System, x: Tensor, r: Tensor, size: Tensor) -> Tensor:
        """Iterate until the recurrence claims success or stops improving; its best x."""
        shadow, p, rho = r, r, _dot(r, r)
        best, lowest, idle = x, size, 0
        while system.left > 2 and idle < _PATIENCE and not system.finished(lowest):
            v = system.product(p)
            alpha = rho / _dot(shadow, v)
            s = r - alpha * v
            t = system.product(s)
            omega = _ratio(_dot(t, s), _dot(t, t))
            x = x + alpha * p + omega * s
            r = s - omega * t
            size = torch.linalg.vector_norm(r, dim=1)
            better = (size < lowest) & ~system.solved(lowest)
            best = torch.where(better[:, None], x, best)
            lowest = torch.where(better, size, lowest)
            system.note(lowest)
            if system.checks:
                idle = 0 if bool(better.any()) else idle + 1
            previous, rho = rho, _dot(shadow, r)
            p = r + (rho / previous) * (alpha / omega) * (p - omega * v)
        return best


_PATIENCE = 8  # steps without any gain before the recurrence starts over


def _dot(a: Tensor, b: Tensor) -> Tensor:
    return (a * b).sum(1, keepdim=True)


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """a / b, and 0 where b is 0."""
    return torch.where(b == 0, 0.0, a / b)
