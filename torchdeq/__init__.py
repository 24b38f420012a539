"""TorchDEQ: deep equilibrium models in PyTorch."""

from torchdeq.functional import FixedPoint, fixed_point
from torchdeq.grad import Implicit, Phantom
from torchdeq.memory import mem_gc
from torchdeq.solver import (
    ConvergenceError,
    ConvergenceWarning,
    Solution,
    SolverStat,
    Status,
    StopRule,
    get_solver,
    register_solver,
    solve,
    solver_stat_from_final_step,
)

__all__ = [
    "ConvergenceError",
    "ConvergenceWarning",
    "FixedPoint",
    "Implicit",
    "Phantom",
    "Solution",
    "SolverStat",
    "Status",
    "StopRule",
    "fixed_point",
    "get_solver",
    "mem_gc",
    "register_solver",
    "solve",
    "solver_stat_from_final_step",
]
