"""torchdeq 0.1.0 as a contestant; only a worker that has it first on its path imports this."""

from __future__ import annotations

from collections.abc import Callable
from importlib import import_module
from typing import Any

import torch

from benchmarks.cases import State

# By name, because in every other process these modules are the library's own.
_get_solver = import_module("torchdeq.solver").get_solver
_wrap = import_module("torchdeq.utils.layer_utils").deq_decorator

NAMES = ["fixed_point_iter", "simple_fixed_point_iter", "anderson", "broyden"]
STOPPING = [name for name in NAMES if name != "simple_fixed_point_iter"]


@torch.no_grad()
def solve(
    f: Callable[..., State], z0: State, solver: str, calls: int, tol: float
) -> tuple[State, dict[str, Any]]:
    """Solve within ``calls`` evaluations, or until the relative residual is ``tol``."""
    func, z = _wrap(f, z0, no_stat=False)  # a tuple state is packed into vectors
    max_iter = calls - 1 if solver == "broyden" else calls  # its first evaluation is not counted
    z, _, stats = _get_solver(solver)(func, z, max_iter=max_iter, tol=tol, stop_mode="rel")
    return (tuple(func.vec2list(z)) if isinstance(z0, tuple) else z), stats
