"""Registered solvers by name, as the contract tests run them."""

from __future__ import annotations

from typing import Any

from torchdeq.solver import SOLVERS, StopRule, make_solver, solve

NAMES = list(SOLVERS)
WATCHING = [name for name in NAMES if SOLVERS[name].watches]


def run(name: str, f: Any, z0: Any, stop: StopRule, options: Any = None, **kwargs: Any) -> Any:
    """Solve with a solver by its name; failures are ignored unless the caller says otherwise."""
    kwargs.setdefault("on_failure", "ignore")
    return solve(f, z0, make_solver(name, options or {}), stop, **kwargs)
