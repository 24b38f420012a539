"""Trials: every solver and every backward pass on the map, with what each costs and achieves."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import Tensor

from torchdeq.config import DEQConfig
from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.cost import PeakMemory, synchronize
from torchdeq.diagnostics.gradient_flags import implicit_flags, phantom_flags
from torchdeq.diagnostics.gradients import GradientQuality, GradientReference
from torchdeq.diagnostics.guarding import Clock, OutOfTime
from torchdeq.grad import Backward, Implicit, Phantom, make_adjoint_solver, make_backwards
from torchdeq.pytree import State
from torchdeq.solver import Solver, make_solver, solve
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, StopRule, precision_floor

#: The solvers that are tried beside the configured one, simple before elaborate.
SOLVERS_TRIED = ("fixed_point_iter", "anderson", "broyden", "newton_krylov")
ADJOINTS_TRIED = ("fixed_point_iter", "anderson", "broyden", "gmres")
PHANTOM_STEPS = (1, 5)


@dataclass(frozen=True)
class SolverTrial:
    """One solver on the map.

    Args:
        name: the registered name.
        configured: whether it has the options of the caller.
        evaluations: of `f`, products included; None if the trial did not end.
        seconds: of the solve.
        residual: the worst relative residual of a sample.
        statuses: samples by status.
        memory: peak bytes beside the start, of a second run; None unless the trial solved.
        failure: why the trial did not end, or "".
        trace: the median over samples of the relative residual, by iterate.
        stats: the statistics of the solve.
        z: the solution.
    """

    name: str
    configured: bool
    evaluations: int | None = None
    seconds: float = 0.0
    residual: float = float("nan")
    statuses: dict[str, int] = field(default_factory=dict)
    memory: int | None = None
    failure: str = ""
    trace: tuple[float, ...] = field(default=(), repr=False)
    stats: SolverStat | None = field(default=None, repr=False)
    z: State = field(default=None, repr=False)

    @property
    def solved(self) -> bool:
        """Return whether every sample met the tolerance, or the limit of the precision."""
        good = {Status.CONVERGED.name, Status.STALLED.name}
        return bool(self.statuses) and set(self.statuses) <= good


@dataclass(frozen=True)
class BackwardTrial:
    """One backward pass on the map, from a good forward solution.

    Args:
        name: as a reader would write it, e.g. `ift, gmres` or `phantom, 5 steps`.
        flags: its options on the command line.
        configured: whether it has the options of the caller.
        quality: beside the exact gradient; None if the trial did not end.
        products: with the transposed Jacobian, or steps with a graph.
        seconds: of attaching and the backward pass.
        solved: whether the adjoint met its tolerance; None for a method without a solve.
        residual: the worst residual of the adjoint, relative to the cotangent; None without one.
        memory: peak bytes of both passes, of a second run; None if the adjoint failed.
        failure: why the trial did not end, or "".
    """

    name: str
    flags: tuple[str, ...]
    configured: bool
    quality: GradientQuality | None = None
    products: int | None = None
    seconds: float = 0.0
    solved: bool | None = None
    residual: float | None = None
    memory: int | None = None
    failure: str = ""

    @property
    def exact(self) -> bool:
        """Return whether the gradient is practically the exact one."""
        return self.quality is not None and self.quality.cosine > 0.999 and self.solved is not False


def trial_rule(config: DEQConfig, eps: float, budget: int) -> StopRule:
    """Return the stop rule of the trials: the caller's tolerance, or 1e-4 relative if it has none.

    A tolerance below the precision of `f` cannot be met; the trial then ends there.
    """
    stop = config.f_stop
    if not stop.goal:
        tol = max(1e-4, 2 * precision_floor(eps))
        stop = StopRule(tol=tol, mode="rel", norm=stop.norm)
    return replace(stop, max_iter=budget)


def try_solvers(
    case: Case, clock: Clock, share: float, budget: int, others: Sequence[str]
) -> Iterator[SolverTrial]:
    """Yield a trial of the configured solver and of the others, as long as there is time."""
    stop = trial_rule(case.config, case.eps, budget)
    name, options = case.config.f_solver, case.config.f_solver_kwargs
    names = [(name, True), *((n, False) for n in others if n != name or options)]
    for i, (key, configured) in enumerate(names):
        # Each trial may take its part of what is left, so that one slow solver leaves time.
        now = clock.spent / clock.seconds
        end = now + max(0.0, share - now) * 2 / (len(names) - i + 1)
        if clock.passed(share):
            yield SolverTrial(key, configured, failure="no time left")
            continue
        solver = make_solver(key, options if configured else {})
        yield _try_solver(case, clock, end, key, configured, solver, stop)


def _try_solver(
    case: Case,
    clock: Clock,
    end: float,
    name: str,
    configured: bool,
    solver: Solver[Any],
    stop: StopRule,
) -> SolverTrial:
    f = clock.limited(case.f, end)

    def run() -> Any:
        return solve(
            f, case.z0, solver, stop, args=case.args, on_failure="ignore", eps=case.eps,
            coupled=case.coupled or None,
        )  # fmt: skip

    device = case.packing.device
    try:
        began = time.perf_counter()
        solution = run()
        synchronize(device)
        seconds = time.perf_counter() - began
    except (OutOfTime, NotImplementedError, RuntimeError) as error:
        return SolverTrial(name, configured, failure=reason(error))
    stats = solution.stats
    codes = Counter(Status(code).name for code in stats.status.tolist())
    trial = SolverTrial(
        name,
        configured,
        stats.nfe,
        seconds,
        _worst(stats["rel_lowest"]),
        dict(codes),
        trace=tuple(stats["rel_trace"].nanmedian(0).values.tolist()),
        stats=stats,
        z=solution.z,
    )
    return replace(trial, memory=_peak(run, device)) if trial.solved else trial


def try_backwards(
    case: Case, reference: GradientReference, clock: Clock, share: float, z: State
) -> Iterator[BackwardTrial]:
    """Yield a trial of the configured backward and of others, from a good state `z`."""
    for name, flags, configured, backward in _backwards(case.config):
        if clock.passed(share):
            yield BackwardTrial(name, flags, configured, failure="no time left")
        else:
            trial = BackwardTrial(name, flags, configured)
            yield _try_backward(case, reference, trial, backward, z)


def _backwards(config: DEQConfig) -> Iterator[tuple[str, tuple[str, ...], bool, Backward]]:
    """Yield the name, flags, whether it is the caller's, and the method of each backward."""
    (own,) = make_backwards(config.with_options(grad=config.grad[-1:]), 1)
    own = replace(own, on_failure="ignore", writer=None) if isinstance(own, Implicit) else own
    yield f"{_name(own, config)} (yours)", (), True, own
    for steps in PHANTOM_STEPS:
        if own != Phantom(grad=steps):
            phantom = Phantom(grad=steps)
            yield _name(phantom), phantom_flags(config, steps), False, phantom
    for key in ADJOINTS_TRIED:
        if isinstance(own, Implicit) and key == config.b_solver and not config.b_solver_kwargs:
            continue
        stop = replace(config.b_stop, max_iter=max(100, config.b_max_iter))
        implicit = Implicit(solver=make_adjoint_solver(key, {}), stop=stop, on_failure="ignore")
        yield f"ift, {key}", implicit_flags(config, key), False, implicit


def _name(backward: Backward, config: DEQConfig | None = None) -> str:
    if isinstance(backward, Phantom):
        damping = f", tau {backward.tau:g}" if backward.tau != 1 else ""
        return f"phantom, {backward.grad} step{'s' if backward.grad > 1 else ''}{damping}"
    if isinstance(backward, Implicit) and config is not None:
        return f"ift, {config.b_solver}"
    return type(backward).__name__.lower()


def _try_backward(
    case: Case,
    reference: GradientReference,
    trial: BackwardTrial,
    backward: Backward,
    z: State,
) -> BackwardTrial:
    written: list[SolverStat] = []
    if isinstance(backward, Implicit):
        backward = replace(backward, writer=written.append)

    def run() -> Tensor:
        return reference.gradient_at(z, backward)

    try:
        began = time.perf_counter()
        gradient = run()
        synchronize(case.packing.device)
        seconds = time.perf_counter() - began
    except (NotImplementedError, RuntimeError, ValueError) as error:
        return replace(trial, failure=reason(error))
    stats = written[0] if written else None
    trial = replace(
        trial,
        quality=reference.compare(gradient),
        products=stats.nfe if stats is not None else getattr(backward, "grad", None),
        seconds=seconds,
        solved=None if stats is None else not bool(stats.failed.any()),
        residual=None if stats is None else _worst(stats["abs_lowest"]),
    )
    failed = trial.solved is False
    return trial if failed else replace(trial, memory=_peak(run, case.packing.device))


def _peak(run: Callable[[], object], device: torch.device) -> int | None:
    """Return the peak memory of a second run; None if it did not end or cannot be measured."""
    try:
        with PeakMemory(device) as memory:
            run()
    except (OutOfTime, NotImplementedError, RuntimeError):
        return None
    return memory.peak


def _worst(values: Tensor) -> float:
    """Return the largest value; infinity if one of them is NaN."""
    return float(values.nan_to_num(nan=float("inf")).max()) if values.numel() else 0.0


def reason(error: BaseException) -> str:
    """Return the first line of an error; a lack of time may be the cause of another error."""
    cause: BaseException | None = error
    while cause is not None:
        if isinstance(cause, OutOfTime):
            return "out of time"
        cause = cause.__cause__ or cause.__context__
    text = str(error).replace(f" ({error.__cause__})", "")  # an error that says what to do instead
    return text.split("\n")[0] or type(error).__name__
