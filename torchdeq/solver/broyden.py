"""Broyden's method: a quasi-Newton step with an inverse Jacobian learnt from the steps taken."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar, Literal, Self

import torch
from torch import Tensor

from torchdeq.numbers import unit_scale
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.line_search import backtrack
from torchdeq.solver.low_rank import LowRank


@dataclass
class Secant:
    """The inverse Jacobian ``H`` and its product with the latest residual.

    ``unit`` is one over the size of the first residual, where products of two states could leave
    the range of their precision.
    """

    H: LowRank
    Hg: Tensor  # (B, D)
    unit: Tensor | None = None  # (B, 1)

    def take(self, rows: Tensor) -> Self:
        unit = None if self.unit is None else self.unit[rows]
        return type(self)(self.H.take(rows), self.Hg.index_select(0, rows), unit)


@SOLVERS.register("broyden")
@dataclass(frozen=True, kw_only=True)
class Broyden(Solver[Secant]):
    r"""Broyden's method (Broyden, 1965) on :math:`g(z) = f(z) - z = 0`, from :math:`H_0 = -I`.

    .. math:: z^{k+1} = z^k - \alpha H_k g(z^k), \qquad
              H_{k+1} = H_k + \frac{(\Delta z - H_k \Delta g)\, v^\top}{v^\top \Delta g}

    with :math:`v = H_k^\top \Delta z` (good update) or :math:`v = \Delta g` (bad update). The
    answer is the point :math:`z`. Memory: two states for each term, reserved as terms come.

    Args:
        l_thres: rank-one terms kept; when they are full, :math:`H` starts over. None keeps all, one
            for each evaluation after the first; a limit saves memory and costs evaluations on hard
            maps.
        alpha: step size.
        update: ``"good"`` or ``"bad"``; the bad one saves a product and suits stiff problems less.
        ls: backtrack on the squared residual, up to ``ls_tries`` evaluations a step.
        ls_tries: the most trials of one search.
    """

    l_thres: int | None = None
    alpha: float = 1.0
    update: Literal["good", "bad"] = "good"
    ls: bool = False
    ls_tries: int = 4
    answers_point: ClassVar[bool] = True
    aliases: ClassVar[Mapping[str, str]] = {"LBFGS_thres": "l_thres"}

    def __post_init__(self) -> None:
        if self.l_thres is not None and (self.l_thres != int(self.l_thres) or self.l_thres < 1):
            raise ValueError(f"l_thres must be None or a whole number >= 1, got {self.l_thres}")
        if self.alpha <= 0:
            raise ValueError(f"alpha must be positive, got {self.alpha}")
        if self.update not in ("good", "bad"):
            raise ValueError(f"update must be 'good' or 'bad', got {self.update!r}")
        if self.ls_tries < 1:
            raise ValueError(f"ls_tries must be at least 1, got {self.ls_tries}")

    def init(self, it: Iterate) -> Secant:
        g = _wide(it.residual)
        H = LowRank(g, self.l_thres)
        return Secant(H, H.matvec(g), unit_scale(g))

    def step(self, f: FixedPointFn, it: Iterate, state: Secant) -> tuple[Iterate, Secant]:
        z, g = _wide(it.z), _wide(it.residual)
        if self.ls:
            new_z, fz, new_g = backtrack(f, it.z, state.Hg * -self.alpha, g, self.ls_tries)
        else:
            new_z = torch.sub(z, state.Hg, alpha=self.alpha).to(it.z.dtype)
            fz = f(new_z)
            new_g = fz - new_z
        self._learn(state, _wide(new_z) - z, g, _wide(new_g), 1 + f.left)
        return Iterate(new_z, fz, new_g, x=new_z), state

    def _learn(self, state: Secant, dz: Tensor, g: Tensor, new_g: Tensor, coming: int) -> None:
        """Add the rank-one term of this step; leaves ``H g`` at the new residual."""
        H, Hg = state.H, state.Hg
        if H.make_room(coming):
            Hg = H.matvec(g)
        new_Hg = H.matvec(new_g)
        Hdg, unit = new_Hg - Hg, state.unit
        if self.update == "good":
            step = dz if unit is None else dz * unit  # the scale of v cancels
            v = H.rmatvec(step, out=H.V[H.rank])
            scale = (step * Hdg).sum(1, keepdim=True)  # = v . dg
        else:
            v = torch.sub(new_g, g, out=H.V[H.rank])
            scale = (v if unit is None else v.mul_(unit)).square().sum(1, keepdim=True)
            scale = scale if unit is None else scale / unit
        # A vanishing denominator says that nothing was learnt: the term is zero.
        u = torch.sub(dz, Hdg, out=H.U[H.rank])
        u.mul_(scale.reciprocal_().nan_to_num_(0.0, 0.0, 0.0))
        state.Hg = new_Hg.addcmul_(u, (v * new_g).sum(1, keepdim=True))
        H.extend()


def _wide(t: Tensor) -> Tensor:
    """At least single precision: learning from differences of half-precision numbers is noise."""
    return t.float() if t.dtype.itemsize < 4 else t


if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import SolverFunction

    broyden_solver: SolverFunction
