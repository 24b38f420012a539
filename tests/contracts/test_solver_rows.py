"""Contracts of every solver that streams: samples start again while the others go on."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.solver import SOLVERS, FixedPointFn, Solver, make_solver

D = 6
STREAMING = [
    (name, options)
    for name, options in (
        ("fixed_point_iter", {}),
        ("fixed_point_iter", {"tau": 0.6}),
        ("anderson", {}),
        ("anderson", {"m": 1}),
        ("anderson", {"m": 2, "tau": 0.7}),
        ("anderson", {"m": 3, "restart": True}),
        ("anderson", {"safeguard": 1.5, "ridge": 1e-9}),
        ("anderson", {"type": 1}),
        ("anderson", {"type": 1, "m": 3, "restart": True, "safeguard": 2.0}),
        ("broyden", {}),
        ("broyden", {"l_thres": 1}),
        ("broyden", {"l_thres": 3}),
        ("broyden", {"update": "bad"}),
        ("broyden", {"update": "bad", "l_thres": 2, "alpha": 0.8}),
    )
]


def f_of(x: Tensor) -> FixedPointFn:
    W = problems.contraction(0.8, D).to(x.dtype)
    packing = Packing(torch.zeros_like(x))
    return FixedPointFn(PackedFn(packing, lambda z, x: torch.tanh(z @ W.mT + x), (x,)), 1000)


def iterates(solver: Solver[Any], x: Tensor, z0: Tensor, steps: int) -> list[Tensor]:
    """Return the points at which a solver evaluates f for one batch, without any other samples."""
    f = f_of(x)
    it = solver.at(f, z0)
    points, state = [it.z.clone()], solver.init(it)
    for _ in range(steps):
        it, state = solver.step(f, it, state)
        points.append(it.z.clone())
    return points


def test_every_solver_says_whether_it_streams() -> None:
    assert {name for name in SOLVERS if make_solver(name, {}).streams} == {
        name for name, _ in STREAMING
    }
    assert not make_solver("broyden", {"ls": True}).streams
    solver, z0 = make_solver("newton_krylov", {}), torch.zeros(1, D)
    it = solver.at(f_of(z0), z0)
    with pytest.raises(NotImplementedError, match="cannot start single samples again"):
        solver.put(it, None, torch.tensor([0]), z0)


@pytest.mark.parametrize(("name", "options"), STREAMING)
@pytest.mark.parametrize("first", [1, 2, 9])
@pytest.mark.parametrize("scale", [1.0, 1e-170])
def test_a_sample_that_is_put_goes_the_way_it_goes_alone(
    name: str, options: dict[str, Any], first: int, scale: float
) -> None:
    """Rows are replaced twice, taken and doubled in between; NaN in a row is gone with it."""
    solver = make_solver(name, options)
    x = torch.randn(5, D, dtype=torch.float64)
    starts = torch.randn(5, D, dtype=torch.float64) * scale
    x[3:] = x[3:] * scale
    f = f_of(torch.cat((x[:2], torch.full((1, D), torch.nan, dtype=torch.float64))))
    it = solver.at(f, starts[:3])
    state = solver.init(it)
    for _ in range(first):
        it, state = solver.step(f, it, state)

    def enter(rows: list[int], samples: list[int]) -> None:
        nonlocal it
        at = torch.tensor(rows)
        f.packed.args[0].index_copy_(0, at, x[samples])
        it = solver.put(it, state, at, starts[samples])

    # Row 2, which is all NaN, becomes sample 3, then row 0 becomes sample 4 in a wider batch.
    enter([2], [3])
    history = {1: [], 3: [], 4: []}  # type: dict[int, list[Tensor]]
    for _ in range(4):
        it, state = solver.step(f, it, state)
        history[1].append(it.z[1].clone())
        history[3].append(it.z[2].clone())
    rows = torch.tensor([0, 1, 2, 1, 2])
    f.packed.args = (f.packed.args[0][rows],)
    it, state = it.take(rows), None if state is None else state.take(rows)
    enter([0], [2])
    enter([3, 4], [4, 4])
    for _ in range(9):
        it, state = solver.step(f, it, state)
        for sample, row in ((1, 1), (3, 2), (4, 3)):
            history[sample].append(it.z[row].clone())
        assert torch.equal(it.z[3], it.z[4])
    for sample, begun in ((1, first), (3, -1), (4, -1)):
        alone = iterates(solver, x[[sample]], starts[[sample]], steps=len(history[sample]) + first)
        for k, point in enumerate(history[sample]):
            torch.testing.assert_close(
                point,
                alone[k + 1 + begun][0],
                atol=1e-12 * scale if sample > 2 else 1e-12,
                rtol=1e-9,
            )


def test_rows_that_are_put_and_not_evaluated_cannot_move() -> None:
    for name in ("anderson", "broyden"):
        solver = make_solver(name, {})
        f = f_of(torch.zeros(2, D))
        it = solver.at(f, torch.ones(2, D))
        state = solver.init(it)
        solver.put(it, state, torch.tensor([1]), torch.zeros(1, D))
        with pytest.raises(RuntimeError, match="before put, or after the next step"):
            state.take(torch.tensor([0]))


def test_the_memory_of_broyden_stays_bounded_while_samples_come_and_go() -> None:
    solver = make_solver("broyden", {"l_thres": 4})
    x = torch.randn(3, D)
    f = f_of(x)
    it = solver.at(f, torch.zeros(3, D))
    state = solver.init(it)
    for k in range(200):
        it = solver.put(it, state, torch.tensor([k % 3]), torch.zeros(1, D))
        it, state = solver.step(f, it, state)
    assert len(state.H.U) <= 16
