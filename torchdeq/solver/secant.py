"""The memory of Broyden's method: the inverse Jacobian and its product with the last residual."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import torch
from torch import Tensor

from torchdeq.numbers import row_dot, unit_scale, units_with
from torchdeq.solver.low_rank import LowRank


@dataclass
class Secant:
    """The state of Broyden's method.

    Args:
        H: the estimated inverse Jacobian.
        Hg: (B, D) its product with the last residual.
        unit: (B, 1) one over the size of the first residual, if products of two states could leave
            the range of their precision.
        fresh: the samples that begin with the next evaluation, which is no step from an earlier
            one.
    """

    H: LowRank
    Hg: Tensor
    unit: Tensor | None = None
    fresh: Tensor | None = None

    def take(self, rows: Tensor) -> Self:
        """Return the state of some of the samples."""
        if self.fresh is not None:
            raise RuntimeError("take the rows of a state before put, or after the next step")
        at = rows.to(self.Hg.device)
        unit = None if self.unit is None else self.unit[at]
        return type(self)(self.H.take(rows), self.Hg.index_select(0, at), unit)

    def put(self, rows: Tensor, z: Tensor) -> None:
        """Start some of the samples again at `z`, (n, D), with $H = -I$."""
        at = rows.to(z.device)
        self.fresh = at if self.fresh is None else torch.cat((self.fresh, at))
        self.H.put(rows)
        self.Hg.index_fill_(0, at, 0.0)  # no step: the next point is the start itself

    def make_room(self, remaining: int, g: Tensor) -> None:
        """Make room for one more term; samples with as many as allowed forget all of them.

        Args:
            remaining: terms that may still be added.
            g: (B, D) the last residual.
        """
        rows = self.H.drop_full_rows()
        if rows is not None:
            self.Hg.index_copy_(0, rows, -g.index_select(0, rows))
        if self.H.make_room(remaining):
            self.Hg = self.H.matvec(g)

    def learn(self, dz: Tensor, g: Tensor, before: Tensor | None) -> None:
        """Add the rank-one term of a step and set `Hg` to $H g$ at the new residual.

        Args:
            dz: (B, D) the step, in the free row of `U`.
            g: (B, D) the residual after it.
            before: (B, D) the residual before it, for the bad update.
        """
        fresh = self.fresh
        if fresh is not None:
            self._admit(fresh, g)
        H, unit = self.H, self.unit
        new_Hg = H.matvec(g)
        Hdg = torch.sub(new_Hg, self.Hg, out=self.Hg)
        if before is None:
            step = dz if unit is None else dz * unit  # the scale of v cancels
            v = H.rmatvec(step, out=H.V[H.rank])
            scale = row_dot(step, Hdg)  # = v . dg
        else:
            v = torch.sub(g, before, out=H.V[H.rank])
            v = v if unit is None else v.mul_(unit)
            scale = row_dot(v, v) if unit is None else row_dot(v, v) / unit
        # A zero denominator carries no information: the term becomes zero.
        factor = scale.reciprocal_().nan_to_num_(0.0, 0.0, 0.0)
        if fresh is not None:
            v.index_fill_(0, fresh, 0.0)
            factor.index_fill_(0, fresh, 0.0)
        u = dz.sub_(Hdg).mul_(factor)
        self.Hg = new_Hg.addcmul_(u, row_dot(v, g))
        self.fresh = None
        H.extend()

    def _admit(self, fresh: Tensor, g: Tensor) -> None:
        """Set the units of samples that have just begun, from their first residuals."""
        new = unit_scale(g.index_select(0, fresh))
        if new is not None or self.unit is not None:
            self.unit = units_with(self.unit, fresh, new, len(g))
