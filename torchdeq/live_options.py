"""Options as attributes of a module: each acts from the next call on, or raises."""

from __future__ import annotations

from collections.abc import Mapping
from numbers import Real
from typing import Any

from torch import nn

from torchdeq.compat.functions import (
    SolverFunction,
    function_solver,
    get_solver,
    published_options,
)
from torchdeq.config import DEQConfig
from torchdeq.grad import make_adjoint_solver, make_backwards
from torchdeq.solver import SOLVERS, Solver, make_solver

#: Options that a call of a module does not read, each with the reason.
_ELSEWHERE = {
    "core": "it is the class of the module",
    **{name: "norms are applied to a model by apply_norm" for name in DEQConfig.names()
       if name.startswith(("norm_", "sn_"))},
    **dict.fromkeys(("gamma", "jac_loss_weight", "jac_loss_freq", "jac_incremental"),
                    "it belongs to the loss, which the program computes"),
}  # fmt: skip
_OPTIONS = frozenset(DEQConfig.names())


class LiveOptions(nn.Module):
    """A module whose options can be read and set as attributes: `deq.f_max_iter = 60`.

    Args:
        config: the options to begin with.
    """

    f_max_iter: int
    b_max_iter: int
    f_tol: float
    b_tol: float
    f_stop_mode: str
    b_stop_mode: str
    eval_f_max_iter: int

    #: Whether a value that is not valid for an option may still be an attribute of its name: a core
    #: with a `forward` of its own reads its own attributes, whatever their names are.
    _own_attributes = False

    def __init__(self, config: DEQConfig) -> None:
        super().__init__()
        self.args = config
        self.eval_f_max_iter = config.budget_in_evaluation
        self._own_solver: SolverFunction | None = None
        self._refused: dict[str, Exception] = {}  # attributes that cannot be options, with reasons
        self._now = self._checked(config)

    @property
    def config(self) -> DEQConfig:
        """Return the current options."""
        return self._now

    def __setattr__(self, name: str, value: Any) -> None:
        if name not in _OPTIONS or "_now" not in self.__dict__ or name in ("f_solver", "b_solver"):
            super().__setattr__(name, value)
        elif not self._own_attributes:
            self._set_option(name, value)
        else:
            self._refused.pop(name, None)
            try:
                self._set_option(name, value)
            except (AttributeError, TypeError, ValueError) as error:
                if name not in _ELSEWHERE:
                    self._refused[name] = error  # raised by a call that would read the option
            super().__setattr__(name, value)

    def __getattr__(self, name: str) -> Any:
        if name in _OPTIONS and "_now" in self.__dict__:
            return getattr(self._now, name)
        return super().__getattr__(name)

    def _set_option(self, name: str, value: Any) -> None:
        """Change an option from the next call on, or raise."""
        if name in _ELSEWHERE:
            raise AttributeError(
                f"option {name!r} cannot be changed on a module ({_ELSEWHERE[name]}): build a new "
                f"one, get_deq(deq.config, {name}=...)"
            )
        if name == "eval_f_max_iter":  # 0 is a budget here, not the absence of the option
            self.__dict__[name] = budget = whole_budget(value)
            if budget:
                self._now = self._checked(self._now.with_options(eval_f_max_iter=budget))
            return
        self._now = self._checked(self._now.with_options(**{name: value}))
        if name == "eval_factor" and not self._now.eval_f_max_iter:
            self.__dict__["eval_f_max_iter"] = int(self._now.f_max_iter * self._now.eval_factor)

    def _checked(self, config: DEQConfig) -> DEQConfig:
        """Return `config`; raise for names and values that no call could use."""
        make_solver(config.f_solver, config.f_solver_kwargs)
        make_adjoint_solver(config.b_solver, config.b_solver_kwargs)
        make_backwards(config, len(config.grad))
        self.check_states(config, config.f_max_iter)
        return config

    def check_states(self, config: DEQConfig, budget: int) -> None:
        """Raise `ValueError` if training cannot return the states that the options ask for."""
        return

    @property
    def f_solver(self) -> SolverFunction:
        """Return the forward solver as a function; a program may assign a name or a function."""
        return self._own_solver or get_solver(self._now.f_solver)

    @f_solver.setter
    def f_solver(self, solver: str | SolverFunction) -> None:
        if isinstance(solver, str):
            self._set_option("f_solver", solver)
            self._own_solver = None
        elif callable(solver) and not isinstance(solver, type):
            self._own_solver = solver
        else:
            raise TypeError(f"f_solver must be a name or a function, got {solver!r}")

    @property
    def b_solver(self) -> SolverFunction | str:
        """Return the backward solver as a function, or the name of a linear solver.

        A program may assign a name, or the function of a registered solver.
        """
        name = self._now.b_solver
        return get_solver(name) if name in SOLVERS else name

    @b_solver.setter
    def b_solver(self, solver: str | SolverFunction) -> None:
        keys = (key for key in SOLVERS if get_solver(key) is solver)
        name = solver if isinstance(solver, str) else next(keys, None)
        if name is None:
            raise TypeError(
                f"b_solver must be the name of a solver or a registered function, got {solver!r}: "
                "call register_solver first"
            )
        self._set_option("b_solver", name)

    def make_solver(self, options: Mapping[str, Any]) -> Solver[Any]:
        """Return the forward solver with the options of one call.

        An option of another solver of torchdeq 0.1.0 has no effect, as in 0.1.0, and a note says
        so; any other unknown option is an error.
        """
        for name in ("tol", "max_iter", "stop_mode"):
            if name in options or name in self._now.f_solver_kwargs:
                raise TypeError(
                    f"{name!r} is not an option of a solver: pass f_{name} to get_deq, or set it "
                    f"on the module, deq.f_{name} = ..."
                )
        if self._own_solver is not None:
            return function_solver(self._own_solver, {**self._now.f_solver_kwargs, **options})
        key = self._now.f_solver
        return make_solver(key, {**self._now.f_solver_kwargs, **published_options(key, options)})

    def extra_repr(self) -> str:
        changed = {k: v for k, v in self.args.defaults().items() if getattr(self.config, k) != v}
        return ", ".join(f"{k}={getattr(self.config, k)!r}" for k in changed)


def whole_budget(budget: Any) -> int:
    """Return a budget of evaluations as an integer; raise `ValueError` unless it is whole, >= 0."""
    number = float(budget) if isinstance(budget, Real) else -1.0
    if not (number.is_integer() and number >= 0):
        raise ValueError(f"a budget of evaluations must be a whole number >= 0, got {budget!r}")
    return int(number)
