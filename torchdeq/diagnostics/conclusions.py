"""Findings that follow from the trials: convergence, singular directions, budgets, gradients."""

from __future__ import annotations

from collections.abc import Sequence
from math import log10
from typing import TYPE_CHECKING

from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.findings import Kind, Severity
from torchdeq.diagnostics.paths import PathIndependence
from torchdeq.diagnostics.singular import LINE
from torchdeq.diagnostics.trials import BackwardTrial, SolverTrial
from torchdeq.numbers import row_norm
from torchdeq.stopping import Status, precision_floor

if TYPE_CHECKING:
    from torchdeq.diagnostics.diagnosis import Jacobian

_SLOW = 0.9  # spectral radius from which plain iteration is slow
_NON_NORMAL = 2.0  # norm over radius of the Jacobian
_COARSE = 0.9  # cosine below which a gradient is far from the exact one


def conclude(
    case: Case,
    solvers: Sequence[SolverTrial],
    jacobian: Jacobian | None,
    backwards: Sequence[BackwardTrial],
    paths: PathIndependence | None,
) -> None:
    """Add the findings that follow from the trials of a case; see also `singular`."""
    done = [trial for trial in solvers if trial.stats is not None]
    if not done:
        return
    _conclude_overflow(case, done)
    _conclude_convergence(case, done, jacobian)
    _conclude_tolerance(case, done)
    _conclude_budget(case, done)
    _conclude_gradient(case, backwards)
    if paths is not None:
        _conclude_paths(case, paths, jacobian)
    plain = next((t for t in done if t.name == "fixed_point_iter"), None)
    if case.has(Kind.NON_NORMAL) or jacobian is None or plain is None:
        return
    if plain.solved and jacobian.radius < _SLOW:
        case.add(
            Kind.CONTRACTION,
            Severity.NOTE,
            f"the spectral radius is at most {jacobian.radius:.2f}, and plain iteration "
            f"needs {plain.evaluations} evaluations",
        )


def _conclude_overflow(case: Case, done: list[SolverTrial]) -> None:
    overflown = [t for t in done if Status.NONFINITE.name in t.statuses]
    if not overflown or not (overflown[0].configured or len(overflown) == len(done)):
        return
    trial = overflown[0]
    case.add(
        Kind.OVERFLOW,
        Severity.ERROR,
        f"with {trial.name}, f returned a NaN or an infinity for "
        f"{trial.statuses[Status.NONFINITE.name]} of {sum(trial.statuses.values())} samples",
        "Bound f: normalise its weights (apply_norm), end it with a bounded function or a norm, "
        "or damp the iteration.",
        "--f_opt tau=0.5",
    )


def _conclude_convergence(case: Case, done: list[SolverTrial], jacobian: Jacobian | None) -> None:
    best = min(done, key=lambda trial: (not trial.solved, trial.residual))
    if not best.solved and not case.has(Kind.NO_FIXED_POINT, Kind.OVERFLOW):
        case.add(
            Kind.UNSOLVED,
            Severity.ERROR,
            f"the closest was {best.name}, with a relative residual of {best.residual:.1e} after "
            f"{best.evaluations} evaluations",
            "Make f contract: apply_norm on its weights, jac_reg in the loss, damping; or allow "
            "more evaluations.",
        )
    if jacobian is None or case.has(Kind.NO_FIXED_POINT):
        return
    radius = jacobian.radius
    plain = any(
        trial.name == "fixed_point_iter" and trial.solved and (trial.evaluations or 0) > 2
        for trial in done
    )
    if radius >= 1 and plain and not jacobian.trusted:
        pass  # rounding has moved the eigenvalues, and plain iteration has converged
    elif radius >= 1:
        case.add(
            Kind.NOT_CONTRACTING,
            Severity.WARNING if best.solved else Severity.ERROR,
            f"the leading eigenvalue of the slowest sample is {leading(jacobian)}, of modulus "
            f"{radius:.3g}",
            "Use a solver that needs no contraction: anderson, broyden or newton_krylov; or damp "
            "plain iteration if the eigenvalue is negative.",
        )
    elif radius > _SLOW:
        digits = 1 / -log10(radius)
        case.add(
            Kind.SLOW_CONTRACTION,
            Severity.WARNING,
            f"the leading eigenvalue of the slowest sample is {leading(jacobian)}, of modulus "
            f"{radius:.3g}: plain iteration takes {digits:.0f} evaluations per digit",
            "Use anderson or broyden.",
        )
    _conclude_normality(case, jacobian)


def _conclude_normality(case: Case, jacobian: Jacobian) -> None:
    normality = jacobian.normality
    if normality is None:
        return
    worst = int(normality.growth.argmax())
    norm, growth = float(normality.norm[worst]), float(normality.growth[worst])
    ratio = float(normality.ratio[worst])
    if norm > 1 and ratio > _NON_NORMAL and jacobian.radius < 1:
        case.add(
            Kind.NON_NORMAL,
            Severity.WARNING,
            f"in the sample with the largest growth, the Jacobian has norm {norm:.3g} and spectral "
            f"radius {float(normality.radius[worst]):.3g}; perturbations grow by {growth:.3g} "
            "first",
            "Residuals may rise before they fall: allow more evaluations, do not stop at the first "
            "rise, and prefer gmres or broyden for the adjoint to few phantom steps.",
        )


def leading(jacobian: Jacobian) -> str:
    """Return the leading eigenvalue of the sample with the largest radius, as text."""
    radius = jacobian.spectrum.radius.nan_to_num(nan=-1.0)
    return shown(complex(jacobian.spectrum.values[int(radius.argmax()), 0]))


def shown(value: complex) -> str:
    """Return an eigenvalue as text; a pair of conjugates as one with a plus-minus sign."""
    if abs(value.imag) <= 1e-6 * abs(value):
        return f"{value.real:.3g}"
    return f"{value.real:.3g} +- {abs(value.imag):.3g}i"


def _conclude_tolerance(case: Case, done: list[SolverTrial]) -> None:
    stop, floor = case.config.f_stop, precision_floor(case.eps)
    if not stop.goal:
        return
    best = min(done, key=lambda trial: trial.residual)
    stalled = any(Status.STALLED.name in trial.statuses for trial in done)
    size = 1.0
    if stop.mode == "abs" and stop.tol is not None:
        rows = case.packing.pack(best.z)
        size = float(row_norm(rows).max()) / stop.length(rows.shape[1])
    tol = stop.tol if stop.tol is not None else (stop.rtol or 0.0)
    met = any(set(trial.statuses) == {Status.CONVERGED.name} for trial in done)
    if not stalled and (met or tol >= floor * size):
        return
    reachable = 2 * max(floor, min(best.residual, 0.1)) * size
    case.add(
        Kind.TOLERANCE_BELOW_PRECISION,
        Severity.WARNING,
        f"the tolerance is {tol:.1e}, and rounding in f limits the residual to about "
        f"{floor * size:.1e}",
        "Solves end as STALLED or spend their budget: loosen the tolerance, or compute f in a "
        "higher precision.",
        f"--f_{'tol' if stop.tol is not None else 'rtol'} {reachable:.1g}",
    )


def _conclude_budget(case: Case, done: list[SolverTrial]) -> None:
    own, budget = done[0], case.config.f_max_iter
    if not (own.configured and own.solved and case.config.f_stop.goal and budget):
        return
    assert own.evaluations is not None
    if own.evaluations > budget:
        case.add(
            Kind.BUDGET_TOO_SMALL,
            Severity.WARNING,
            f"{own.name} needs {own.evaluations} evaluations for the tolerance, and the budget is "
            f"{budget}",
            "Maps grow harder during training: raise the budget, use a faster solver, or keep f "
            "contracting with jac_reg.",
            f"--f_max_iter {generous(own.evaluations)}",
        )


def generous(evaluations: int) -> int:
    """Return a budget with room above a number of evaluations, a multiple of 5."""
    return -(-int(1.5 * evaluations) // 5) * 5


def _conclude_gradient(case: Case, backwards: Sequence[BackwardTrial]) -> None:
    own = next((trial for trial in backwards if trial.configured), None)
    if own is None or own.quality is None:
        return
    if own.solved is False:
        case.add(
            Kind.ADJOINT_FAILS,
            Severity.WARNING,
            f"{own.name} ends at a residual of {own.residual:.1e}, relative to the cotangent, "
            f"after {own.products} products",
            "Use gmres or broyden with a larger b_max_iter, or loosen b_tol.",
        )
    if own.quality.reference_residual < 0.01 and own.quality.cosine < _COARSE:
        case.add(
            Kind.INEXACT_GRADIENT,
            Severity.WARNING,
            f"{own.name} has a cosine of {own.quality.cosine:.2f} with the exact gradient, and "
            f"{own.quality.norm_ratio:.2g} times its length",
            "Take more phantom steps, or differentiate implicitly.",
        )


def _conclude_paths(case: Case, paths: PathIndependence, jacobian: Jacobian | None) -> None:
    elsewhere = ~paths.independent(1e-3)
    if jacobian is not None and jacobian.directions is not None:
        # States of residual r may lie r / sigma apart around one fixed point.
        sigma = jacobian.directions.values[:, 0].to(paths.distances).clamp_min(LINE)
        apart = (paths.residuals[:, 1:] + paths.residuals[:, :1]) / sigma[:, None]
        elsewhere &= (paths.distances > 4 * apart).any(1)
    dependent = int(elsewhere.sum())
    if dependent:
        case.add(
            Kind.SEVERAL_FIXED_POINTS,
            Severity.WARNING,
            f"{dependent} of {len(paths.distances)} samples end elsewhere from a random start, at "
            f"a relative distance of up to {float(paths.distances.max()):.2g}",
            "Results depend on z0: always start alike, mix random starts into training "
            "(mixed_init), or make f a contraction.",
        )
