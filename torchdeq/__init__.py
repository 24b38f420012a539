"""TorchDEQ: deep equilibrium models in PyTorch."""

import sys
import warnings
from importlib import import_module
from typing import TYPE_CHECKING, Any

from torchdeq import core, diagnostics, experimental, stream, utils
from torchdeq._version import __version__
from torchdeq.compat import paths as _paths  # noqa: F401  (sets published import paths)
from torchdeq.compat.functions import get_solver, register_solver, solver_stat_from_final_step
from torchdeq.config import DEQConfig
from torchdeq.deq import get_deq, register_deq, reset_deq
from torchdeq.diagnostics import doctor
from torchdeq.dropout import (
    VariationalDropout,
    VariationalDropout1d,
    VariationalDropout2d,
    VariationalDropout3d,
    VariationalDropToken1d,
    VariationalDropToken2d,
    VariationalDropToken3d,
    reset_dropout,
)
from torchdeq.flags import add_deq_args
from torchdeq.functional import fixed_point
from torchdeq.grad import Backward, Implicit, Phantom, register_backward
from torchdeq.initial import mixed_init
from torchdeq.linear import GMRES, BiCGStab, LinearSolver, Neumann, register_linear_solver
from torchdeq.loss import (
    fp_correction,
    jac_correction,
    jac_reg,
    power_method,
    register_weight_func,
    spectral_radius,
)
from torchdeq.memory import mem_gc
from torchdeq.monitoring import watch
from torchdeq.norm import (
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)
from torchdeq.solution import FixedPoint
from torchdeq.solver import (
    Anderson,
    Auto,
    Broyden,
    ConvergenceError,
    ConvergenceWarning,
    FixedPointIter,
    NewtonKrylov,
    SimpleFixedPointIter,
    Solver,
    SolverStat,
    Status,
    StopRule,
    solve,
)
from torchdeq.warm_starts import WarmStarts

if TYPE_CHECKING:
    from torchdeq import export

__all__ = [
    "GMRES",
    "Anderson",
    "Auto",
    "Backward",
    "BiCGStab",
    "Broyden",
    "ConvergenceError",
    "ConvergenceWarning",
    "DEQConfig",
    "FixedPoint",
    "FixedPointIter",
    "Implicit",
    "LinearSolver",
    "Neumann",
    "NewtonKrylov",
    "Phantom",
    "SimpleFixedPointIter",
    "Solver",
    "SolverStat",
    "Status",
    "StopRule",
    "VariationalDropToken1d",
    "VariationalDropToken2d",
    "VariationalDropToken3d",
    "VariationalDropout",
    "VariationalDropout1d",
    "VariationalDropout2d",
    "VariationalDropout3d",
    "WarmStarts",
    "__version__",
    "add_deq_args",
    "apply_norm",
    "core",
    "diagnostics",
    "doctor",
    "experimental",
    "export",
    "fixed_point",
    "fp_correction",
    "get_deq",
    "get_solver",
    "jac_correction",
    "jac_reg",
    "mem_gc",
    "mixed_init",
    "power_method",
    "register_backward",
    "register_deq",
    "register_linear_solver",
    "register_norm",
    "register_norm_module",
    "register_solver",
    "register_weight_func",
    "remove_norm",
    "reset_deq",
    "reset_dropout",
    "reset_norm",
    "solve",
    "solver_stat_from_final_step",
    "spectral_radius",
    "stream",
    "utils",
    "watch",
]


#: Former names, each with the module and the name that replace it; using one warns.
_DEPRECATED = {
    "Reversible": (experimental, "Reversible"),
    "Solution": (sys.modules[__name__], "FixedPoint"),
}


def __getattr__(name: str) -> Any:
    if name == "export":  # loaded when it is used: it imports the compiler of torch
        return import_module("torchdeq.export")
    if name not in _DEPRECATED:
        raise AttributeError(f"module 'torchdeq' has no attribute {name!r}")
    module, new = _DEPRECATED[name]
    warnings.warn(
        f"torchdeq.{name} is now {module.__name__}.{new}; version 0.4 removes the old name",
        DeprecationWarning,
        stacklevel=2,
    )
    return getattr(module, new)
