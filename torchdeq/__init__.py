"""TorchDEQ: deep equilibrium models in PyTorch."""

from torchdeq import core, utils
from torchdeq.config import DEQConfig
from torchdeq.deq import get_deq, register_deq, reset_deq
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
from torchdeq.functional import FixedPoint, fixed_point
from torchdeq.grad import Implicit, Phantom, Reversible, register_backward
from torchdeq.initial import mixed_init
from torchdeq.loss import (
    fp_correction,
    jac_correction,
    jac_reg,
    power_method,
    register_weight_func,
    spectral_radius,
)
from torchdeq.memory import mem_gc
from torchdeq.norm import (
    apply_norm,
    register_norm,
    register_norm_module,
    remove_norm,
    reset_norm,
)
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
    "DEQConfig",
    "FixedPoint",
    "Implicit",
    "Phantom",
    "Reversible",
    "Solution",
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
    "add_deq_args",
    "apply_norm",
    "core",
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
    "utils",
]
