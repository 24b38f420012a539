"""Findings from small singular values of `I - J`: is there a fixed point, a line, or neither?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from torchdeq.diagnostics.case import Case
from torchdeq.diagnostics.findings import Kind, Severity
from torchdeq.diagnostics.gradient_flags import phantom_flags
from torchdeq.diagnostics.linearisation import Linearisation
from torchdeq.diagnostics.spectrum import SingularDirections
from torchdeq.diagnostics.trials import SolverTrial
from torchdeq.numbers import row_norm

if TYPE_CHECKING:
    from torchdeq.diagnostics.diagnosis import Jacobian

_SINGULAR = 1e-2  # singular values of I - J below this count as small
LINE = 1e-5  # singular values below this leave the state free along their direction
_FAR = 3.0  # norms of the state that a fixed point may be away before it counts as missing
_SHIFTS = 0.05  # a direction along which f(z + t v) - f(z) differs from t v by less is a shift
_LEAK = "a leak, f(lambda z) with lambda in (0, 1), or a norm on the output of f"


@torch.no_grad()
def shift_share(linear: Linearisation, directions: SingularDirections) -> float:
    """Return how far `f(z + t v) - f(z)` is from `t v`, relative to `t`, at the best sample.

    `v` is the direction of the smallest singular value of `I - J`, `t` the norm of the state: 0
    says that the direction is a shift of `f` everywhere, not only near `z`.
    """
    v = directions.right[:, 0].to(linear.z.dtype)
    t = row_norm(linear.z).clamp_min(1.0)[:, None].to(v.dtype)
    away = [row_norm(linear.f(linear.z + s * t * v) - linear.image - s * t * v) for s in (1, -1)]
    shares = (torch.maximum(*away) / t.squeeze(1)).nan_to_num(nan=float("inf"))
    return float(shares.min())


@torch.no_grad()
def distance_to_go(linear: Linearisation, directions: SingularDirections, noise: float) -> float:
    r"""Return how far a fixed point is along the singular direction, in norms of the state.

    To first order it is at $(u^\top g / \sigma) \, v$ with the residual $g = f(z) - z$: far away
    for a shift, close for a map that is only sensitive. The farthest of the samples with a small
    $\sigma$ counts.

    Args:
        linear: the map at the state.
        directions: of `I - J`.
        noise: of the singular values, by rounding.
    """
    sigma = directions.values[:, 0]
    g = (directions.left[:, 0] * (linear.image - linear.z)).sum(1).abs()
    size = row_norm(linear.z).clamp_min(torch.finfo(torch.float32).tiny)
    distance = (g / (sigma + noise) / size).nan_to_num(nan=float("inf"))
    return float(torch.where(sigma <= _SINGULAR, distance, 0.0).max())


def conclude_singular(
    case: Case, solvers: Sequence[SolverTrial], jacobian: Jacobian | None
) -> None:
    """Add a finding if `I - J` is singular: no fixed point, a line of them, or a sensitive one."""
    done = [trial for trial in solvers if trial.stats is not None]
    if jacobian is None or jacobian.directions is None or case.has(Kind.IGNORES_STATE):
        return
    smallest = float(jacobian.directions.values[:, 0].nan_to_num(nan=1.0).min())
    if smallest > _SINGULAR:
        return
    shift = jacobian.shift if jacobian.shift is not None else 1.0
    reduced = min(_reduction(trial) for trial in done)
    where = f"the smallest singular value of I - J is {smallest:.1e}"
    free = smallest + jacobian.noise <= LINE
    missing = reduced > _SINGULAR and jacobian.distance > _FAR
    if shift > _SHIFTS or not (free or missing):
        case.add(
            Kind.NEARLY_SINGULAR,
            Severity.WARNING,
            where,
            "Solutions and gradients are sensitive along that direction: regularise the Jacobian "
            "(jac_reg), or normalise the weights of f.",
        )
    elif missing:
        case.add(
            Kind.NO_FIXED_POINT,
            Severity.ERROR,
            f"{where}, and a step t along its direction v gives f(z + t v) = f(z) + t v within "
            f"{100 * shift:.1g} % of t; no solver reduced the residual |f(z) - z| below "
            f"{100 * reduced:.2g} % of the first",
            "Nothing holds the state along v, so iterates drift for ever. Residual blocks whose "
            f"norms remove a mean do this: add {_LEAK}; or train a fixed number of steps.",
            "--f_max_iter 0", *phantom_flags(case.config, 12),
        )  # fmt: skip
    else:
        case.add(
            Kind.NEARLY_SINGULAR,
            Severity.WARNING,
            f"{where}, and f(z + t v) = f(z) + t v along its direction: fixed points form a line, "
            "and the start decides which one is found",
            f"Make the fixed point unique: {_LEAK}.",
        )


def _reduction(trial: SolverTrial) -> float:
    """Return the residual at the end over that at the start, for the worst sample."""
    assert trial.stats is not None
    first = trial.stats["abs_trace"][:, 0].clamp_min(torch.finfo(torch.float32).tiny)
    return float((trial.stats["abs_lowest"] / first).nan_to_num(nan=float("inf")).max())
