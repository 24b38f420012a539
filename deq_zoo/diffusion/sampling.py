"""Sampling in parallel: a chain solved as one equilibrium, whole or in a window that slides."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from math import inf
from typing import Any

import torch
from torch import Tensor

from deq_zoo.checks import check_at_least
from deq_zoo.diffusion.adjoint import Adjoint, Work, attach
from deq_zoo.diffusion.chain import ParallelChain
from torchdeq import SolverStat, Status, StopRule, solve
from torchdeq.registry import suggest
from torchdeq.solver import POLICIES, FixedPointIter, Solver, make_solver, report_failures

Progress = Callable[[int, float], object]  # rounds so far, worst relative residual
_BURST = 8  # evaluations before a window slides, for solvers that learn from earlier evaluations


@dataclass(frozen=True)
class Trajectory:
    """The states of a chain.

    Args:
        states: (B, T, C, H, W).
        stats: of the solve, one entry per image (or per state: scope "timestep").
        work: rounds and evaluations of the network; a backward pass adds its own.
    """

    states: Tensor
    stats: SolverStat
    work: Work = field(default_factory=Work)

    @property
    def image(self) -> Tensor:
        """Return the last state, (B, C, H, W)."""
        return self.states[:, -1]


def parallel_sample(
    chain: ParallelChain,
    x: Tensor,
    noise: Tensor | None = None,
    *,
    solver: str | Solver[Any] = "anderson",
    stop: StopRule | None = None,
    z0: Tensor | None = None,
    window: int = 0,
    burst: int = 0,
    adjoint: Adjoint | None = None,
    on_failure: str = "warn",
    progress: Progress | None = None,
) -> Trajectory:
    """Solve for all states of a chain at once.

    The states are those of the sequential chain, up to the tolerance. With grad mode on, they are
    differentiable with respect to `x` and `noise`, by the chain's own derivative at them; the
    network's weights get no gradient.

    Args:
        chain: the chain.
        x: initial noise, (B, C, H, W).
        noise: of every step, (B, T, C, H, W), for a stochastic chain.
        solver: a registered solver, by name or as an object.
        stop: evaluations allowed, and tolerance; by default until the residual is 1e-4 of the
            state, with a budget that plain iteration never needs.
        z0: states from which the solver starts, (B, T, C, H, W); copies of `x` by default.
        window: states solved at once. The network no longer evaluates converged states before the
            window; states after it wait. 0 solves all states at once.
        burst: evaluations before the window slides; by default 1 for plain iteration, else 8, and
            at least `stop.check_every`.
        adjoint: the solver of the gradient.
        on_failure: how to report images that did not converge: ignore, auto, warn or raise.
        progress: called after each round.
    """
    chain.check(x, noise)
    check_at_least(0, window=window, burst=burst)
    if on_failure not in POLICIES:
        raise ValueError(f"unknown failure policy {on_failure!r}{suggest(on_failure, POLICIES)}")
    rule = make_solver(solver, {}) if isinstance(solver, str) else solver
    usual = 1 if isinstance(rule, FixedPointIter) else _BURST
    burst = burst or max(usual, 1 if stop is None else stop.interval)
    if stop is None:
        stop = StopRule((burst if window else 2) * (len(chain) + 5), 1e-4, "rel")
    Z, f = _first_states(chain, x, z0), _Map(chain, x.detach(), noise, progress)
    with torch.no_grad():
        if window:
            Z, stats = _slide(f, Z, rule, stop, window, burst)
            if on_failure != "ignore" and stop.goal and stop.max_iter:
                report_failures(stats, on_failure, "the sampling chain")
        else:
            Z, stats = f.solve(Z, rule, stop, on_failure)
    if torch.is_grad_enabled() and any(t is not None and t.requires_grad for t in (x, noise)):
        Z = attach(chain, Z, x, noise, adjoint or Adjoint(), f.work)
    return Trajectory(Z, stats, f.work)


def _first_states(chain: ParallelChain, x: Tensor, z0: Tensor | None) -> Tensor:
    shape = (len(x), len(chain), *x.shape[1:])
    if z0 is None:
        return x.detach()[:, None].expand(shape).clone()
    if z0.shape != shape:
        raise ValueError(f"z0 must be (B, T, C, H, W) = {shape}, got {tuple(z0.shape)}")
    return z0.detach().clone()


class _Map:
    """The function f of the steps from `first` on; it counts and remembers its last call."""

    def __init__(
        self, chain: ParallelChain, x: Tensor, noise: Tensor | None, progress: Progress | None
    ) -> None:
        self.chain, self.noise, self.progress = chain, noise, progress
        self.before, self.first, self.work = x, 0, Work()
        self.last: tuple[Tensor, Tensor] | None = None

    def __call__(self, Z: Tensor, before: Tensor, noise: Tensor | None = None) -> Tensor:
        self.work.add(Z.shape[0] * Z.shape[1])
        fZ = self.chain(Z, before, noise, self.first)
        self.last = Z, fZ
        if self.progress is not None and Z.numel():
            size, norm = (t.flatten(1).norm(dim=1) for t in (fZ - Z, fZ))
            self.progress(self.work.rounds, float((size / norm.clamp_min(1e-30)).max()))
        return fZ

    def solve(
        self, Z: Tensor, rule: Solver[Any], stop: StopRule, on_failure: str
    ) -> tuple[Tensor, SolverStat]:
        """Return the fixed point of f and statistics, for samples as the chain's scope defines."""
        if self.chain.scope == "trajectory":
            rows = (self.before,) if self.noise is None else (self.before, self.noise)
            solution = solve(
                self, Z, rule, stop, args=rows, compact=stop.goal > 0, on_failure=on_failure
            )
        else:
            # The solver steps every row alone, as released. Rows depend on earlier ones, so all
            # stop together.
            solution = solve(
                self._rows(Z), Z.flatten(0, 1), rule, stop, on_failure=on_failure, shared=True
            )
        assert isinstance(solution.z, Tensor)
        return solution.z.view_as(Z), solution.stats

    def _rows(self, Z: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda rows: self(rows.view_as(Z), self.before, self.noise).flatten(0, 1)


def _slide(
    f: _Map, Z: Tensor, rule: Solver[Any], stop: StopRule, window: int, burst: int
) -> tuple[Tensor, SolverStat]:
    """Solve in a window that moves on over converged states.

    A state that is not finite may become finite while the states before it converge. A chain whose
    first state in the window is not finite has failed, and delays no other chain.
    """
    T, x, length = Z.shape[1], f.before, stop.length(Z[0, 0].numel() if Z.numel() else 1)
    sizes, norms = (torch.full(Z.shape[:2], value, device=Z.device) for value in (inf, 1.0))
    lost = torch.zeros(len(Z), dtype=torch.bool, device=Z.device)
    first, end = 0, min(window, T)
    while first < T and f.work.rounds < stop.max_iter:
        some = StopRule(min(burst, stop.max_iter - f.work.rounds), None, return_final=True)
        f.first, f.before = first, Z[:, first - 1] if first else x
        f.solve(Z[:, first:end], rule, some, "ignore")
        assert f.last is not None
        old, new = f.last
        sizes[:, first:end] = (new - old).flatten(2).norm(dim=2) / length
        Z[:, first:end] = new  # not before: the solver may have started from this memory
        norms[:, first:end] = new.flatten(2).norm(dim=2) / length
        sizes[:, first] = 0.0  # one step from a converged state
        lost |= ~new[:, 0].isfinite().flatten(1).all(1)
        if len(lost) and bool(lost.all()):
            break
        met = stop.measure(sizes, norms)[:, first:end] <= stop.goal
        met = (met | lost[:, None]).all(0)
        moved = max(1, int(met.int().cumprod(0).sum()))
        Z[:, end : end + moved] = Z[:, end - 1 : end]  # a better guess than the initial noise
        first, end = first + moved, min(end + moved, T)
    return Z, _chain_stats(sizes, norms, lost, first == T, f.work.rounds)


def _chain_stats(sizes: Tensor, norms: Tensor, lost: Tensor, done: bool, rounds: int) -> SolverStat:
    """Return the statistics of chains from residuals and norms (B, T) of their states.

    Args:
        sizes: residual of each state.
        norms: norm of each state.
        lost: (B,) chains that are not finite.
        done: whether the window has reached the end.
        rounds: evaluations of f.
    """
    size, norm = sizes.norm(dim=1), norms.norm(dim=1)
    ended = torch.full_like(size, int(Status.CONVERGED if done else Status.MAX_ITER))
    status = torch.where(lost, int(Status.NONFINITE), ended)
    return SolverStat(
        abs_lowest=torch.where(lost, inf, size),
        rel_lowest=torch.where(lost, inf, size / norm),
        nstep=torch.full_like(size, rounds),
        nfe=rounds,
        status=status.to(torch.int8),
    )
