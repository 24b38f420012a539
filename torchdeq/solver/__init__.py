"""Fixed-point solvers: one loop, many update rules."""

from torchdeq.numbers import row_norm
from torchdeq.solver import stat
from torchdeq.solver.anderson import Anderson
from torchdeq.solver.auto import Auto
from torchdeq.solver.base import SOLVERS, FixedPointFn, Iterate, Solver
from torchdeq.solver.broyden import Broyden
from torchdeq.solver.fp_iter import FixedPointIter, SimpleFixedPointIter
from torchdeq.solver.functions import (
    get_solver,
    make_solver,
    published_options,
    register_solver,
    solver_stat_from_final_step,
)
from torchdeq.solver.loop import (
    BACKWARD,
    POLICIES,
    ConvergenceError,
    ConvergenceWarning,
    Coupling,
    Solution,
    check_coupling,
    report_failures,
    solve,
)
from torchdeq.solver.newton_krylov import NewtonKrylov
from torchdeq.solver.stats import SolverStat
from torchdeq.solver.stopping import Status, StopRule

SOLVERS.seal()

__all__ = [
    "BACKWARD",
    "POLICIES",
    "SOLVERS",
    "Anderson",
    "Auto",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "Coupling",
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
    "check_coupling",
    "get_solver",
    "make_solver",
    "published_options",
    "register_solver",
    "report_failures",
    "row_norm",
    "solve",
    "solver_stat_from_final_step",
    "stat",
]
