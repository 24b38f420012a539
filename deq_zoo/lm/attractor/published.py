"""The authors' solver and gradients of the attractor, for comparison with their programs.

A sequence has one set of mixing weights, and the whole batch stops together, by its worst sequence.
So unconverged states depend on later tokens and on the other sequences; the ridge of Anderson
acceleration is absolute, which slows it down near the solution. `mixing="positions"` has none of
this.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from deq_zoo.lm.config import LMConfig
from torchdeq import DEQConfig, SolverStat, Status

Map = Callable[[Tensor], Tensor]
RIDGE = 1e-4
_SOLVERS = ("anderson", "fixed_point_iter")
_FREE = frozenset(
    [
        *("f_solver", "f_solver_kwargs", "f_max_iter", "f_tol", "eval_factor", "eval_f_max_iter"),
        *("b_solver", "b_solver_kwargs", "b_max_iter", "b_tol", "ift", "hook_ift"),
        *("jac_loss_weight", "jac_loss_freq", "jac_incremental"),
    ]
)
#: Options of which the authors' solver has these values only.
_FIXED: dict[str, tuple[Any, ...]] = {
    "grad": ([1],),
    "backward": ("auto", "ift"),
    "f_stop_mode": ("rel",),
    "b_stop_mode": ("rel",),
    "on_failure": ("ignore",),
    "coupled": ("adjoint",),  # that of every attractor, so that its options build another one
}
#: The options of a DEQ that this solver reads; any other that is set is an error.
OPTIONS = _FREE | _FIXED.keys()


@dataclass
class Record:
    """What happened in a solve.

    Args:
        evaluations: calls of the map.
        relative: after each call, $|f(x) - x| / |x|$ of every sample, (B,).
        norms: after each call, $|x|$ of every sample, (B,).
        alpha: the mixing weights (B, n) of each accelerated step.
    """

    evaluations: int = 0
    relative: list[Tensor] = field(default_factory=list)
    norms: list[Tensor] = field(default_factory=list)
    alpha: list[Tensor] = field(default_factory=list)

    def add(self, x: Tensor, fx: Tensor) -> float:
        """Note a point and its image; return the largest relative residual of the batch."""
        size = x.flatten(1).norm(dim=1)
        self.evaluations += 1
        self.norms.append(size)
        self.relative.append((fx - x).flatten(1).norm(dim=1) / size.clamp_min(1e-9))
        return float(self.relative[-1].max())


@dataclass(frozen=True)
class Iteration:
    """A solver of the authors.

    Args:
        name: `anderson` or `fixed_point_iter`.
        max_iter: evaluations, at most.
        min_iter: evaluations, at least.
        tol: the largest relative residual of a batch that is solved.
        m: points that are mixed.
        beta: share of the images in a mixed point.
    """

    name: str
    max_iter: int
    min_iter: int
    tol: float
    m: int = 5
    beta: float = 1.0

    @torch.no_grad()
    def solve(self, f: Map, start: Tensor) -> tuple[Tensor, Record]:
        """Return the last image, and what happened."""
        if self.name == "anderson" and self.max_iter >= 3:
            return self._anderson(f, start)
        return self._plain(f, start)

    def _plain(self, f: Map, x: Tensor) -> tuple[Tensor, Record]:
        record = Record()
        while record.evaluations < self.max_iter:
            fx = f(x)
            worst = record.add(x, fx)
            x = fx
            if record.evaluations >= self.min_iter and worst < self.tol:
                break
        return x, record

    def _anderson(self, f: Map, start: Tensor) -> tuple[Tensor, Record]:
        record, first = Record(), f(start)
        record.add(start, first)
        second = f(first)
        record.add(first, second)
        points, images, newest = [start, first], [first, second], second
        for k in range(2, self.max_iter):
            x = self._mix(points, images, record)
            if not bool(x.isfinite().all()):  # only the samples concerned
                finite = x.flatten(1).isfinite().all(1).view(-1, *[1] * (x.dim() - 1))
                x = torch.where(finite, x, images[(k - 1) % self.m])
            newest = f(x)
            if len(points) < self.m:
                points.append(x)
                images.append(newest)
            else:
                points[k % self.m], images[k % self.m] = x, newest
            worst = record.add(x, newest)
            if (k + 1 >= self.min_iter and worst < self.tol) or not worst <= 1e4:
                break
        return newest, record

    def _mix(self, points: list[Tensor], images: list[Tensor], record: Record) -> Tensor:
        """Return the next point."""
        x, fx = (torch.stack(each, dim=1).flatten(2) for each in (points, images))  # (B, n, D)
        g, n = fx - x, x.shape[1]
        wide = g.double() if g.dtype == torch.float64 else g.float()
        bordered = wide.new_zeros(len(wide), n + 1, n + 1)
        bordered[:, 0, 1:] = bordered[:, 1:, 0] = 1
        bordered[:, 1:, 1:] = wide @ wide.mT + RIDGE * torch.eye(n, dtype=wide.dtype).to(wide)
        goal = wide.new_zeros(len(wide), n + 1, 1)
        goal[:, 0] = 1
        alpha: Tensor = _solve_or_least_squares(bordered, goal)[:, 1:, 0]  # (B, n)
        newest = torch.zeros_like(alpha)
        newest[:, -1] = 1
        alpha = torch.where(alpha.isfinite().all(1, keepdim=True), alpha, newest).to(x.dtype)
        record.alpha.append(alpha)
        mixed = self.beta * (alpha[:, None] @ fx) + (1 - self.beta) * (alpha[:, None] @ x)
        new: Tensor = mixed.view_as(points[0])
        return new


def _solve_or_least_squares(matrix: Tensor, goal: Tensor) -> Tensor:
    """Return the solution of each system; of a singular one, the least-squares solution."""
    answer: Tensor
    answer, info = torch.linalg.solve_ex(matrix, goal)
    if bool(info.any()):
        best = torch.linalg.lstsq(matrix, goal).solution
        answer = torch.where(info.view(-1, 1, 1) != 0, best, answer)
    return answer


class PublishedSolve:
    """The authors' forward solve, and their gradient: one step, or a solved adjoint.

    The solvers and their budgets are those of the DEQ's options: `f_solver` and `b_solver` are
    `anderson` (options `m` and `tau`, the authors' beta) or `fixed_point_iter`. With `ift` the
    adjoint is solved, otherwise the gradient takes one step. Tolerances are relative, and a budget
    that runs out before they are met is recorded in the statistics, without a warning. An option
    that the authors' programs do not have is an error.

    Args:
        config: the shape.
        options: of the DEQ.
    """

    def __init__(self, config: LMConfig, options: DEQConfig) -> None:
        _check_options(options)
        self.config, self.options = config, options

    def iteration(self, max_iter: int, backward: bool = False) -> Iteration:
        """Return the forward or the adjoint solver with a budget of evaluations."""
        o = self.options
        name, own = (o.b_solver, o.b_solver_kwargs) if backward else (o.f_solver, o.f_solver_kwargs)
        least = min(self.config.min_evaluations, max_iter)
        kwargs: dict[str, Any] = {"m": own.get("m", 5), "beta": own.get("tau", 1.0)}
        return Iteration(name, max_iter, least, o.b_tol if backward else o.f_tol, **kwargs)

    def __call__(
        self, f: Map, start: Tensor, training: bool, max_iter: int | None = None
    ) -> tuple[Tensor, SolverStat]:
        """Return the state with its gradient, and the statistics of the solve.

        Args:
            f: the map.
            start: (B, L, D).
            training: whether the budget is that of training.
            max_iter: another budget for this call; 0 returns the start.
        """
        if max_iter is None:
            own = self.options
            max_iter = own.f_max_iter if training else own.budget_in_evaluation
        if max_iter == 0:
            return start, SolverStat()
        y, record = self.iteration(max_iter).solve(f, start.detach())
        stats = self._statistics(record)
        if not torch.is_grad_enabled():
            return y, stats
        at = y.detach().requires_grad_()
        fy = f(at)
        state: Tensor = _PublishedGradient.apply(y, fy, at, self)  # type: ignore[no-untyped-call]
        return state, stats

    def adjoint(self, vjp: Map, v: Tensor) -> Tensor:
        """Return the cotangent of f for the cotangent `v` of the state."""
        if self.options.implicit:
            solver = self.iteration(self.options.b_max_iter, backward=True)
            if solver.name == "fixed_point_iter":
                return _picard(lambda u: v + vjp(u), v, solver)
            return solver.solve(lambda u: v + vjp(u), v)[0]
        step, limit = vjp(v), self.config.adjoint_clip
        if limit:
            sizes = [t.flatten(1).norm(dim=1) for t in (step, v)]
            factor = (limit * sizes[1] / sizes[0].clamp_min(1e-30)).clamp_max(1.0)
            step = step * factor.view(-1, *[1] * (step.dim() - 1))
        return v + step

    def _statistics(self, record: Record) -> SolverStat:
        relative = record.relative[-1]
        met = relative < self.options.f_tol
        status = torch.where(met, int(Status.CONVERGED), int(Status.MAX_ITER))
        status = torch.where(relative.isfinite(), status, int(Status.NONFINITE)).to(torch.int8)
        values = {
            "rel_lowest": relative,
            "abs_lowest": relative * record.norms[-1],
            "nstep": torch.full_like(relative, record.evaluations),
        }
        return SolverStat(values, nfe=record.evaluations, status=status)


def _check_options(options: DEQConfig) -> None:
    """Raise `ValueError` for options that the authors' solver does not have."""
    for name, solver, own in (
        ("f_solver", options.f_solver, options.f_solver_kwargs),
        ("b_solver", options.b_solver, options.b_solver_kwargs),
    ):
        if solver not in _SOLVERS or not {*own} <= {"m", "tau"}:
            raise ValueError(
                f"mixing=published has the solvers {' and '.join(_SOLVERS)} with the options m "
                f"and tau, got {name}={solver} with {own}: choose one of them, or "
                "mixing=positions"
            )
    for name in sorted(options.given & _FIXED.keys()):
        value = getattr(options, name)
        if value not in _FIXED[name]:
            raise ValueError(
                f"mixing=published cannot have {name}={value}, but "
                f"{' or '.join(map(str, _FIXED[name]))}: drop {name}, or set mixing=positions"
            )
    defaults = DEQConfig.defaults()
    for name in sorted(options.given - OPTIONS):
        if getattr(options, name) != defaults[name]:
            raise ValueError(
                f"{name}={getattr(options, name)} would have no effect with mixing=published: drop "
                "it, or set mixing=positions"
            )


@torch.no_grad()
def _picard(f: Map, u: Tensor, solver: Iteration) -> Tensor:
    """Return the last iterate of the authors' plain adjoint iteration.

    Its residual is relative to the new iterate.
    """
    for k in range(1, solver.max_iter + 1):
        new = f(u)
        size = new.flatten(1).norm(dim=1).clamp_min(1e-9)
        worst = float(((new - u).flatten(1).norm(dim=1) / size).max())
        u = new
        if k >= solver.min_iter and worst < solver.tol:
            break
    return u


class _PublishedGradient(torch.autograd.Function):
    """The solved state; its cotangent becomes that of one evaluation of f there."""

    @staticmethod
    def forward(ctx: Any, y: Tensor, fy: Tensor, at: Tensor, solve: PublishedSolve) -> Tensor:
        ctx.save_for_backward(fy, at)
        ctx.solve = solve
        return y.clone()

    @staticmethod
    def backward(ctx: Any, v: Tensor) -> tuple[None, Tensor, None, None]:
        fy, at = ctx.saved_tensors

        def vjp(u: Tensor) -> Tensor:
            product: Tensor = torch.autograd.grad(fy, at, u, retain_graph=True)[0]
            return product

        return None, ctx.solve.adjoint(vjp, v), None, None
