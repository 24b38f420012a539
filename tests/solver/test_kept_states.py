"""Which state a solve keeps: scripted residuals through the loop, against the contract retyped.

A script gives every sample a sequence of residuals, also NaN, infinity, zero and numbers whose
squares leave the range. The state of iterate `k` is filled with `k`, so the answer of a solve says
which iterate it kept.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import inf, nan
from random import Random
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from torch import Tensor

from benchmarks.accelerator import DeviceTensor, Meter
from torchdeq.distributed.peers import ALONE
from torchdeq.packed import PackedFn
from torchdeq.solver import FixedPointIter, Iterate, StopRule, host_ledger, solve
from torchdeq.solver.base import FixedPointFn, Outcome, Problem, Solver
from torchdeq.solver.loop import iterate
from torchdeq.solver.shared_score import FewSharedScore, SharedScore
from torchdeq.stats import SolverStat
from torchdeq.stopping import Status

VALUES = (0.0, 1e-45, 1e-30, 1e-9, 1e-4, 1e-3, 2e-3, 0.5, 0.5, 1.0, 3.0, 1e10, 1e25, 8e37, inf, nan)
SEEDS = 40  # cases per test
SLOW = range(SEEDS, 10 * SEEDS, SEEDS)
ROOT = 3.0  # of the numbers in a sample: exact, so that norms are, too


class Rows:
    """The state of a solver that needs none, but whose samples may leave the batch."""

    def take(self, rows: Tensor) -> Rows:
        return self


class ScriptedMap(FixedPointFn):
    """The count of evaluations, and the samples that are still in the batch."""

    rows: Tensor | None = None

    def keep(self, rows: Tensor) -> None:
        self.rows = rows if self.rows is None else self.rows[rows]


class Scripted(Solver[Rows]):
    """A rule that returns given iterates, with answers in reused buffers if there are any."""

    def __init__(self, script: list[Iterate], gives_g: bool, buffers: Tensor | None) -> None:
        self.script, self.gives_g, self.buffers = script, gives_g, buffers

    def at(self, f: FixedPointFn, z: Tensor) -> Iterate:
        it, slot = self.script[f.nfe], f.nfe
        f.spend()
        rows = cast(ScriptedMap, f).rows
        it = it if rows is None else it.take(rows)
        if self.gives_g:
            it = it._replace(g=it.residual)
        if self.buffers is None or rows is not None:
            return it
        answer = self.buffers[slot % len(self.buffers)].copy_(it.answer)
        return it._replace(x=answer, fresh=False, lasts=len(self.buffers) - 1)

    def init(self, it: Iterate) -> Rows:
        return Rows()

    def step(self, f: FixedPointFn, it: Iterate, state: Rows) -> tuple[Iterate, Rows]:
        return self.at(f, it.z), state


@dataclass
class Case:
    """One solve with scripted residuals."""

    stop: StopRule
    sizes: list[list[float]]  # N times b
    norms: list[list[float]]
    dtype: torch.dtype
    shared: bool
    compact: bool
    record: tuple[int, ...]
    scale: Tensor | None  # (b,)
    gives_g: bool
    slots: int  # buffers of the solver; 0 for none

    @classmethod
    def draw(cls, seed: int) -> Case:
        rng = Random(seed)
        b, n = rng.choice((1, 2, 5, 64, 65)), rng.choice((1, 2, 7, 20))
        tol, mode = rng.choice((0.0, 1e-3, 1e-9)), rng.choice(("abs", "rel", "joint"))
        options: dict[str, Any] = {
            "check_every": rng.choice((1, 3, 5, "auto")),
            "return_final": rng.random() < 0.15,
            "norm": rng.choice(("l2", "rms")),
        }
        if mode == "joint":
            stop = StopRule(n, None, rtol=tol, atol=tol, **options)
        else:
            stop = StopRule(n, tol, mode, **options)
        shared = rng.random() < 0.3
        dtype = rng.choice((torch.float32, torch.float64, torch.bfloat16))
        ordinary = rng.random() < 0.5
        values = VALUES[3:-2] if ordinary else VALUES
        sizes, norms = ([[rng.choice(values) for _ in range(b)] for _ in range(n)] for _ in "gf")
        scale = torch.tensor([rng.choice((1.0, 0.5, 4.0)) for _ in range(b)])
        return cls(
            stop, sizes, norms, dtype, shared,
            compact=bool(stop.goal) and not shared and rng.random() < 0.4,
            record=tuple(rng.sample(range(n + 3), 2)) if rng.random() < 0.4 else (),
            scale=scale.to(torch.promote_types(dtype, torch.float32))
            if rng.random() < 0.3
            else None,
            gives_g=rng.random() < 0.5,
            slots=rng.choice((0, 0, 1, 3)),
        )  # fmt: skip

    def iterates(self) -> list[Iterate]:
        """Return iterates with these residuals and images, whose answers are their numbers."""
        its = []
        for k, rows in enumerate(zip(self.sizes, self.norms, strict=True)):
            z, fz = (torch.zeros(len(rows[0]), int(ROOT**2), dtype=self.dtype) for _ in "zf")
            fz[:, 0] = z[:, 0] = torch.tensor(rows[1], dtype=self.dtype)
            z[:, 1] = torch.tensor(rows[0], dtype=self.dtype)
            its.append(Iterate(z, fz, x=torch.full_like(z, k)))
        return its

    def run(self, simulated: bool = False) -> tuple[Outcome, SolverStat, Meter]:
        """Return the outcome of the loop, with statistics in the memory of the host."""
        meter, its = Meter(simulated), self.iterates()
        put = meter.put
        script = [Iterate(put(it.z), put(it.fz), x=put(it.answer)) for it in its]
        start = meter.put(torch.full_like(its[0].z, -1.0))
        buffers = meter.put(torch.zeros(self.slots, *start.shape, dtype=self.dtype))
        reads = bool(self.stop.goal) or not simulated
        # A precision of 0: nothing stalls.
        f = ScriptedMap(
            cast(PackedFn, SimpleNamespace(eps=0.0, peers=ALONE, spans=False)),
            self.stop.max_iter,
            reads,
        )
        scale = None if self.scale is None else meter.put(self.scale)
        problem = Problem(
            f, start, self.stop, self.record, self.compact, scale=scale, shared=self.shared
        )
        with meter, torch.no_grad():
            solver = Scripted(script, self.gives_g, buffers if self.slots else None)
            outcome = iterate(solver, problem)
            stats = SolverStat.from_trace(outcome.trace, self.stop, outcome.nfe, 0.0)
            values = {key: on_host(value) for key, value in stats.items()}
            status = on_host(stats.status)
        outcome.z, *outcome.states = (on_host(t)[:, 0] for t in (outcome.z, *outcome.states))
        return outcome, SolverStat(values, nfe=outcome.nfe, status=status), meter


def on_host(t: Tensor) -> Tensor:
    """Return the values of a tensor that may be on the simulated device."""
    return t.data_on_host if isinstance(t, DeviceTensor) else t


def kept(case: Case, n: int) -> list[tuple[int, Status | None]]:
    """Return which of the first `n` iterates each sample keeps, and the status in which it ends.

    The number -1 is the start. None is a spent budget, whether the residual grew or not.
    """
    pairs = [
        (it.residual.double().abs().sum(1), it.fz.double().abs().sum(1)) for it in case.iterates()
    ]
    dtype = torch.promote_types(case.dtype, torch.float32)
    divisor = (ROOT if case.stop.norm == "rms" else 1.0) * (
        1.0 if case.scale is None else case.scale
    )
    rows = [case.stop.measure(*(t.to(dtype) / divisor for t in pair)).tolist() for pair in pairs]
    goal = float(torch.tensor(case.stop.goal, dtype=dtype))
    answers: list[tuple[int, Status | None]] = []
    for values in zip(*rows[:n], strict=True):
        best, lowest, status = -1, inf, None
        for k, value in enumerate(values):
            if value < lowest:
                best, lowest = k, value
            if goal and value <= goal:
                status = Status.CONVERGED
            elif goal and not value < inf:
                status = Status.NONFINITE
            if status is not None:
                break
        if not values[-1] < inf and not goal:
            status = Status.NONFINITE
        answers.append((n - 1 if case.stop.return_final else best, status))
    return answers


@pytest.mark.parametrize("simulated", [False, True], ids=["host", "device"])
@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_each_sample_keeps_its_first_state_within_the_tolerance_or_its_best(
    first: int, simulated: bool
) -> None:
    for seed in range(first, first + SEEDS):
        case = Case.draw(seed)
        case.shared = False
        outcome, stats, meter = case.run(simulated)
        answers = kept(case, case.stop.max_iter)
        assert outcome.z.tolist() == [k for k, _ in answers], case
        assert stats["nstep"].tolist() == [k + 1 for k, _ in answers], case
        unfinished = (Status.MAX_ITER, Status.DIVERGED)
        for code, (_, status) in zip(stats.status.tolist(), answers, strict=True):
            assert code == status or (status is None and code in unfinished), case
        for k, state in zip(case.record, outcome.states, strict=True):
            earlier = kept(case, min(k, case.stop.max_iter)) if k else [(-1, None)] * len(state)
            assert state.tolist() == [best for best, _ in earlier], (case, k)
        assert case.stop.goal or not simulated or not meter.tally.reads, case


@pytest.mark.parametrize("first", [0, *(pytest.param(k, marks=pytest.mark.slow) for k in SLOW)])
def test_all_ledgers_decide_alike(first: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists of few samples, tensors on the host, and without a tolerance tensors on the device."""
    for seed in range(first, first + SEEDS):
        case = Case.draw(seed)
        few = case.run()
        with monkeypatch.context() as patch:
            patch.setattr(host_ledger, "FEW", 0)
            others = [case.run(), case.run(simulated=True)]
        for outcome, stats, _ in others:
            assert torch.equal(outcome.z, few[0].z), case
            assert all(map(torch.equal, outcome.states, few[0].states)), case
            assert torch.equal(stats.status, few[1].status), case
            if case.stop.check_every != "auto":
                for key in ("nstep", "abs_trace", "rel_trace"):
                    torch.testing.assert_close(stats[key], few[1][key], equal_nan=True)


@pytest.mark.parametrize("every", [1, 3])
@pytest.mark.parametrize("batch", [1, 100])
@pytest.mark.parametrize("bad", [inf, nan])
def test_a_sample_that_was_not_finite_keeps_the_state_before(
    bad: float, batch: int, every: int
) -> None:
    """The map saturates: it would recover, but statistics and state belong to one iterate."""
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return torch.full_like(z, bad) if calls == 5 else torch.tanh(z.nan_to_num(0.0)) + 0.3

    stop = StopRule(20, 1e-6, check_every=every)
    result = solve(f, torch.zeros(batch, 2), FixedPointIter(), stop, on_failure="ignore")
    z = torch.zeros(batch, 2)
    for _ in range(4):
        z = torch.tanh(z) + 0.3
    assert torch.equal(result.z, z)
    assert set(result.stats.status.tolist()) == {Status.NONFINITE}
    assert set(result.stats["nstep"].tolist()) == {4}


@pytest.mark.parametrize("few", [True, False])
def test_an_infinite_residual_never_counts_for_samples_that_share_an_iterate(few: bool) -> None:
    first = torch.tensor([1e37, 1.0])  # a hundred times the largest residual overflows
    later = torch.tensor([inf, 0.5])
    if few:
        score = FewSharedScore(first, 1e-3)
        assert score.update_list(first.tolist()) == [first[0], first[0]]
        assert score.update_list(later.tolist()) == [inf, 0.5]
    else:
        shared = SharedScore(first, 1e-3)
        assert shared.update(first).tolist() == [first[0], first[0]]
        assert shared.update(later).tolist() == [inf, 0.5]


def test_the_last_state_has_its_step_though_it_is_not_finite() -> None:
    stop = StopRule(3, return_final=True)
    result = solve(lambda z: z * inf, torch.ones(2, 2), FixedPointIter(), stop)
    assert result.stats["nstep"].tolist() == [3, 3]
