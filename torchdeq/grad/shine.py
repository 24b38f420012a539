"""SHINE: start the backward solve from the inverse Jacobian of the forward solve."""

from __future__ import annotations

from dataclasses import dataclass, fields

from torch import Tensor

from torchdeq.solver import Broyden, Iterate
from torchdeq.solver.low_rank import LowRank
from torchdeq.solver.secant import Secant


@dataclass(frozen=True, kw_only=True)
class Shine(Broyden):
    r"""Broyden's method for an adjoint system, with the forward solve's inverse Jacobian.

    After Ramzi et al. (2022): the forward solve ends with $H \approx (J - I)^{-1}$. The adjoint
    system $(J^\top - I) u + g = 0$ starts from $u_0 = -H^\top g$ with $H^\top$ as its first inverse
    Jacobian, and is solved to the same tolerance as from any other start.

    Args:
        H: the inverse Jacobian of the forward solve.
    """

    H: LowRank

    @classmethod
    def from_rule(cls, rule: Broyden, H: LowRank) -> Shine:
        """Return the rule with the inverse Jacobian of a forward solve."""
        return cls(**vars(rule), H=H)

    def without_memory(self) -> Broyden:
        """Return the rule without `H`, for systems other than those of the forward solve."""
        return Broyden(**{f.name: getattr(self, f.name) for f in fields(Broyden)})

    def start(self, g: Tensor) -> Tensor:
        """Return the first guess of the adjoint state."""
        return -self.H.rmatvec(g.to(self.H.U.dtype)).to(g.dtype)

    def init(self, it: Iterate) -> Secant:
        H = self.H.transposed(self.l_thres)
        return Secant(H, H.matvec(it.residual.to(H.U.dtype)))
