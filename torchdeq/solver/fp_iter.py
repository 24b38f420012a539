"""Plain iteration: apply `f` repeatedly, damped or not, with or without residual checks."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, ClassVar

import torch
from torch import Tensor

from torchdeq.checks import require_damping
from torchdeq.numbers import row_norm
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Loop, Outcome, Problem, Solver
from torchdeq.trace import Trace


@SOLVERS.register("fixed_point_iter")
@dataclass(frozen=True, kw_only=True)
class FixedPointIter(Solver[None]):
    r"""Fixed-point (Picard, Banach) iteration.

    $$z^{k+1} = (1 - \tau) z^k + \tau f(z^k)$$

    Converges if `f` contracts; with enough damping, also for maps whose Jacobian has eigenvalues
    with real part below 1. The answer is the damped image.

    Args:
        tau: damping in (0, 1]; 1 is undamped.
    """

    tau: float = 1.0
    needs_contraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_damping(self.tau)

    def at(self, f: FixedPointFn, z: Tensor) -> Iterate:
        fz = f(z)
        return Iterate(z, fz, x=fz if self.tau == 1 else torch.lerp(z, fz, self.tau))

    def init(self, it: Iterate) -> None:
        return None

    def step(self, f: FixedPointFn, it: Iterate, state: None) -> tuple[Iterate, None]:
        x = it.answer
        del it  # `f` may need the memory
        return self.at(f, x), None

    @property
    def streams(self) -> bool:
        return True

    def put(self, it: Iterate, state: None, rows: Tensor, z: Tensor) -> Iterate:
        answer = it.answer.index_copy(0, rows.to(z.device), z)  # `f` may own the old tensor
        return Iterate(it.z, it.fz, x=answer)


@SOLVERS.register("simple_fixed_point_iter")
@dataclass(frozen=True, kw_only=True)
class SimpleFixedPointIter(Solver[None]):
    """Plain iteration without residual checks: the least work beside the calls of `f`.

    It spends the whole budget, reads nothing back from the device and returns the last state, good
    or bad. A recorded state is the current one. The statistics are those of the last pair
    `z, f(z)`. A state of several tensors is not packed during the iteration. Samples do not leave
    the batch.

    Args:
        tau: damping in (0, 1]; 1 is undamped.
    """

    tau: float = 1.0
    watches: ClassVar[bool] = False
    chains: ClassVar[bool] = False
    needs_contraction: ClassVar[bool] = True

    def __post_init__(self) -> None:
        require_damping(self.tau)

    def run(self, problem: Problem, loop: Loop) -> Outcome:
        f, packing = problem.f, problem.f.packed.packing
        z = fz = packing.split(problem.z0)
        recorded = {0: problem.z0} if 0 in problem.record else {}
        while f.left:
            f.spend()
            z, fz = fz, [t.detach() for t in f.packed.on_tensors(fz)]
            if self.tau != 1:
                fz = [torch.lerp(a, b, self.tau) for a, b in zip(z, fz, strict=True)]
            if f.nfe in problem.record:
                recorded[f.nfe] = packing.join(fz)
        last = packing.join(fz)
        root = problem.stop.length(last.shape[1])
        size, norm = (row_norm(t) / root for t in (last - packing.join(z), last))
        if problem.scale is not None:
            size, norm = size / problem.scale, norm / problem.scale
        n = min(f.nfe, 1)  # a budget of 0 has no residual
        trace = Trace(size[None, :][:n] / self.tau, norm[None, :][:n], [f.nfe] * n)
        return Outcome(last, [recorded.get(k, last) for k in problem.record], trace, f.nfe)


if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import SolverFunction

    fixed_point_iter: SolverFunction
    simple_fixed_point_iter: SolverFunction
