"""Broyden's method: quasi-Newton steps with an inverse Jacobian estimated from earlier steps."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal

import torch
from torch import Tensor

from torchdeq.checks import require_whole
from torchdeq.numbers import unit_scale
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.line_search import Trial, backtrack
from torchdeq.solver.low_rank import LowRank
from torchdeq.solver.secant import Secant


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
        state.make_room(remaining, g)
        dz = torch.sub(new_z, z, out=H.U[H.rank])  # the row of the new term
        before = g if self.update == "bad" else None
        del it, z, g  # `f` may need the memory
        if trial is None:
            fz = f(new_z)
            trial = Trial(new_z, fz, fz - new_z)
        state.learn(dz, _wide(trial.residual), before)
        return Iterate(*trial, x=new_z), state

    @property
    def streams(self) -> bool:
        return not self.ls  # a line search evaluates `f` several times in a step

    def put(self, it: Iterate, state: Secant, rows: Tensor, z: Tensor) -> Iterate:
        state.put(rows, z)
        point = it.z.index_copy(0, rows.to(z.device), z)
        return Iterate(point, it.fz, it.residual, x=point)


def _wide(t: Tensor) -> Tensor:
    """Return `t` in at least single precision: differences in half precision are noise."""
    return t.float() if t.dtype.itemsize < 4 else t


if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import SolverFunction

    broyden_solver: SolverFunction
