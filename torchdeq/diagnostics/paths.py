"""The path of an iteration: how fast it contracts, and whether the start decides where it ends."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from torchdeq.checks import require_whole
from torchdeq.coupling import Coupling
from torchdeq.diagnostics.guarding import leaving_modules
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.pytree import State
from torchdeq.randomness import Randomness
from torchdeq.solver import Anderson, Solver, solve
from torchdeq.stopping import StopRule


@dataclass(frozen=True)
class PathContraction:
    r"""Plain iteration $z_{k+1} = f(z_k)$, step by step.

    Args:
        residuals: (B, N) $|f(z_k) - z_k|$.
        norms: (B, N) $|f(z_k)|$.
    """

    residuals: Tensor
    norms: Tensor

    @property
    def factors(self) -> Tensor:
        """Return (B, N - 1) residual over residual one step before: below 1, `f` contracts."""
        before = self.residuals[:, :-1]
        tiny = torch.finfo(before.dtype).tiny
        return torch.where(before == 0, 0.0, self.residuals[:, 1:] / before.clamp_min(tiny))

    @property
    def rate(self) -> Tensor:
        """Return (B,) the geometric mean of the last factors, at most ten."""
        last = self.factors[:, -10:].clamp_min(torch.finfo(self.residuals.dtype).tiny)
        return last.log().mean(1).exp()


@dataclass(frozen=True)
class PathIndependence:
    """Solutions from different starts, compared with the solution from the first.

    Args:
        distances: (B, starts) distance of each solution to the first one, relative to the size of
            the problem.
        residuals: (B, starts + 1) relative residual of each solution, the first one's first.
    """

    distances: Tensor
    residuals: Tensor
    states: list[State] = field(repr=False)

    def independent(self, tol: float) -> Tensor:
        """Return (B,) whether all solutions with a residual below `tol` agree.

        Two states of relative residual `r` may differ by more than `r`: they count as equal up to a
        distance of `sqrt(tol)`. A sample without two good solutions counts as independent.
        """
        good = (self.residuals[:, 1:] <= tol) & (self.residuals[:, :1] <= tol)
        elsewhere: Tensor = (good & (self.distances > tol**0.5)).any(1)
        return ~elsewhere


@leaving_modules
@torch.no_grad()
def contraction_along_path(
    f: Callable[..., Any], z0: State, args: tuple[Any, ...] = (), *, steps: int = 30
) -> PathContraction:
    """Iterate `f` from `z0` and measure the residual at every step.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start.
        args: further arguments of `f`.
        steps: evaluations of `f`, at least 2.
    """
    require_whole("steps", steps, 2)
    packing = Packing(z0)
    packed, z = PackedFn(packing, f, args), packing.pack(z0).detach().clone()
    residuals, norms = [], []
    for _ in range(steps):
        fz = packed(z)
        residuals.append(row_norm(fz - z))
        norms.append(row_norm(fz))
        z = fz.detach()
    return PathContraction(torch.stack(residuals, 1), torch.stack(norms, 1))


@leaving_modules
@torch.no_grad()
def path_independence(
    f: Callable[..., Any],
    z0: State,
    args: tuple[Any, ...] = (),
    *,
    starts: int = 3,
    scale: float = 1.0,
    solver: Solver[Any] | None = None,
    stop: StopRule | None = None,
    coupled: Coupling = None,
) -> PathIndependence:
    """Solve from `z0` and from random starts, and compare the solutions.

    The random starts are normal, of the size of the problem times `scale`. That size is the norm of
    the first solution, of its start or of their first residual, whichever is largest. The random
    generators are left as they were.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the first start.
        args: further arguments of `f`.
        starts: further starts.
        scale: the size of the random starts.
        solver: the solver; Anderson acceleration by default.
        stop: budget and tolerance; by default 200 evaluations, 1e-6 relative.
        coupled: as in `solve`.
    """
    require_whole("starts", starts)
    packing = Packing(z0)
    solver = Anderson() if solver is None else solver
    stop = StopRule(200, 1e-6, "rel") if stop is None else stop
    options: dict[str, Any] = {"args": args, "on_failure": "ignore", "coupled": coupled}
    with Randomness(packing.device).replayed():
        solutions = [solve(f, z0, solver, stop, **options)]
        first, start = packing.pack(solutions[0].z), packing.pack(z0)
        size = _size(first, start, solutions[0].stats["abs_trace"])
        spread = (scale * size / max(1, first.shape[1]) ** 0.5)[:, None].to(first.dtype)
        for _ in range(starts):
            other = packing.unpack(torch.randn_like(first) * spread)
            solutions.append(solve(f, other, solver, stop, **options))
    rows = [packing.pack(s.z) for s in solutions]
    distances = torch.stack([row_norm(z - first) / size for z in rows[1:]], 1)
    residuals = torch.stack([s.stats["rel_lowest"] for s in solutions], 1)
    return PathIndependence(distances, residuals, [s.z for s in solutions])


def _size(solution: Tensor, start: Tensor, residuals: Tensor) -> Tensor:
    """Return (B,) the size of each sample's problem: a fixed point may be zero."""
    size = torch.maximum(row_norm(solution), row_norm(start))
    if residuals.shape[1]:
        size = torch.maximum(size, residuals[:, 0].nan_to_num(nan=0.0, posinf=0.0).to(size.dtype))
    return torch.where(size > 0, size, 1.0)
