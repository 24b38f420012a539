"""Newton's method whose linear systems GMRES solves with Jacobian products."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from torchdeq.checks import require_whole
from torchdeq.linear.gmres import GMRES
from torchdeq.numbers import row_norm
from torchdeq.packed import PackedFn
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.line_search import backtrack
from torchdeq.stopping import StopRule


@dataclass
class Forcing:
    """The forcing terms of the next linear systems and the norms of their right-hand sides."""

    eta: Tensor  # (B,) relative residual to which GMRES solves the system
    size: Tensor  # (B,) |g|

    def take(self, rows: Tensor) -> Forcing:
        """Return the state of some of the samples."""
        return Forcing(self.eta[rows], self.size[rows])


@SOLVERS.register("newton_krylov")
@dataclass(frozen=True, kw_only=True)
class NewtonKrylov(Solver[Forcing]):
    r"""Inexact Newton-Krylov method for hard systems.

    $$(I - J_f(z^k))\, d = g(z^k), \qquad z^{k+1} = z^k + t\, d$$

    Each product with the Jacobian counts as one evaluation of `f`. The forcing term follows
    Eisenstat and Walker (1996), and $t$ comes from backtracking on $|g|^2$. The answer is the point
    $z$. Unlike plain iteration, the method does not need `f` to contract.

    Args:
        inner: Jacobian products per Newton step, at most.
        eta: largest relative residual accepted from GMRES.
        ls_tries: trials of the line search, at most; 1 always takes the whole step.
        jacobian: `"exact"` differentiates `f` in forward mode; `"difference"` takes a finite
            difference, for maps without forward mode (fused attention, some custom functions).
    """

    inner: int = 20
    eta: float = 0.1
    ls_tries: int = 6
    jacobian: Literal["exact", "difference"] = "exact"
    answers_point: ClassVar[bool] = True
    plans_by_budget: ClassVar[bool] = True
    options_without_jvp: ClassVar[Mapping[str, Any]] = {"jacobian": "difference"}

    def __post_init__(self) -> None:
        require_whole("inner", self.inner)
        require_whole("ls_tries", self.ls_tries)
        if not 0 < self.eta < 1:
            raise ValueError(f"eta must lie in (0, 1), got {self.eta}")
        if self.jacobian not in ("exact", "difference"):
            raise ValueError(f"jacobian must be 'exact' or 'difference', got {self.jacobian!r}")

    def init(self, it: Iterate) -> Forcing:
        size = row_norm(it.residual)
        return Forcing(torch.full_like(size, self.eta), size)

    def step(self, f: FixedPointFn, it: Iterate, state: Forcing) -> tuple[Iterate, Forcing]:
        g = it.residual
        products = min(self.inner, f.left - 1)  # the new point needs one evaluation

        def matvec(v: Tensor) -> Tensor:
            f.spend()
            return v - self._product(f.packed, it, v)

        before = f.packed.norm(g) if f.packed.spans else state.size
        # Where nothing can be read, every system gets all its products.
        goal = state.eta * before if f.reads else None
        d, _ = GMRES(restart=self.inner, confirm=False).solve(
            matvec, g, StopRule(products, tol=None), goal=goal, eps=f.packed.eps,
            peers=f.packed.peers, spans=f.packed.spans,
        )  # fmt: skip
        if not products:
            d = g  # a plain step
        z, fz, new_g = backtrack(f, it.z, d, g, self.ls_tries)
        size = f.packed.norm(new_g)
        # The more the last step reduced the residual, the more accurate the next system.
        eta = 0.9 * (size / before).square()
        floor = 0.9 * state.eta.square()  # avoids a sudden jump to a high accuracy
        eta = torch.where(floor > 0.1, torch.maximum(eta, floor), eta)
        eta = eta.nan_to_num(nan=self.eta).clamp(1e-4, self.eta)
        return Iterate(z, fz, new_g, x=z), Forcing(eta, size)

    def _product(self, f: PackedFn, it: Iterate, v: Tensor) -> Tensor:
        """Return the Jacobian of `f` at the iterate times `v`."""
        if self.jacobian == "exact":
            try:
                return f.jvp(it.z, v)
            except (NotImplementedError, RuntimeError) as error:
                raise NotImplementedError(
                    "newton_krylov differentiates f in forward mode, which failed: pass "
                    f"jacobian='difference', on the command line --f_opt jacobian=difference "
                    f"({error})"
                ) from error
        norm = f.norm(v, keepdim=True)
        scale = 1 + f.norm(it.z, keepdim=True)
        h = torch.where(norm > 0, f.eps**0.5 * scale / norm, 1.0)
        # The step length is in single precision or better; `f` gets the dtype of the state.
        return (f((it.z + h * v).to(it.z.dtype)) - it.fz) / h
