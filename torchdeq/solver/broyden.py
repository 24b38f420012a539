"""Broyden's method: quasi-Newton steps with an inverse Jacobian estimated from earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from torchdeq.checks import require_whole
from torchdeq.numbers import row_dot, unit_scale
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.line_search import Trial, backtrack
from torchdeq.solver.low_rank import LowRank


@dataclass
class Secant:
    """The state of Broyden's method.

    Args:
        H: the estimated inverse Jacobian.
        Hg: (B, D) its product with the last residual.
        unit: (B, 1) one over the size of the first residual, if products of two states could leave
            the range of their precision.
    """

    H: LowRank
    Hg: Tensor
    unit: Tensor | None = None

    def take(self, rows: Tensor) -> Self:
        """Return the state of some of the samples."""
        unit = None if self.unit is None else self.unit[rows]
        return type(self)(self.H.take(rows), self.Hg.index_select(0, rows), unit)


@SOLVERS.register("broyden")
@dataclass(frozen=True, kw_only=True)
class Broyden(Solver[Secant]):
    r"""Broyden's method (Broyden, 1965) on $g(z) = f(z) - z = 0$, from $H_0 = -I$.

    $$z^{k+1} = z^k - \alpha H_k g(z^k), \qquad
    H_{k+1} = H_k + \frac{(\Delta z - H_k \Delta g)\, v^\top}{v^\top \Delta g}$$

    with $v = H_k^\top \Delta z$ (good update) or $v = \Delta g$ (bad update). The answer is the
    point $z$. Memory: two states for each rank-one term, allocated as terms are added.

    Args:
        l_thres: rank-one terms to keep; after that many, $H$ starts again from $-I$. None keeps
            all, one for each evaluation after the first. A limit saves memory and costs evaluations
            on hard maps.
        alpha: step size.
        update: `"good"` or `"bad"`; the bad update saves a product, but is worse on stiff problems.
        ls: search for the step length by backtracking on the squared residual.
        ls_tries: evaluations of one search, at most.
    """

    l_thres: int | None = None
    alpha: float = 1.0
    update: Literal["good", "bad"] = "good"
    ls: bool = False
    ls_tries: int = 4
    answers_point: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"LBFGS_thres": "l_thres"}

    def __post_init__(self) -> None:
        if self.l_thres is not None:
            require_whole("l_thres, unless it is None,", self.l_thres)
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.update not in ("good", "bad"):
            raise ValueError(f"update must be 'good' or 'bad', got {self.update!r}")
        require_whole("ls_tries", self.ls_tries)

    def init(self, it: Iterate) -> Secant:
        g = _wide(it.residual)
        H = LowRank(g, self.l_thres)
        return Secant(H, H.matvec(g), None if it.moderate else unit_scale(g))

    def step(self, f: FixedPointFn, it: Iterate, state: Secant) -> tuple[Iterate, Secant]:
        z, g, H = _wide(it.z), _wide(it.residual), state.H
        if self.ls:
            trial = backtrack(f, it.z, state.Hg * -self.alpha, g, self.ls_tries)
            new_z, remaining = trial.point, 1 + f.left
        else:
            trial, remaining = None, f.left
            new_z = torch.sub(z, state.Hg, alpha=self.alpha).to(it.z.dtype)
        if H.make_room(remaining):
            state.Hg = H.matvec(g)
        dz = torch.sub(new_z, z, out=H.U[H.rank])  # the row of the new term
        before = g if self.update == "bad" else None
        del it, z, g  # `f` may need the memory
        if trial is None:
            fz = f(new_z)
            trial = Trial(new_z, fz, fz - new_z)
        self._learn(state, dz, _wide(trial.residual), before)
        return Iterate(*trial, x=new_z), state

    def _learn(self, state: Secant, dz: Tensor, g: Tensor, before: Tensor | None) -> None:
        """Add the rank-one term of a step and set `state.Hg` to $H g$ at the new residual.

        Args:
            state: changed in place.
            dz: (B, D) the step, in the free row of `U`.
            g: (B, D) the residual after it.
            before: (B, D) the residual before it, for the bad update.
        """
        H, unit = state.H, state.unit
        new_Hg = H.matvec(g)
        Hdg = torch.sub(new_Hg, state.Hg, out=state.Hg)
        if before is None:
            step = dz if unit is None else dz * unit  # the scale of v cancels
            v = H.rmatvec(step, out=H.V[H.rank])
            scale = row_dot(step, Hdg)  # = v . dg
        else:
            v = torch.sub(g, before, out=H.V[H.rank])
            v = v if unit is None else v.mul_(unit)
            scale = row_dot(v, v) if unit is None else row_dot(v, v) / unit
        # A zero denominator carries no information: the term becomes zero.
        u = dz.sub_(Hdg).mul_(scale.reciprocal_().nan_to_num_(0.0, 0.0, 0.0))
        state.Hg = new_Hg.addcmul_(u, row_dot(v, g))
        H.extend()


def _wide(t: Tensor) -> Tensor:
    """Return `t` in at least single precision: differences in half precision are noise."""
    return t.float() if t.dtype.itemsize < 4 else t


if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import SolverFunction

    broyden_solver: SolverFunction
