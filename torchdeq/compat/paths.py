"""Published import paths of torchdeq 0.1.0 that end in a function.

Modules that exist for an import path alone (`torchdeq.core`, `torchdeq.utils`, `torchdeq.solver
.stat`, `torchdeq.norm.weight_norm`, ...) are files that re-export. The names below belong to
modules with code that `torchdeq.compat` imports. This module sets them, because those modules
cannot import `torchdeq.compat` in turn.
"""

from __future__ import annotations

from torchdeq import grad, solver
from torchdeq.compat.backward import backward_factory
from torchdeq.compat.functions import get_solver, register_solver, solver_stat_from_final_step
from torchdeq.solver import anderson, broyden, fp_iter

for _module, _name, _value in (
    (solver, "get_solver", get_solver),
    (solver, "register_solver", register_solver),
    (solver, "solver_stat_from_final_step", solver_stat_from_final_step),
    (anderson, "anderson_solver", get_solver("anderson")),
    (broyden, "broyden_solver", get_solver("broyden")),
    (fp_iter, "fixed_point_iter", get_solver("fixed_point_iter")),
    (fp_iter, "simple_fixed_point_iter", get_solver("simple_fixed_point_iter")),
    (grad, "backward_factory", backward_factory),
):
    setattr(_module, _name, _value)
