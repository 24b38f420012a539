"""How far to go along a direction: backtracking on the squared residual, sample by sample."""

from __future__ import annotations

import torch
from torch import Tensor

from torchdeq.numbers import row_norm
from torchdeq.solver.base import FixedPointFn

_SLOPE = 1e-4  # Armijo's fraction of the promised decrease
_SHRINK = (0.1, 0.5)  # a step never shrinks by more, or by less, than this at once


def backtrack(
    f: FixedPointFn, z: Tensor, d: Tensor, g: Tensor, tries: int
) -> tuple[Tensor, Tensor, Tensor]:
    r"""The first of ``z + t d`` with :math:`|g(z + t d)|^2 \le (1 - 2 \cdot 10^{-4} t) |g(z)|^2`.

    ``t`` starts at 1 and follows the minimiser of the parabola through what is known; a trial that
    is not finite shrinks it most. The last of the ``tries`` (or of the budget) is a plain step,
    ``z + g``; a sample that accepts none takes the best one. Each trial evaluates ``f`` once for
    the whole batch and reads one flag.

    Returns the points, their images and residuals.
    """
    size = row_norm(g, keepdim=True)
    unit = torch.where(size > 0, size, 1.0)  # squares of very large or small residuals are lost
    phi0 = (size / unit).square()
    t = torch.ones_like(phi0)
    phi = torch.full_like(phi0, torch.inf)
    best: tuple[Tensor, Tensor, Tensor] | None = None
    done = ~size.isfinite()  # a sample that is lost must not keep the others searching
    trials = max(1, min(tries, f.left))
    for trial in range(trials):
        point = (z + t * d).to(z.dtype)
        if trial and trial == trials - 1:  # rather a plain step than the least bad of bad ones
            point = torch.where(done, point, (z + g).to(z.dtype))
        image = f(point)
        residual = image - point
        phi_t = (row_norm(residual, keepdim=True) / unit).square().nan_to_num(nan=torch.inf)
        better = ~done & ((phi_t < phi) | (trial == 0))
        found = (point, image, residual)
        best = (
            found
            if best is None
            else (
                torch.where(better, point, best[0]),
                torch.where(better, image, best[1]),
                torch.where(better, residual, best[2]),
            )
        )
        phi = torch.where(better, phi_t, phi)
        done = done | (phi_t <= (1 - 2 * _SLOPE * t) * phi0)
        if bool(done.all()):
            break
        # phi(s) ~ phi0 - 2 phi0 s + c s^2 through (t, phi_t): its minimiser, kept within bounds.
        s = phi0 * t.square() / (phi_t - phi0 + 2 * phi0 * t)
        s = torch.where(s.isfinite(), s, 0.0)
        t = torch.where(done, t, torch.clamp(s, min=_SHRINK[0] * t, max=_SHRINK[1] * t))
    assert best is not None
    return best
