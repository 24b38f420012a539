"""SHINE: the backward solve starts from what the forward solve has learnt about the Jacobian."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from torchdeq.solver import Broyden, Iterate
from torchdeq.solver.broyden import Secant
from torchdeq.solver.low_rank import LowRank


@dataclass(frozen=True, kw_only=True)
class Shine(Broyden):
    r"""Broyden's method on an adjoint system, from the inverse of the forward one (Ramzi et al.,
    2022).

    The forward solve leaves :math:`H \approx (J - I)^{-1}`; the adjoint system
    :math:`(J^\top - I) u + g = 0` starts from :math:`u_0 = -H^\top g` and goes on with
    :math:`H^\top` as its first inverse Jacobian, so the answer is as exact as the tolerance says.

    Args:
        H: of the forward solve.
    """

    H: LowRank

    @classmethod
    def after(cls, rule: Broyden, H: LowRank) -> Shine:
        """Return the rule with the inverse Jacobian of a forward solve."""
        return cls(**vars(rule), H=H)

    def without_memory(self) -> Broyden:
        """Return the rule alone, for systems that are not those of the forward solve."""
        return Broyden(**{f.name: getattr(self, f.name) for f in fields(Broyden)})

    def start(self, g: Tensor) -> Tensor:
        """Return the first guess of the adjoint state."""
        return -self.H.rmatvec(g.to(self.H.U.dtype)).to(g.dtype)

    def init(self, it: Iterate) -> Secant:
        H = self.H.transposed(self.l_thres)
        return Secant(H, H.matvec(it.residual.to(H.U.dtype)))
