"""Fixed-point solvers: one loop, many update rules."""

from typing import TYPE_CHECKING

from torchdeq.coupling import Coupling
from torchdeq.failures import POLICIES, ConvergenceError, ConvergenceWarning, report_failures
from torchdeq.solver import stat
from torchdeq.solver.anderson import Anderson
from torchdeq.solver.auto import Auto
from torchdeq.solver.base import (
    SOLVERS,
    FixedPointFn,
    Iterate,
    Loop,
    Outcome,
    Problem,
    Solver,
    make_solver,
)
from torchdeq.solver.broyden import Broyden
from torchdeq.solver.fp_iter import FixedPointIter, SimpleFixedPointIter
from torchdeq.solver.loop import solve
from torchdeq.solver.newton_krylov import NewtonKrylov
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status, StopRule

if TYPE_CHECKING:  # published names, which torchdeq.compat.paths sets
    from torchdeq.compat.functions import (
        get_solver,
        register_solver,
        solver_stat_from_final_step,
    )

SOLVERS.seal()

__all__ = [
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
    "Loop",
    "NewtonKrylov",
    "Outcome",
    "Problem",
    "SimpleFixedPointIter",
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
