"""BiCGStab: short recurrences for non-symmetric systems, two products per step."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from torchdeq.linear.base import LINEAR, LinearSolver
from torchdeq.linear.system import System

_PATIENCE = 8  # steps without a smaller residual before the recurrence restarts


@LINEAR.register("bicgstab")
@dataclass(frozen=True, kw_only=True)
class BiCGStab(LinearSolver):
    """Stabilised bi-conjugate gradients (van der Vorst, 1992).

    The memory is seven states for any number of steps. In low precision the residual of the
    recurrence drifts away from the true residual. So when the recurrence reports convergence, or
    breaks down, one product measures the true residual, and the method restarts from there if it is
    too large. The solution never has a larger residual than the start, and is never the enormous
    vector with a large residual that a singular system may give. In single precision BiCGStab
    stalls earlier than GMRES.
    """

    @property
    def confirms(self) -> bool:
        return True

    def run(self, system: System) -> Tensor:
        x, r = system.start()
        size = system.norm(r)
        system.record(size)
        done = system.over(size)
        while system.left > 2 and not system.every(done, now=True):
            first_record = system.record_count
            trial = self._recurrence(system, x, r, size, done)
            trial_r = system.b - system.product(trial)
            trial_size, length = system.norm(trial_r), system.norm(trial)
            better = (trial_size < size) & system.sensible(trial_size, length) & ~done
            least = torch.where(better, trial_size, size)
            idle = ~(least < 0.5 * size) & ~done
            stalled = idle & ~system.solved(least) & system.at_floor(least, length)
            x, r = (torch.where(better[:, None], *p) for p in ((trial, x), (trial_r, r)))
            size = least
            system.correct(first_record, size)
            system.record(torch.where((trial_size < torch.inf) | done, size, torch.nan))
            if system.checks:
                system.stall(stalled)
            # No gain: the floor of the precision, or a breakdown that a restart does not cure.
            done = done | stalled | ~better | system.over(size)
        # Too few products are left for the recurrence: take steps of steepest descent.
        while system.left and not system.every(done, now=True):
            x, r, size = self._descend(system, x, r, size, done)
            system.record(size)
            done = done | system.over(size)
        return x

    @staticmethod
    def _recurrence(system: System, x: Tensor, r: Tensor, unit: Tensor, done: Tensor) -> Tensor:
        """Iterate until the recurrence reports convergence or stagnates; return its best x.

        The residuals are scaled to norm 1, so that their products neither overflow nor underflow.
        """
        scale = torch.where((unit > 0) & (unit < torch.inf), unit, 1.0)[:, None]
        first = None
        if r is system.b and system.has_first_product:
            first = system.take_first_product() / scale
        r = torch.where(done[:, None], 0.0, r / scale)
        d = best = torch.zeros_like(r)
        shadow, p, rho = r, r, _dot(system, r, r)
        lowest, idle = torch.ones_like(unit), torch.zeros_like(unit)
        scale = scale[:, 0]
        ended = done
        while system.left > 2:
            v = system.product(p) if first is None else first
            first = None
            alpha = _ratio(rho, _dot(system, shadow, v))
            s = r - alpha * v
            t = system.product(s)
            omega = _ratio(_dot(system, t, s), _dot(system, t, t))
            d = d + alpha * p + omega * s
            r = s - omega * t
            size = system.norm(r)
            better = (size < lowest) & ~ended
            best = torch.where(better[:, None], d, best)
            lowest = torch.where(better, size, lowest)
            idle = torch.where(better, 0.0, idle + 1)
            ended = (
                ended | system.solved(lowest * scale) | (idle >= _PATIENCE) | ~(size < torch.inf)
            )
            system.record(torch.where(done, unit, lowest * scale))
            previous, rho = rho, _dot(system, shadow, r)
            beta = _ratio(rho, previous) * _ratio(alpha, omega)
            p = torch.where(ended[:, None], 0.0, r + beta * (p - omega * v))
            if system.every(ended):
                break
        return x + best * scale[:, None]

    @staticmethod
    def _descend(
        system: System, x: Tensor, r: Tensor, size: Tensor, done: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Minimise the residual norm along the residual; return x, its residual and the norm."""
        scale = torch.where((size > 0) & (size < torch.inf), size, 1.0)[:, None]
        Ar = system.product(r)
        image = Ar / scale
        square = _dot(system, image, image)
        omega = _ratio(_dot(system, image, r / scale), square)
        # An image of almost zero does not determine the length of the step.
        measurable = (square > torch.finfo(r.dtype).eps) & ~done[:, None]
        broken = ~(square < torch.inf)[:, 0] & ~done
        usable = measurable & ~broken[:, None]
        x = torch.where(usable, x + omega * r, x)
        r = torch.where(usable, r - omega * Ar, r)
        return x, r, torch.where(broken, torch.nan, system.norm(r))


def _dot(system: System, a: Tensor, b: Tensor) -> Tensor:
    """Return (B, 1) the inner products of rows."""
    return system.total((a * b).sum(1, keepdim=True))


def _ratio(a: Tensor, b: Tensor) -> Tensor:
    """Return `a / b`, with 0 where it is not finite."""
    return (a / b).nan_to_num_(0.0, 0.0, 0.0)
