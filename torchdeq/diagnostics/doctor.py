"""The doctor: examine a map, try solvers and backward passes, and say what to do."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any

import torch

from torchdeq.checks import require, require_whole
from torchdeq.config import DEQConfig
from torchdeq.diagnostics import conclusions, singular
from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.cost import CallCost, call_cost
from torchdeq.diagnostics.diagnosis import Diagnosis, Jacobian, Subject
from torchdeq.diagnostics.examination import examine
from torchdeq.diagnostics.findings import Kind
from torchdeq.diagnostics.gradients import GradientReference, Loss, check_loss
from torchdeq.diagnostics.guarding import Clock, OutOfTime, untouched
from torchdeq.diagnostics.linearisation import Linearisation
from torchdeq.diagnostics.paths import PathIndependence, path_independence
from torchdeq.diagnostics.recommendation import recommend
from torchdeq.diagnostics.spectrum import (
    eigenvalues_of,
    non_normality_of,
    singular_directions_of,
)
from torchdeq.diagnostics.trials import (
    SOLVERS_TRIED,
    BackwardTrial,
    SolverTrial,
    reason,
    trial_rule,
    try_backwards,
    try_solvers,
)
from torchdeq.modules import ModuleState
from torchdeq.pytree import State
from torchdeq.randomness import Randomness
from torchdeq.solver import make_solver
from torchdeq.tracing import force_eager

#: The parts of the time in which each stage must end.
_SOLVERS, _JACOBIAN, _BACKWARDS, _PATHS = 0.5, 0.7, 0.9, 1.0
_MAX_BYTES = 1e9  # that eigenvalues and singular directions may take
#: The flags of `_DEFAULT`, for callers without options of their own.
_DEFAULT_FLAGS = ("--f_tol 1e-4", "--f_stop_mode rel", "--ift", "--b_solver gmres")
_DEFAULT = DEQConfig(f_solver="anderson", f_tol=1e-4, f_stop_mode="rel", ift=True, b_solver="gmres")


@dataclass(frozen=True)
class _Request:
    """What the caller wants to know."""

    budget: int
    loss: Loss | None
    solvers: Sequence[str]
    gradients: bool


@dataclass
class _Results:
    """What the stages have found so far."""

    cost: CallCost | None = None
    solvers: tuple[SolverTrial, ...] = ()
    jacobian: Jacobian | None = None
    backwards: tuple[BackwardTrial, ...] = ()
    paths: PathIndependence | None = None
    skipped: tuple[str, ...] = ()


def doctor(
    f: Callable[..., Any],
    z0: State,
    args: tuple[Any, ...] = (),
    *,
    config: DEQConfig | None = None,
    loss: Loss | None = None,
    seconds: float = 20.0,
    budget: int | None = None,
    solvers: Sequence[str] = SOLVERS_TRIED,
    gradients: bool = True,
) -> Diagnosis:
    """Find out why a fixed point is hard or slow to solve, and which options to use.

    The doctor examines `f` itself, tries solvers and backward passes, computes eigenvalues of the
    Jacobian, and returns a `Diagnosis`: print it, or read its findings. It leaves modules,
    gradients and random generators as they were.

    Args:
        f: called as `f(z, *args)`, or `f(*z, *args)` for a tuple or list state.
        z0: the start.
        args: further arguments of `f`.
        config: the options of your DEQ, whose solver, tolerance, budget and gradient are examined;
            by default Anderson acceleration to 1e-4, relative, and implicit gradients.
        loss: from the state to a number, to compare gradients of; by default a random linear
            function of the state.
        seconds: the time limit. Stages that do not fit are skipped, and the diagnosis lists them; a
            single call of `f` or product with its Jacobian is not interrupted.
        budget: evaluations that a trial of a solver may spend; by default four times that of
            `config`, and at least 200.
        solvers: names of solvers to try beside that of `config`.
        gradients: compare gradients, too, which takes about half of the time.

    Example:
        >>> diagnosis = torchdeq.doctor(f, torch.zeros(8, 64))
        >>> print(diagnosis)
    """
    require(_is_number(seconds) and seconds > 0, "seconds must be positive", seconds)
    if torch.is_inference_mode_enabled():
        raise RuntimeError("the doctor differentiates f: call it outside torch.inference_mode")
    own = config
    config = _DEFAULT if config is None else config
    if not isinstance(config, DEQConfig):
        raise TypeError(
            f"config must be a DEQConfig, e.g. deq.config of a module, got {type(config).__name__}"
        )
    if isinstance(solvers, str):
        raise TypeError(f"solvers must be names of solvers, got the string {solvers!r}")
    budget = max(200, 4 * config.f_max_iter) if budget is None else budget
    require_whole("budget", budget)
    case, clock, results = Case(f, z0, args, config), Clock(seconds), _Results()
    require(case.start.numel(), "z0 must have samples with numbers", tuple(case.start.shape))
    if loss is not None:
        check_loss(loss, z0)
    modules = ModuleState((f, args)).restored(statistics="copied")
    quiet = warnings.catch_warnings()
    random = Randomness(case.packing.device).replayed()
    with untouched(f, args), random, force_eager(), modules, quiet:
        warnings.simplefilter("ignore")  # of trials that fail, and of torch's forward mode
        torch.manual_seed(0)
        results.skipped = examine(case, clock)
        _run_stages(case, clock, results, _Request(budget, loss, solvers, gradients))
    conclusions.conclude(case, results.solvers, results.jacobian, results.backwards, results.paths)
    subject = Subject.of(case, trial_rule(config, case.eps, budget))
    return Diagnosis(
        subject,
        tuple(sorted(case.findings, key=lambda finding: -finding.severity)),
        results.cost,
        results.solvers,
        results.backwards,
        results.jacobian,
        results.paths,
        recommend(case, results.solvers, results.backwards, () if own else _DEFAULT_FLAGS),
        clock.spent,
        results.skipped,
    )


def _is_number(value: object) -> bool:
    return isinstance(value, Real)


def _run_stages(case: Case, clock: Clock, results: _Results, request: _Request) -> None:
    """Run one stage after the other; an unusable map or a lack of time ends a stage."""
    if case.has(Kind.OVERFLOW):
        results.skipped += ("every trial: f(z0) is not finite",)
        return
    try:
        results.cost = call_cost(clock.limited(case.f, _SOLVERS), case.z0, case.args, repeats=3)
    except OutOfTime:
        results.skipped += ("every trial: the time is too short for a few calls of f",)
        return
    results.solvers = tuple(try_solvers(case, clock, _SOLVERS, request.budget, request.solvers))
    done = [trial for trial in results.solvers if trial.z is not None]
    if not done:
        why = sorted({trial.failure for trial in results.solvers})
        results.skipped += (f"eigenvalues and gradients: no solver ended ({'; '.join(why)})",)
        return
    best = min(done, key=lambda trial: (not trial.solved, trial.residual))
    for stage, share in ((_examine_jacobian, _JACOBIAN), (_compare_gradients, _BACKWARDS)):
        name = stage.__name__.lstrip("_").replace("_", " ")
        try:
            if clock.passed(share):
                raise OutOfTime("no time left")
            stage(case, clock, results, best, request)
        except (OutOfTime, NotImplementedError, RuntimeError) as error:
            results.skipped += (f"{name}: {reason(error)}",)
    if case.has(Kind.NO_FIXED_POINT):
        results.skipped += ("gradients and other starts: there is no fixed point",)
    elif not best.solved or clock.passed(_BACKWARDS):
        results.skipped += ("compare starts: " + ("no time left" if best.solved else "unsolved"),)
    else:
        _compare_starts(case, clock, results, best, request)


def _examine_jacobian(
    case: Case, clock: Clock, results: _Results, best: SolverTrial, request: _Request
) -> None:
    """Compute eigenvalues, singular directions and non-normality at the best state."""
    f = clock.limited(case.f, _JACOBIAN)
    linear = Linearisation(f, best.z, case.args, case.coupled)
    products = _affordable(results.cost, (_JACOBIAN - _SOLVERS) * clock.seconds, linear.z.nbytes)
    spectrum = eigenvalues_of(linear, max_products=products)
    results.jacobian = Jacobian(spectrum)
    try:
        directions = singular_directions_of(linear, max_products=max(2, products // 2))
        normality = non_normality_of(linear, spectrum.radius, max_products=max(2, products // 4))
    except (OutOfTime, NotImplementedError, RuntimeError) as error:
        results.skipped += (f"singular directions: {reason(error)}",)
        return
    shift = singular.shift_share(linear, directions)
    noise = torch.finfo(linear.z.dtype).eps * (1 + float(normality.norm.nan_to_num(nan=0.0).max()))
    distance = singular.distance_to_go(linear, directions, noise)
    results.jacobian = Jacobian(spectrum, directions, normality, shift, distance, noise)
    singular.conclude_singular(case, results.solvers, results.jacobian)


def _affordable(cost: CallCost | None, seconds: float, state: int) -> int:
    """Return the number of Jacobian products that fit into a time, within 20 and 160.

    Methods keep a state of so many bytes per product: they must fit into memory, too.
    """
    one = max(cost.vjp or 0.0, cost.jvp or 0.0) if cost is not None else 0.0
    products = min(160, max(20, seconds / max(one, 1e-6) / 3))
    return int(max(8, min(products, _MAX_BYTES / max(1, state))))


def _compare_gradients(
    case: Case, clock: Clock, results: _Results, best: SolverTrial, request: _Request
) -> None:
    """Try backward passes from the best state, unless there is nothing to differentiate."""
    if case.has(Kind.NO_FIXED_POINT) or not request.gradients:
        return
    reference = GradientReference(
        clock.limited(case.f, _BACKWARDS), case.z0, case.args, z=best.z, loss=request.loss,
        coupled=case.coupled or None,
    )  # fmt: skip
    results.backwards = tuple(try_backwards(case, reference, clock, _BACKWARDS, best.z))
    if reference.residual > 0.01:
        results.skipped += (
            f"an exact gradient: its adjoint ended at a residual of {reference.residual:.1e}, so "
            "that cosines say little",
        )


def _compare_starts(
    case: Case, clock: Clock, results: _Results, best: SolverTrial, request: _Request
) -> None:
    """Solve from two random starts."""
    options = case.config.f_solver_kwargs if best.configured else {}
    stop = trial_rule(case.config, case.eps, request.budget)
    try:
        results.paths = path_independence(
            clock.limited(case.f, _PATHS), case.z0, case.args, starts=2,
            solver=make_solver(best.name, options), stop=replace(stop, return_final=False),
            coupled=case.coupled or None,
        )  # fmt: skip
    except (OutOfTime, NotImplementedError, RuntimeError) as error:
        results.skipped += (f"compare starts: {reason(error)}",)
