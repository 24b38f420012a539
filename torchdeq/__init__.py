"""TorchDEQ: deep equilibrium models in PyTorch."""

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
    "Solution",
    "SolverStat",
    "Status",
    "StopRule",
    "get_solver",
    "register_solver",
    "solve",
    "solver_stat_from_final_step",
]
