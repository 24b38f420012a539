"""The interface of torchdeq 0.1.0: solvers as functions, and functions as solvers."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdeq
from torchdeq.solver import (
    SOLVERS,
    Anderson,
    StopRule,
    get_solver,
    make_solver,
    register_solver,
    solve,
)
from torchdeq.solver.anderson import anderson_solver
from torchdeq.solver.broyden import broyden_solver
from torchdeq.solver.fp_iter import fixed_point_iter, simple_fixed_point_iter


@pytest.fixture
def _clean() -> Iterator[None]:
    before = dict(SOLVERS._entries)
    yield
    SOLVERS._entries.clear()
    SOLVERS._entries.update(before)


def test_published_import_paths_lead_to_the_same_functions() -> None:
    assert get_solver("anderson") is anderson_solver
    assert get_solver("broyden") is broyden_solver
    assert get_solver("fixed_point_iter") is fixed_point_iter
    assert get_solver("simple_fixed_point_iter") is simple_fixed_point_iter
    assert torchdeq.get_solver is get_solver
    from torchdeq.solver.stat import SolverStat

    assert SolverStat is torchdeq.SolverStat


@pytest.mark.parametrize("name", list(SOLVERS))
def test_a_solver_as_a_function(name: str) -> None:
    z, states, info = get_solver(name)(
        torch.cos, torch.zeros(2, 3), max_iter=60, tol=1e-4, stop_mode="rel", indexing=[3, 6]
    )
    torch.testing.assert_close(z, torch.full((2, 3), 0.739085), atol=1e-3, rtol=0)
    assert len(states) == 2
    assert info["abs_trace"].shape[0] == 2


def test_options_and_their_old_names() -> None:
    assert make_solver("anderson", {"m": 3, "lam": 1e-4}) == Anderson(m=3, lam=1e-4)
    assert make_solver("broyden", {"LBFGS_thres": 5}).l_thres == 5  # type: ignore[attr-defined]
    with pytest.raises(TypeError, match="'broyden' has no option 'l_tres'; did you mean 'l_thres'"):
        make_solver("broyden", {"l_tres": 5})
    with pytest.raises(TypeError, match="an option twice"):
        make_solver("broyden", {"l_thres": 5, "LBFGS_thres": 5})
    with pytest.raises(KeyError, match="unknown solver 'brojden'; did you mean 'broyden'"):
        get_solver("brojden")


def halving(func: Any, x0: Tensor, max_iter: int = 50, tol: float = 1e-3, stop_mode: str = "abs",
            **kwargs: Any) -> tuple[Tensor, list[Tensor], dict[str, Tensor]]:  # fmt: skip
    """A solver as clients of 0.1.0 write them."""
    x, states = x0, []
    for k in range(max_iter):
        x = 0.5 * x + 0.5 * func(x)
        if k + 1 in (kwargs.get("indexing") or []):
            states.append(x)
    residual = (func(x) - x).flatten(1).norm(dim=1)
    return x, states, {"abs_lowest": residual, "rel_lowest": residual, "nstep": residual}


@pytest.mark.usefixtures("_clean")
def test_a_function_of_0_1_0_is_a_solver() -> None:
    register_solver("halving", halving)
    assert get_solver("halving") is halving
    seen: list[tuple[int, ...]] = []

    def f(z: Tensor) -> Tensor:
        seen.append(tuple(z.shape))
        return torch.cos(z)

    solution = solve(
        f, torch.zeros(2, 3, 4), make_solver("halving", {}), StopRule(30, 1e-3), (4, 8, 99)
    )
    assert set(seen) == {(2, 3, 4)}  # a single tensor keeps its shape
    assert len(solution.states) == 3
    assert solution.stats.nfe == len(seen) == 31
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.z, torch.full((2, 3, 4), 0.739085), atol=1e-3, rtol=0)


@pytest.mark.usefixtures("_clean")
def test_a_function_of_0_1_0_sees_a_packed_tuple_state() -> None:
    seen: list[tuple[int, ...]] = []

    def watching(func: Any, x0: Tensor, **kwargs: Any) -> Any:
        seen.append(tuple(x0.shape))
        return halving(func, x0, **kwargs)

    register_solver("watching", watching)
    z0 = (torch.zeros(2, 3), torch.zeros(2, 2, 2))
    solution = solve(lambda a, b: (torch.cos(a), 0.5 * b + 1), z0, make_solver("watching", {}))
    assert seen == [(2, 7)]
    torch.testing.assert_close(solution.z[1], torch.full((2, 2, 2), 2.0), atol=1e-2, rtol=0)


@pytest.mark.usefixtures("_clean")
def test_a_class_registers_once_built_in_names_never() -> None:
    class Mine(Anderson): ...

    register_solver("mine", Mine)
    assert isinstance(make_solver("mine", {"m": 2}), Mine)
    with pytest.raises(ValueError, match="'anderson' is built in"):
        register_solver("anderson", halving)
    with pytest.raises(
        TypeError, match=r"a solver, unless it is a function returning .* derived from Solver"
    ):
        register_solver("nothing", 3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("_clean")
def test_a_registered_function_warns_of_failures_and_refuses_other_stop_rules() -> None:
    register_solver("halving", halving)
    solver, z0 = make_solver("halving", {}), torch.zeros(2, 3)
    with pytest.warns(torchdeq.ConvergenceWarning, match="MAX_ITER"):
        solve(torch.cos, z0, solver, StopRule(2, 1e-6))
    with pytest.raises(ValueError, match="got rtol and atol: use tol"):
        solve(torch.cos, z0, solver, StopRule(9, None, rtol=1e-3, atol=1e-3))
    with pytest.raises(ValueError, match="'halving' returns no residuals"):
        make_solver("auto", {"chain": ("halving", "anderson")})
