"""Compiled functions inside a solve, and a solve inside a compiled model."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from torchdeq.deq import get_deq
from torchdeq.functional import fixed_point
from torchdeq.grad import BACKWARDS, Implicit, implicit, second_call
from torchdeq.modules import uses_compiler
from torchdeq.solver import Anderson, StopRule

STOP = StopRule(100, 1e-7)
TORCH = tuple(int(part) for part in torch.__version__.split(".")[:2])


class Cell(nn.Module):
    def __init__(self, d: int = 8) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(d, 2 * d), nn.Linear(2 * d, d)
        self.drop = nn.Dropout(0.0)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        return torch.tanh(0.5 * self.down(self.drop(torch.relu(self.up(z)))) + x)


def compiled(f: Any) -> Any:
    return torch.compile(f, backend="aot_eager")  # the compiler's autograd without its code


@pytest.fixture(autouse=True)
def _fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("how", list(BACKWARDS))
@pytest.mark.parametrize("explicit", [False, True])
def test_a_compiled_f_gives_the_gradients_of_a_plain_one(how: str, explicit: bool) -> None:
    cell, x = Cell(), torch.randn(3, 8, requires_grad=True)
    fast, solver = compiled(cell), None if how == "reversible" else Anderson()

    def gradients(f: Any) -> tuple[Tensor, ...]:
        step, args = (f, (x,)) if explicit else ((lambda z: f(z, x)), ())
        z = fixed_point(step, torch.zeros_like(x), args, solver=solver, stop=STOP,
                        backward=BACKWARDS[how](), on_failure="ignore").z  # fmt: skip
        return torch.autograd.grad(z.square().sum(), (x, *cell.parameters()))

    torch.testing.assert_close(gradients(fast), gradients(cell), rtol=1e-4, atol=1e-5)


def test_products_with_the_jacobian_leave_the_parameters_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graphs: list[tuple[Tensor, Tensor]] = []
    call = second_call.SecondCall.__call__

    def spy(self: Any, h: Tensor) -> Tensor:
        graphs.append((call(self, h), h))
        return graphs[-1][0]

    monkeypatch.setattr(second_call.SecondCall, "__call__", spy)
    cell, x = Cell(), torch.randn(3, 8, requires_grad=True)
    z = fixed_point(compiled(cell), torch.zeros_like(x), (x,), stop=STOP).z
    z.sum().backward()
    ((fz, h),) = graphs
    assert not implicit._has_inputs(fz, h)  # no leaf but h
    assert uses_compiler(compiled(cell))
    assert all(p.grad is not None for p in cell.parameters())
    assert all(isinstance(p, nn.Parameter) for p in cell._parameters.values())


def test_backward_twice_and_two_pending_forwards_of_a_compiled_f() -> None:
    cell, x = Cell(), torch.randn(3, 8, requires_grad=True)
    fast = compiled(cell)

    def run(scale: float) -> Tensor:
        u = scale * x
        return fixed_point(lambda z: fast(z, u), torch.zeros_like(x), stop=STOP).z

    first, second = run(1.0), run(2.0)
    once = torch.autograd.grad(first.sum(), x, retain_graph=True)[0]
    torch.autograd.grad(second.sum(), x)
    torch.testing.assert_close(torch.autograd.grad(first.sum(), x)[0], once)


class Model(nn.Module):
    def __init__(self, made_inside: bool) -> None:
        super().__init__()
        self.encode, self.cell, self.head = nn.Linear(8, 8), Cell(), nn.Linear(8, 2)
        self.backward = None if made_inside else Implicit(stop=STOP)

    def forward(self, x: Tensor) -> Tensor:
        u = self.encode(x)
        backward = Implicit(stop=STOP) if self.backward is None else self.backward
        z = fixed_point(lambda z: self.cell(z, u), torch.zeros_like(u), stop=STOP,
                        backward=backward).z  # fmt: skip
        return self.head(z)


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize("made_inside", [False, True])
def test_a_solve_inside_a_compiled_model_is_left_alone(backend: str, made_inside: bool) -> None:
    if made_inside and TORCH < (2, 13):
        pytest.skip("older compilers fail at frozen dataclasses that are made in their graph")
    model, x = Model(made_inside), torch.randn(3, 8)
    whole = torch.compile(model, backend=backend)
    grads = [
        torch.autograd.grad(m(x).square().sum(), list(model.parameters())) for m in (model, whole)
    ]
    torch.testing.assert_close(*grads, rtol=1e-4, atol=1e-5)


def test_the_library_imports_no_compiler() -> None:
    code = (
        "import sys, torch, torchdeq; x = torch.ones(2, 3, requires_grad=True);"
        "z = torchdeq.fixed_point(lambda z: 0.5 * z + x, torch.zeros(2, 3)).z; z.sum().backward();"
        "assert 'torch._dynamo' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_a_compiled_part_is_detected_without_a_walk_through_the_graph() -> None:
    cell, x = Cell(), torch.randn(3, 8)
    method = Cell()
    method.compile(backend="aot_eager")
    outer = nn.Sequential(nn.Linear(8, 8), method)
    fast, function = compiled(cell), compiled(torch.tanh)
    for f in (fast, lambda z: fast(z, x), method, outer, lambda z: function(cell(z, x))):
        assert uses_compiler(f)
    for f in (cell, lambda z: cell(z, x), torch.tanh):
        assert not uses_compiler(f)


def test_the_search_for_leaves_stops_at_the_first_one() -> None:
    h, weights = torch.ones(2, 3, requires_grad=True), [torch.eye(3, requires_grad=True)] * 200
    fz = h
    for w in weights:
        fz = torch.tanh(fz @ w)
    visited = 0

    class Node:
        """A node of a graph that counts its visits."""

        def __init__(self, node: Any) -> None:
            self.node = node

        def __eq__(self, other: object) -> bool:
            return isinstance(other, Node) and self.node is other.node

        def __hash__(self) -> int:
            return hash(self.node)

        @property
        def variable(self) -> Any:
            return getattr(self.node, "variable", None)

        @property
        def next_functions(self) -> list[tuple[Any, int]]:
            nonlocal visited
            visited += 1
            return [(None if n is None else Node(n), i) for n, i in self.node.next_functions]

    class Image:
        is_leaf, grad_fn = False, Node(fz.grad_fn)

    assert implicit._has_inputs(Image, h)  # type: ignore[arg-type]
    assert visited <= 4


def _closure_bound_anew(fast: Any, x: Tensor) -> Tensor:
    total = torch.zeros(())
    for _ in range(2):
        f = lambda z: fast(z, x)  # noqa: B023, E731
        z = fixed_point(f, torch.zeros_like(x), stop=STOP).z
        total, x = total + z.square().sum(), 2 * x
    return total


def _other_shape_bound(fast: Any, x: Tensor) -> Tensor:
    z = fixed_point(lambda z: fast(z, x), torch.zeros_like(x), stop=STOP).z
    x = x[:1, :3]
    return z.square().sum() + x.sum()


def _memory_overwritten(fast: Any, x: Tensor) -> Tensor:
    u = x.clone()
    z = fixed_point(lambda z: fast(z, u), torch.zeros_like(x), stop=STOP).z
    u.mul_(3)
    return z.square().sum()


def _item_exchanged(fast: Any, x: Tensor) -> Tensor:
    inputs = [x]
    z = fixed_point(lambda z: fast(z, inputs[0]), torch.zeros_like(x), stop=STOP).z
    inputs[0] = 3 * x
    return z.square().sum()


@pytest.mark.parametrize(
    "change", [_closure_bound_anew, _other_shape_bound, _memory_overwritten, _item_exchanged]
)
def test_a_change_of_what_a_compiled_f_uses_does_not_reach_its_backward_pass(change: Any) -> None:
    cell, x = Cell().double(), torch.randn(3, 8, dtype=torch.float64)
    stop = StopRule(100, 1e-12)
    grads = []
    for f in (cell, compiled(cell)):
        with pytest.MonkeyPatch.context() as patch:
            patch.setitem(globals(), "STOP", stop)
            grads.append(torch.autograd.grad(change(f, x), list(cell.parameters())))
    torch.testing.assert_close(*grads, rtol=1e-8, atol=1e-10)


@pytest.mark.parametrize("solve_by", ["deq", "fixed_point"])
def test_compiled_code_reads_statistics_of_a_solve_inside_it(solve_by: str) -> None:
    cell, x = Cell(), torch.randn(3, 8)
    deq = get_deq(f_solver="anderson", f_tol=1e-6)

    def forward(x: Tensor) -> tuple[Tensor, Tensor, int]:
        if solve_by == "deq":
            states, stats = deq(lambda z: cell(z, x), torch.zeros_like(x))
            z = states[-1]
        else:
            solution = fixed_point(lambda z: cell(z, x), torch.zeros_like(x), stop=STOP)
            z, stats = solution.z, solution.stats
        return torch.sin(z), stats["nstep"] + 1, len(stats)

    expected, got = forward(x), torch.compile(forward, backend="eager")(x)
    torch.testing.assert_close(got, expected)
