"""The ledger: the same decisions as numbers and as tensors, and best states in reused buffers."""

from __future__ import annotations

from math import inf, nan

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from benchmarks.gauge import peak_bytes
from torchdeq.solver import Anderson, Broyden, FixedPointIter, Iterate, StopRule, solve
from torchdeq.solver.best_states import BestStates
from torchdeq.solver.few_judge import FewJudge
from torchdeq.solver.judge import Judge

RULES = [
    StopRule(40, 1e-3),
    StopRule(40, 1e-3, "rel"),
    StopRule(40, None, rtol=1e-3, atol=1e-6),
    StopRule(40, 0.0, "rel"),
]
NUMBERS = st.sampled_from((0.0, 1e-12, 1e-9, 1e-4, 1e-3, 0.5, 3.0, 1e30, 3e38, inf, nan))


def block(rows: list[list[tuple[float, float]]], every: int, dtype: torch.dtype) -> list[Tensor]:
    """Return residuals of iterates (N, b, 2) as the blocks of their checks, (2, K, b)."""
    values = torch.tensor(rows, dtype=dtype).permute(2, 0, 1)
    return list(values.split(every, dim=1))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("shared", [False, True])
@pytest.mark.parametrize("stop", RULES, ids=str)
@given(
    rows=st.lists(st.lists(st.tuples(NUMBERS, NUMBERS), min_size=3, max_size=3), max_size=9),
    every=st.integers(1, 3),
)
def test_numbers_and_tensors_decide_alike(
    rows: list[list[tuple[float, float]]],
    every: int,
    stop: StopRule,
    shared: bool,
    dtype: torch.dtype,
) -> None:
    if not rows:
        return
    judges = [
        kind(stop, torch.full((3,), inf, dtype=dtype), lambda: 1e-7, shared)
        for kind in (Judge, FewJudge)
    ]
    for values in block(rows, every if stop.goal else 1, dtype):
        picks = [
            [(k, None if b is None else b.tolist()) for k, b in judge.update(values)]
            for judge in judges
        ]
        assert picks[0] == picks[1]
        assert judges[0].running == judges[1].running
        assert torch.equal(judges[0].unfinished(), judges[1].unfinished())
    stalled = [None if judge.stalled is None else judge.stalled.tolist() for judge in judges]
    assert stalled[0] == stalled[1]
    for a, b in zip(*(judge.scores for judge in judges), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("lasts", [0, 1, 3])
def test_a_state_in_a_buffer_is_copied_before_the_solver_writes_there(lasts: int) -> None:
    best, buffer = BestStates(torch.zeros(2, 3)), torch.ones(2, 3)
    best.pass_step()
    best.adopt(Iterate(buffer, buffer, fresh=False, lasts=lasts))
    best.copy_expired()
    for _ in range(lasts):
        assert best.z.data_ptr() == buffer.data_ptr() or lasts == 0
        best.pass_step()
        best.copy_expired()
    buffer.fill_(7.0)
    assert torch.equal(best.z, torch.ones(2, 3))


def test_a_snapshot_does_not_change_with_later_states() -> None:
    best, states = BestStates(torch.zeros(2, 5_000)), torch.ones(2, 5_000)
    for flags in ([True, False], [False, True]):
        best.replace_some(torch.tensor(flags), Iterate(states, states))
        snapshot = best.snapshot()
        before = snapshot.clone()
        best.replace_some(torch.tensor(flags), Iterate(states, 5 * states))
        assert torch.equal(snapshot, before)


@pytest.mark.parametrize("every", [1, 5, 12])
@pytest.mark.parametrize("solver", [Anderson(m=3), Anderson(m=1), Broyden(), FixedPointIter()])
@pytest.mark.parametrize("parts", [1, 2])
@pytest.mark.parametrize("size", [8, 6_000])
def test_the_best_state_survives_a_divergence_in_reused_buffers(
    size: int, parts: int, solver: Anderson, every: int
) -> None:
    """The map contracts for a few evaluations and then moves its point further each time."""
    calls, x = 0, torch.rand(2, size)

    def f(*z: Tensor) -> Tensor | tuple[Tensor, ...]:
        nonlocal calls
        calls += 1
        near = [torch.cos(0.8 * t.roll(1, 1) + x) for t in z]
        images = tuple(n if calls <= 4 else t + 10.0 * calls for n, t in zip(near, z, strict=True))
        return images[0] if parts == 1 else images

    z0 = torch.zeros(2, size) if parts == 1 else tuple(torch.zeros(2, size) for _ in range(parts))
    stop = StopRule(12, 1e-12, check_every=every)
    first = solve(f, z0, solver, StopRule(4, 1e-12, check_every=every), on_failure="ignore")
    calls = 0
    whole = solve(f, z0, solver, stop, on_failure="ignore")
    assert calls == 12
    for a, b in zip(*(s.z if parts > 1 else (s.z,) for s in (first, whole)), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize(
    ("solver", "more"), [(FixedPointIter(), 0), (Anderson(), 12), (Broyden(l_thres=10), 22)]
)
@pytest.mark.parametrize("tol", [0.0, 1e-12])
def test_a_solve_holds_few_states_beside_those_of_the_map(
    solver: FixedPointIter | Anderson | Broyden, more: int, tol: float
) -> None:
    x = torch.rand(2, 600_000)

    def f(z: Tensor) -> Tensor:
        shifted = torch.roll(z, 1, 1)
        return torch.cos(0.9 * shifted + x)  # four states, with z

    stop, z0 = StopRule(14, tol), torch.zeros_like(x)
    bare = peak_bytes(lambda: f(f(f(z0))))
    peak = peak_bytes(lambda: solve(f, z0, solver, stop, on_failure="ignore"))
    assert peak <= bare + (more + 0.2) * x.nbytes
