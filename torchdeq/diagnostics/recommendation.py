"""The recommendation: a solver and a gradient, chosen from the trials."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.conclusions import generous
from torchdeq.diagnostics.findings import Kind, Severity
from torchdeq.diagnostics.trials import SOLVERS_TRIED, BackwardTrial, SolverTrial

_PLAIN = ("fixed_point_iter", "simple_fixed_point_iter")
_IMPLICIT = ("--ift", "--b_solver", "--b_max_iter")
_SIMPLER = 1.25  # a simpler solver is preferred up to this many times the fewest evaluations


@dataclass(frozen=True)
class Recommendation:
    """What to do.

    Args:
        words: sentences, in the order of importance.
        flags: options of the command line; `--f_max_iter 30` is `get_deq(f_max_iter=30)`, and
            `--no-ift` is `get_deq(ift=False)`.
    """

    words: tuple[str, ...]
    flags: tuple[str, ...]


def recommend(
    case: Case,
    solvers: Sequence[SolverTrial],
    backwards: Sequence[BackwardTrial],
    defaults: Sequence[str] = (),
) -> Recommendation:
    """Return what to do about a case.

    Args:
        case: with all findings.
        solvers: the trials of solvers.
        backwards: the trials of backward passes.
        defaults: flags of the examined options, if the caller has none.
    """
    words = [
        f"First: {finding.cure}"
        for finding in sorted(case.findings, key=lambda each: each.kind != Kind.NO_FIXED_POINT)
        if finding.severity == Severity.ERROR and finding.cure and finding.kind != Kind.UNSOLVED
    ]
    flags = {flag.split()[0]: flag for flag in defaults} | _flags_of_findings(case)
    if case.has(Kind.NO_FIXED_POINT):
        finding = next(each for each in case.findings if each.kind == Kind.NO_FIXED_POINT)
        return Recommendation(tuple(words), _needed(finding.flags, defaults))
    if case.has(Kind.IGNORES_STATE) or not solvers:
        return Recommendation(tuple(words), ())
    solver = choose_solver(solvers, plain=not case.has(Kind.NOT_CONTRACTING))
    if solver is None:
        tried = [t for t in solvers if t.evaluations is not None]
        closest = min(tried, key=lambda t: t.residual, default=None)
        if closest is not None:
            words.append(
                f"No solver reached the tolerance; {closest.name} came closest. Make f contract "
                "(apply_norm, jac_reg, damping) before tuning solvers."
            )
        return Recommendation(tuple(words), tuple(_flags_of_findings(case).values()))
    assert solver.evaluations is not None
    words.append(
        f"Solve with {solver.name}: {solver.evaluations} evaluations of f for the tolerance."
    )
    flags["--f_solver"] = f"--f_solver {solver.name}"
    flags["--f_max_iter"] = f"--f_max_iter {generous(solver.evaluations)}"
    backward = choose_backward(backwards)
    if backward is not None:
        words.append(_about(backward))
        if "--grad" in " ".join(backward.flags):  # implicit gradients would take precedence
            flags = {name: flag for name, flag in flags.items() if name not in _IMPLICIT}
            if case.config.implicit and not defaults:
                words.append("Phantom gradients need ift=False.")
        flags |= {flag.split()[0]: flag for flag in _needed(backward.flags, defaults)}
        if backward.solved is not None and backward.products and not backward.configured:
            flags["--b_max_iter"] = f"--b_max_iter {generous(backward.products)}"
    return Recommendation(tuple(words), tuple(flags.values()))


def choose_solver(solvers: Sequence[SolverTrial], plain: bool = True) -> SolverTrial | None:
    """Return the simplest solver that needs about the fewest evaluations; None if all failed.

    Args:
        solvers: the trials.
        plain: whether plain iteration contracts; otherwise it is chosen only if it alone solved.
    """
    solved = [trial for trial in solvers if trial.solved and trial.evaluations is not None]
    if not plain:
        solved = [trial for trial in solved if trial.name not in _PLAIN] or solved
    if not solved:
        return None
    fewest = min(trial.evaluations or 0 for trial in solved)
    near = [t for t in solved if (t.evaluations or 0) <= _SIMPLER * fewest + 1]

    def rank(trial: SolverTrial) -> tuple[int, int]:
        known = trial.name in SOLVERS_TRIED
        return (SOLVERS_TRIED.index(trial.name) if known else -1, trial.evaluations or 0)

    return min(near, key=rank)


def choose_backward(backwards: Sequence[BackwardTrial]) -> BackwardTrial | None:
    """Return the caller's gradient if it is practically exact, else the cheapest that is."""
    compared = [trial for trial in backwards if trial.quality is not None]
    if any(trial.quality and trial.quality.reference_residual > 0.01 for trial in compared):
        # Without an exact gradient to compare with, only an adjoint that converges says something.
        compared = [t for t in compared if t.solved and (t.residual or 0.0) < 0.01]
        own = next((trial for trial in compared if trial.configured), None)
        return own or min(compared, key=lambda trial: trial.products or 0, default=None)
    exact = [trial for trial in compared if trial.exact and trial.products is not None]
    own = next((trial for trial in exact if trial.configured), None)
    if own is not None:
        return own
    if exact:
        return min(exact, key=lambda trial: trial.products or 0)
    return max(compared, key=lambda t: t.quality.cosine if t.quality else -1.0, default=None)


def _flags_of_findings(case: Case) -> dict[str, str]:
    """Return the flags of all findings, by name; those of the solver come from the trials."""
    flags = [flag for finding in case.findings for flag in finding.flags]
    return {flag.split()[0]: flag for flag in flags if not flag.startswith("--f_max_iter")}


def _needed(flags: Sequence[str], defaults: Sequence[str]) -> tuple[str, ...]:
    """Return the flags without those that switch off what no caller has switched on."""
    return tuple(flag for flag in flags if not (defaults and flag.startswith("--no-")))


def _about(backward: BackwardTrial) -> str:
    assert backward.quality is not None
    if backward.quality.reference_residual > 0.01:
        name = backward.name.removesuffix(" (yours)")
        return f"Differentiate by {name}, whose adjoint converges in {backward.products} products."
    cosine = f"cosine {backward.quality.cosine:.3f} with the exact gradient"
    if backward.configured and backward.exact:
        return f"Keep your gradient, {backward.name.removesuffix(' (yours)')}: {cosine}."
    return f"Differentiate by {backward.name}: {cosine}, {backward.products} products."
