"""Fixed-point solvers: one loop, many update rules."""

from torchdeq.solver import stat
from torchdeq.solver.anderson import Anderson
from torchdeq.solver.auto import Auto
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.broyden import Broyden
from torchdeq.solver.fp_iter import FixedPointIter, SimpleFixedPointIter
from torchdeq.solver.functions import (
    get_solver,
    make_solver,
    register_solver,
    solver_stat_from_final_step,
)
from torchdeq.solver.loop import (
    POLICIES,
    ConvergenceError,
    ConvergenceWarning,
    Solution,
    report_failures,
    solve,
)
from torchdeq.solver.newton_krylov import NewtonKrylov
from torchdeq.solver.stats import SolverStat
from torchdeq.solver.stopping import Status, StopRule

SOLVERS.seal()

__all__ = [
    "POLICIES",
    "SOLVERS",
    "Anderson",
    "Auto",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "FixedPointFn",
    "FixedPointIter",
    "Iterate",
    "NewtonKrylov",
    "SimpleFixedPointIter",
    "Solution",
    "Solver",
    "SolverStat",
    "Status",
    "StopRule",
    "get_solver",
    "make_solver",
    "register_solver",
    "report_failures",
    "solve",
    "solver_stat_from_final_step",
    "stat",
]
