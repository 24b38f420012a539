"""The registry: suggestions, built-in names, and checks of the classes that programs register."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

import torchdeq
from torchdeq import LinearSolver, Solver, StopRule, get_deq
from torchdeq.deq import CORES, DEQBase
from torchdeq.linear import LINEAR, System
from torchdeq.registry import Registry
from torchdeq.solver import SOLVERS, FixedPointFn, Iterate


def test_an_unknown_name_gets_a_suggestion_and_the_list() -> None:
    names: Registry[int] = Registry("solver")
    names.register("anderson", 1)
    names.register("broyden", 2)
    with pytest.raises(KeyError) as error:
        names["andersen"]
    assert str(error.value) == (
        "unknown solver 'andersen'; did you mean 'anderson'? known: anderson, broyden"
    )
    with pytest.raises(KeyError, match="unknown solver 'xyz'; known: anderson, broyden"):
        names["xyz"]


def test_built_in_names_stay_and_a_users_own_name_is_replaced_with_a_warning() -> None:
    names: Registry[int] = Registry("norm")
    names.register("weight", 1)
    names.seal()
    with pytest.raises(ValueError, match="'weight' is built in"):
        names.register("weight", 2)
    names.register("mine", 3)
    with pytest.warns(UserWarning, match="'mine' was registered before"):
        names.register("mine", 4)
    assert dict(names) == {"weight": 1, "mine": 4}


def test_registers_as_a_decorator() -> None:
    names: Registry[type] = Registry("core")

    @names.register("thing")
    class Thing: ...

    assert names["thing"] is Thing
    assert len(names) == 1


@pytest.mark.parametrize("name", ["", 3, None])
def test_a_name_is_a_non_empty_string(name: object) -> None:
    with pytest.raises(TypeError, match="non-empty string"):
        Registry("solver").register(name, 1)  # type: ignore[call-overload]


class Plain(Solver[None]):
    """A solver whose author forgot the decorator."""

    def init(self, it: Iterate) -> None:
        return None

    def step(self, f: FixedPointFn, it: Iterate, state: None) -> tuple[Iterate, None]:
        return Iterate(it.fz, f(it.fz)), None


@dataclass
class Thawed(Plain): ...


@dataclass(frozen=True, kw_only=True)
class Lazy(Solver[None]):
    """A solver with neither init and step nor run."""

    def init(self, it: Iterate) -> None:
        return None


class Undecorated(torchdeq.Anderson):
    """A subclass without the decorator, which would make the annotation a field."""

    warmup: int = 3


@pytest.fixture
def _clean() -> Iterator[None]:
    yield
    for registry in (SOLVERS, LINEAR, CORES):
        for name in ("mine", "richardson"):
            registry._entries.pop(name, None)


@pytest.mark.usefixtures("_clean")
@pytest.mark.parametrize(
    ("solver", "problem"),
    [
        (Plain, "Plain is not a dataclass"),
        (Thawed, "Thawed is not frozen"),
        (Lazy, "Lazy does not define init and step, or run"),
        (Undecorated, "Undecorated is not decorated itself, so 'warmup' is not a field"),
        (int, "<class 'int'> is not derived from Solver"),
        (3, "3 is not derived from Solver"),
    ],
)
def test_registering_a_class_that_is_not_a_solver_says_what_is_wrong(
    solver: Any, problem: str
) -> None:
    with pytest.raises(TypeError) as error:
        torchdeq.register_solver("mine", solver)
    text = str(error.value)
    assert text.endswith(f"that defines init and step, or run: {problem}")
    assert "derived from Solver, decorated with @dataclass(frozen=True, kw_only=True)" in text
    assert "mine" not in SOLVERS


@pytest.mark.usefixtures("_clean")
def test_an_undecorated_solver_in_the_registry_says_so_when_it_is_built() -> None:
    SOLVERS.register("mine", Plain)
    with pytest.raises(TypeError, match="solver 'mine' cannot be built: Plain must be decorated"):
        get_deq(f_solver="mine")


@dataclass(frozen=True, kw_only=True)
class Richardson(LinearSolver):
    r"""Richardson's iteration: $x \leftarrow x + \omega (b - A x)$."""

    omega: float = 1.0

    def run(self, system: System) -> Tensor:
        x, r = system.start()
        while system.left:
            x = x + self.omega * r
            r = system.b - system.product(x)
            system.record(torch.linalg.vector_norm(r, dim=1))
        return x


@pytest.mark.usefixtures("_clean")
def test_a_registered_linear_solver_serves_the_backward_pass_by_name() -> None:
    torchdeq.register_linear_solver("richardson", Richardson)
    w = torch.ones(2, 1, dtype=torch.float64, requires_grad=True)
    deq = get_deq(ift=True, b_solver="richardson", b_solver_kwargs={"omega": 0.9}, b_max_iter=60)
    (z,), _ = deq(lambda z: 0.5 * z + w, torch.zeros(2, 1, dtype=torch.float64))
    (grad,) = torch.autograd.grad(z.sum(), w)
    torch.testing.assert_close(grad, torch.full_like(w, 2.0))
    with pytest.raises(TypeError, match="linear solver 'richardson' has no option 'omegaa'"):
        get_deq(b_solver="richardson", b_solver_kwargs={"omegaa": 1.0})
    with pytest.raises(ValueError, match="linear solver 'gmres' is built in"):
        torchdeq.register_linear_solver("gmres", Richardson)
    with pytest.raises(ValueError, match="'anderson' is a solver already"):
        torchdeq.register_linear_solver("anderson", Richardson)
    with pytest.raises(ValueError, match="'richardson' is a linear solver already"):
        torchdeq.register_solver("richardson", torchdeq.Anderson)
    for wrong, problem in ((Plain, "is not derived from"), (LinearSolver, "is not a dataclass")):
        with pytest.raises(
            TypeError, match=f"a linear solver must be .* LinearSolver, .* run: .*{problem}"
        ):
            torchdeq.register_linear_solver("mine", wrong)  # type: ignore[arg-type]


def test_registering_a_class_that_is_not_a_core_says_what_is_wrong() -> None:
    with pytest.raises(
        TypeError, match=r"called as core\(config\), .* train_states or forward: got 3"
    ):
        torchdeq.register_deq("mine", 3)  # type: ignore[arg-type]

    class Empty(DEQBase): ...

    with pytest.raises(TypeError, match="define train_states, or forward: Empty has neither"):
        torchdeq.register_deq("mine", Empty)


def test_classes_are_at_top_level() -> None:
    for name in ("Anderson", "Broyden", "FixedPointIter", "SimpleFixedPointIter", "NewtonKrylov",
                 "Auto"):  # fmt: skip
        assert issubclass(getattr(torchdeq, name), torchdeq.Solver)
    for name in ("GMRES", "BiCGStab", "Neumann"):
        assert issubclass(getattr(torchdeq, name), torchdeq.LinearSolver)
    for name in ("Implicit", "Phantom"):
        assert issubclass(getattr(torchdeq, name), torchdeq.Backward)
    solution = torchdeq.fixed_point(
        torch.cos, torch.zeros(2, 3), solver=torchdeq.Anderson(m=3), stop=StopRule(40, 1e-6),
        backward=torchdeq.Implicit(solver=torchdeq.BiCGStab()),
    )  # fmt: skip
    assert solution.stats.converged.all()
