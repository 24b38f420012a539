"""Two custom solvers, chosen on the command line like the built-in ones.

    python examples/custom_solver.py --f_solver heavy_ball --f_opt beta=0.5

`heavy_ball` is an update rule: the library's loop counts, stops and keeps the best state.
`averaged` is a function in the interface of torchdeq 0.1.0, which counts, stops and records itself.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from torchdeq import (
    SolverStat,
    add_deq_args,
    get_deq,
    register_solver,
    solver_stat_from_final_step,
)
from torchdeq.solver import FixedPointFn, Iterate, Solver


@dataclass(frozen=True, kw_only=True)
class HeavyBall(Solver[Iterate]):
    r"""Iteration with momentum (Polyak, 1964).

    $$z^{k+1} = f(z^k) + \beta (z^k - z^{k-1})$$

    Args:
        beta: momentum in [0, 1).
    """

    beta: float = 0.3

    def init(self, it: Iterate) -> Iterate:
        return it

    def step(self, f: FixedPointFn, it: Iterate, last: Iterate) -> tuple[Iterate, Iterate]:
        z = it.fz + self.beta * (it.z - last.z)  # (B, D), whatever the structure of the state
        return Iterate(z, f(z)), it


def averaged(
    func: Callable[[Tensor], Tensor],
    x0: Tensor,
    max_iter: int = 50,
    tol: float = 1e-3,
    stop_mode: str = "abs",
    indexing: Sequence[int] = (),
    **options: Any,
) -> tuple[Tensor, list[Tensor], SolverStat]:
    """Solve by Krasnoselskij's iteration: go half of the way to the image."""
    z, states = x0, []
    for k in range(1, max_iter + 1):
        fz = func(z)
        last, z = z, (z + fz) / 2
        if k in indexing:
            states.append(z)
        info = solver_stat_from_final_step(last, fz, nstep=k)
        if float(info[f"{stop_mode}_lowest"].max()) < tol:
            break
    return z, states, info


def main(argv: Sequence[str] | None = None) -> None:
    register_solver("heavy_ball", HeavyBall)
    register_solver("averaged", averaged)
    parser = argparse.ArgumentParser(description=__doc__)
    add_deq_args(parser)
    parser.set_defaults(f_solver="heavy_ball", f_max_iter=200, f_tol=1e-5)
    args = parser.parse_args(argv)

    torch.manual_seed(0)
    A = torch.randn(32, 32)
    W = 0.95 * (A + A.mT) / torch.linalg.matrix_norm(A + A.mT, 2)
    x = 0.1 * torch.randn(8, 32)
    chosen = (args.f_solver, args.f_solver_kwargs)
    for name, options in (chosen, ("averaged", {}), ("fixed_point_iter", {}), ("anderson", {})):
        deq = get_deq(args, f_solver=name, f_solver_kwargs=options).eval()
        _, stats = deq(lambda z: torch.tanh(z @ W + x), torch.zeros_like(x))
        print(f"{name:18s}{stats.summary()}")


if __name__ == "__main__":
    main()
