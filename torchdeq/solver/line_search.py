"""Line search: backtracking on the squared residual, with a step length for each sample."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from torchdeq.solver.base import FixedPointFn

_SLOPE = 1e-4  # Armijo: the fraction of the predicted decrease that a step must reach
_BLIND = 2  # trials if nothing can be read
_SHRINK = (0.1, 0.5)  # bounds of the factor by which one trial shrinks the step


class Trial(NamedTuple):
    """Points on the search directions with their images and residuals, (B, D) each."""

    point: Tensor
    image: Tensor
    residual: Tensor


def backtrack(f: FixedPointFn, z: Tensor, d: Tensor, g: Tensor, tries: int) -> Trial:
    r"""Return the first $z + t d$ with $|g(z + t d)|^2 \le (1 - 2 \cdot 10^{-4} t) |g(z)|^2$.

    The step length $t$ starts at 1. After each trial it moves to the minimum of a parabola through
    the squared residuals, within bounds; after a trial that is not finite, to its lower bound. The
    last trial is a plain step, $z + g$. A sample that accepts no trial takes its best one. Each
    trial evaluates `f` once for the whole batch and reads one flag from the device. Where the solve
    must not read, there are two trials, whatever the first one gives: the full step and a shorter
    one.

    Args:
        f: the map.
        z: (B, D) the points to start from.
        d: (B, D) the directions.
        g: (B, D) the residuals at `z`.
        tries: trials, at most; the budget of `f` limits them, too.
    """
    size = f.packed.norm(g, keepdim=True)
    unit = torch.where(size > 0, size, 1.0)  # squares of residuals could leave the range
    phi0 = (size / unit).square()
    t = torch.ones_like(phi0)
    phi = torch.full_like(phi0, torch.inf)
    best: Trial | None = None
    done = ~size.isfinite()  # a sample that is not finite must not prolong the search
    trials = max(1, min(tries if f.reads else min(tries, _BLIND), f.left))
    for i in range(trials):
        point = (z + t * d).to(z.dtype)
        if (
            f.reads and i and i == trials - 1
        ):  # a plain step is better than the best of several bad steps
            point = torch.where(done, point, (z + g).to(z.dtype))
        image = f(point)
        trial = Trial(point, image, image - point)
        phi_t = (
            (f.packed.norm(trial.residual, keepdim=True) / unit).square().nan_to_num(nan=torch.inf)
        )
        better = ~done & ((phi_t < phi) | (i == 0))
        best = trial if best is None else _choose(better, trial, best)
        phi = torch.where(better, phi_t, phi)
        done = done | (phi_t <= (1 - 2 * _SLOPE * t) * phi0)
        if i == trials - 1 or (f.reads and not f.any_process(not bool(done.all()))):
            break
        t = torch.where(done, t, _shorter(t, phi0, phi_t))
    assert best is not None
    return best


def _choose(better: Tensor, trial: Trial, best: Trial) -> Trial:
    """Return the trial of the samples for which it is better, and the best one of the others."""
    return Trial(*(torch.where(better, new, old) for new, old in zip(trial, best, strict=True)))


def _shorter(t: Tensor, phi0: Tensor, phi_t: Tensor) -> Tensor:
    """Return the next step lengths, (B, 1).

    The parabola phi(s) = phi0 - 2 phi0 s + c s^2 through (t, phi_t) has its minimum at s.
    """
    s = phi0 * t.square() / (phi_t - phi0 + 2 * phi0 * t)
    s = torch.where(s.isfinite(), s, 0.0)
    return torch.clamp(s, min=_SHRINK[0] * t, max=_SHRINK[1] * t)
