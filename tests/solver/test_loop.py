"""The loop: stopping, statuses, statistics, recording, and what the host reads."""

from __future__ import annotations

import copy
import pickle
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from benchmarks.accelerator import Meter
from tests import problems
from torchdeq.solver import (
    SOLVERS,
    Anderson,
    Broyden,
    FixedPointIter,
    Iterate,
    SimpleFixedPointIter,
    Solver,
    SolverStat,
    Status,
    StopRule,
    solve,
)

KEYS = {"abs_lowest", "rel_lowest", "abs_trace", "rel_trace", "nstep", "sradius"}


class Reads(TorchFunctionMode):
    """A mode that counts how often the host reads a tensor."""

    names = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "__index__")
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


@pytest.fixture
def _as_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Treat the host as a device whose values are not free to read."""
    monkeypatch.setattr("torchdeq.numbers.reads_are_free", lambda device: False)


@pytest.mark.usefixtures("_as_a_device")
@pytest.mark.parametrize(
    "solver",
    [FixedPointIter(), Anderson(), Anderson(type=1), Broyden(), SimpleFixedPointIter()],
)
@pytest.mark.parametrize("shape", [(4, 16), (2, 40_000)])  # the deferred and the direct bookkeeping
@pytest.mark.parametrize("tol", [0.0, None])
def test_without_a_tolerance_the_host_reads_nothing(
    solver: Any, shape: tuple[int, ...], tol: float | None
) -> None:
    with Reads() as reads:
        solution = solve(lambda z: torch.cos(z), torch.zeros(shape), solver, StopRule(20, tol))
        assert solution.stats.status.shape == (shape[0],)
    assert reads.count == 0


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("options", [{}, {"ls": True}])
@pytest.mark.parametrize("shape", [(3, 16), (70, 16), (2, 5_000)])
@pytest.mark.parametrize("tol", [0.0, 1e-6])
def test_a_device_is_read_once_a_check_and_never_without_a_tolerance(
    name: str, options: dict[str, bool], shape: tuple[int, int], tol: float
) -> None:
    if options and name != "broyden":
        return
    meter, start = Meter(simulated=True), torch.rand(shape)
    solver = SOLVERS[name](**SOLVERS[name].options_without_jvp, **options)
    with meter:
        stop = StopRule(30, tol)
        solution = solve(torch.cos, meter.put(start), solver, stop, on_failure="ignore")
        reads = meter.tally.reads
        z, nfe = solution.z.to("cpu"), solution.stats.nfe
    # The trials of a search and the products of a Newton step are read, too.
    searches = options or name in ("auto", "newton_krylov")
    assert reads <= (3 if searches else 1) * nfe + 3 if tol and solver.watches else reads == 0
    if tol:
        on_host = solve(torch.cos, start, solver, stop, on_failure="ignore")
        assert on_host.stats.nfe == nfe
        torch.testing.assert_close(z, on_host.z, atol=1e-6, rtol=0)


@pytest.mark.usefixtures("_as_a_device")
def test_the_simple_iteration_reads_nothing_even_with_a_tolerance() -> None:
    with Reads() as reads:
        solve(torch.cos, torch.zeros(3, 2), SimpleFixedPointIter(), StopRule(5, 1e-6))
    assert reads.count == 0


@pytest.mark.parametrize(
    ("shape", "tol"), [((4, 16), 0.0), ((2, 40_000), 0.0), ((4, 16), 1e-30), ((2, 40_000), 1e-30)]
)
def test_the_best_state_is_kept_by_every_way_of_bookkeeping(
    shape: tuple[int, ...], tol: float
) -> None:
    """A map whose residual falls and rises: sample i is best after 3 + i evaluations."""
    b = shape[0]
    best = torch.arange(3, 3 + b)
    calls = 0

    def f(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return z + (calls - best).abs().add(1.0)[:, None]

    solution = solve(
        f, torch.zeros(shape), FixedPointIter(), StopRule(21, tol), on_failure="ignore"
    )
    assert solution.stats.nstep.tolist() == best.tolist()
    z = torch.zeros(shape)
    calls = 0
    states = []
    for _ in range(21):
        z = f(z)
        states.append(z)
    expected = torch.stack([states[int(k) - 1][i] for i, k in enumerate(best)])
    assert torch.equal(solution.z, expected)


def test_a_sample_is_captured_where_it_first_meets_the_tolerance() -> None:
    f, z0 = problems.tanh_layer(gain=0.7)
    trajectory = [z0]
    for _ in range(60):
        trajectory.append(f(trajectory[-1]))
    for every in (1, 3, 7):
        solution = solve(f, z0, FixedPointIter(), StopRule(60, 1e-6, check_every=every))
        for i in range(len(z0)):
            k = next(
                k for k in range(60) if (trajectory[k + 1][i] - trajectory[k][i]).norm() <= 1e-6
            )
            assert solution.stats.nstep[i] == k + 1
            assert torch.equal(solution.z[i], trajectory[k + 1][i])


def test_return_final_spends_the_budget_and_returns_the_last_state() -> None:
    f, z0 = problems.tanh_layer(gain=0.5)
    g, calls = problems.counted(f)
    stop = StopRule(30, 1e-2, return_final=True)
    solution = solve(g, z0, FixedPointIter(), stop, (4,))
    z = z0
    states = [z0]
    for _ in range(30):
        z = f(z)
        states.append(z)
    assert len(calls) == 30
    assert torch.equal(solution.z, z)
    assert torch.equal(solution.states[0], states[4])


def test_rtol_and_atol_together() -> None:
    f, z0 = problems.tanh_layer()
    solution = solve(f, z0, Anderson(), StopRule(100, tol=None, rtol=1e-6, atol=1e-8))
    residual = solution.stats.abs_lowest
    assert (residual <= 1e-8 + 1e-6 * solution.z.norm(dim=1) * 1.001).all()
    assert solution.stats.converged.all()


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"max_iter": -1}, "max_iter must be a whole number >= 0, got -1"),
        ({"max_iter": 2.5}, "whole number"),
        ({"max_iter": float("inf")}, "whole number"),
        ({"tol": -1.0}, "tol must be None or a finite number >= 0"),
        ({"tol": float("nan")}, "tol must be None"),
        ({"mode": "rell"}, "unknown stop mode 'rell'; did you mean 'rel'"),
        ({"rtol": 1e-3}, "rtol and atol go together"),
        ({"rtol": 1e-3, "atol": 0.0}, "pass tol=None"),
        ({"check_every": 0}, "check_every"),
        ({"norm": "rmse"}, "unknown norm 'rmse'; did you mean 'rms'"),
    ],
)
def test_a_stop_rule_refuses_nonsense(kwargs: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        StopRule(**kwargs)


@pytest.mark.parametrize(
    "stop", [{"tol": 1e-3, "mode": "rel"}, {"tol": None, "rtol": 1e-3, "atol": 0.0}]
)
@pytest.mark.parametrize("factor", [1.1, 2.0])
def test_states_that_overflow_have_not_converged(stop: dict[str, Any], factor: float) -> None:
    # |f(z)| overflows while |f(z) - z| is finite: their quotient must not pass for zero.
    rule = StopRule(max_iter=1200, **stop)
    z0 = torch.zeros(2, 50)
    solution = solve(lambda z: factor * z + 1, z0, FixedPointIter(), rule, on_failure="ignore")
    assert solution.stats.failed.all()


def test_a_zero_image_beside_a_state_is_no_failure_of_f() -> None:
    """|f(z)| = 0 allows no residual with a relative tolerance alone, yet everything is finite."""
    stop = StopRule(1, None, rtol=1e-3, atol=0.0)
    z0 = torch.full((2, 50), 7.0)
    solution = solve(lambda z: 0 * z, z0, FixedPointIter(), stop, on_failure="ignore")
    assert (solution.stats.status == Status.MAX_ITER).all()
    stop = StopRule(2, None, rtol=1e-3, atol=0.0)
    assert solve(lambda z: 0 * z, z0, FixedPointIter(), stop).stats.converged.all()


def test_a_diverging_sample_has_its_own_status() -> None:
    rates = torch.tensor([[0.5], [3.0]])
    solution = solve(
        lambda z: rates * z + 1,
        torch.zeros(2, 3),
        FixedPointIter(),
        StopRule(20),
        on_failure="ignore",
    )
    assert solution.stats.status.tolist() == [Status.CONVERGED, Status.DIVERGED]
    assert solution.stats.failed.tolist() == [False, True]
    assert torch.equal(solution.z[1], torch.ones(3))  # its best state, not the last one
    assert solution.stats.summary().startswith("CONVERGED 1, DIVERGED 1; 20 evaluations")


@pytest.mark.parametrize("solver", [FixedPointIter(), Anderson(), Broyden()])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_floor_of_the_precision_is_a_stall_not_a_failure(
    solver: Any, dtype: torch.dtype, recwarn: pytest.WarningsRecorder
) -> None:
    f, z0 = problems.tanh_layer(gain=0.8, d=64, dtype=torch.float32)
    solution = solve(lambda z: f(z).to(dtype), z0, solver, StopRule(300, 1e-12, "rel"))
    assert ((solution.stats.status == Status.STALLED) | solution.stats.converged).all()
    assert solution.stats.nfe < 120
    assert (solution.stats.rel_lowest < 2 * torch.finfo(dtype).eps).all()
    assert not recwarn.list


def test_slow_but_healthy_progress_is_never_a_stall() -> None:
    solution = solve(
        lambda z: 0.999 * z + 1, torch.zeros(2, 3), FixedPointIter(), StopRule(400, 1e-6, "rel"),
        on_failure="ignore",
    )  # fmt: skip
    assert solution.stats.nfe == 400
    assert (solution.stats.status == Status.MAX_ITER).all()


def test_statistics_are_a_mapping_and_attributes() -> None:
    stats = solve(torch.cos, torch.zeros(3, 2), Anderson(), StopRule(30, 1e-5)).stats
    assert set(stats) == set(stats.keys()) == set(dict(stats)) == set({**stats}) == KEYS
    assert "nstep" in stats
    assert stats.get("nothing", 7) == 7
    for key in KEYS:
        assert getattr(stats, key) is stats[key]
    assert float(stats["sradius"]) == -1.0
    stats["sradius"] = torch.zeros(3)
    assert stats.sradius.shape == (3,)
    assert stats["nstep"].is_floating_point()  # so that .mean() works, as in 0.1.0
    with pytest.raises(AttributeError, match="have no 'nonsense'"):
        _ = stats.nonsense
    for again in (pickle.loads(pickle.dumps(stats)), copy.deepcopy(stats)):
        assert torch.equal(again.status, stats.status)
        assert again.nfe == stats.nfe
        assert torch.equal(again["abs_trace"], stats["abs_trace"])


def test_a_key_set_before_the_statistics_are_read_is_kept() -> None:
    stats = solve(torch.cos, torch.zeros(3, 2), Anderson(), StopRule(5, 0.0)).stats
    stats["sradius"] = torch.ones(3)
    assert stats["sradius"].tolist() == [1.0] * 3
    assert set(stats) == KEYS
    later = solve(torch.cos, torch.zeros(3, 2), Anderson(), StopRule(5, 0.0)).stats
    assert later.setdefault("nstep", torch.zeros(1)).shape == (3,)  # the real value comes first


def test_a_copy_of_the_statistics_keeps_the_statuses() -> None:
    stats = solve(torch.cos, torch.zeros(3, 2), Anderson(), StopRule(30, 1e-5)).stats
    again = SolverStat(stats)
    assert torch.equal(again.status, stats.status)
    assert again.nfe == stats.nfe


def test_statistics_of_the_final_step() -> None:
    z, fz = torch.zeros(2, 3, 4), torch.ones(2, 3, 4)
    stats = SolverStat.from_final_step(z, fz, nstep=7)
    torch.testing.assert_close(stats["abs_lowest"], torch.full((2,), 12**0.5))
    assert stats["rel_trace"].shape == (2, 1)
    assert stats["nstep"].tolist() == [7.0, 7.0]
    both = SolverStat.from_final_step([z, z], [fz, fz])
    torch.testing.assert_close(both["abs_lowest"], torch.full((2,), 24**0.5))
    assert set(SolverStat()) == KEYS


def test_the_simple_iteration_fills_the_mapping_and_never_packs() -> None:
    seen: list[Tensor] = []

    def f(a: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        seen.append(a)
        return 0.5 * a + 1, torch.cos(b)

    solution = solve(
        f, (torch.zeros(2, 3), torch.zeros(2, 4)), SimpleFixedPointIter(), StopRule(9), (3,)
    )
    assert set(solution.stats) == KEYS
    assert solution.stats.abs_trace.shape == (2, 1)
    assert solution.stats.nstep.tolist() == [9.0, 9.0]
    assert all(a.is_contiguous() for a in seen[1:])  # f's own tensors, not slices of a matrix
    torch.testing.assert_close(solution.states[0][0], torch.full((2, 3), 1.75))


@dataclass(frozen=True, kw_only=True)
class Lazy(Solver[None]):
    def init(self, it: Iterate) -> None:
        return None

    def step(self, f: Any, it: Iterate, state: None) -> tuple[Iterate, None]:
        return it, None


@dataclass(frozen=True, kw_only=True)
class Greedy(Lazy):
    def step(self, f: Any, it: Iterate, state: None) -> tuple[Iterate, None]:
        for _ in range(100):
            f(it.z)
        return it, None


@dataclass(frozen=True, kw_only=True)
class Forgetful(Lazy):
    def init(self, it: Iterate) -> Any:
        return object()

    def step(self, f: Any, it: Iterate, state: Any) -> tuple[Iterate, Any]:
        return self.at(f, it.fz), state


def test_a_solver_that_breaks_its_contract_raises() -> None:
    with pytest.raises(RuntimeError, match=r"Lazy.step must evaluate f at least once"):
        solve(torch.cos, torch.zeros(1, 1), Lazy(), StopRule(5))
    with pytest.raises(RuntimeError, match="more than its 5 evaluations"):
        solve(torch.cos, torch.zeros(1, 1), Greedy(), StopRule(5))
    rates = torch.tensor([[0.1], [0.9]])
    with pytest.raises(TypeError, match=r"a state of Forgetful with take\(rows\); object has none"):
        solve(
            lambda z, r: r * z + 1, torch.zeros(2, 1), Forgetful(), StopRule(50), args=(rates,),
            compact=True,
        )  # fmt: skip


def test_bad_arguments_of_a_solve_are_explained() -> None:
    z0 = torch.zeros(2, 3)
    with pytest.raises(ValueError, match="unknown failure policy 'rise'; did you mean 'raise'"):
        solve(torch.cos, z0, Anderson(), on_failure="rise")
    with pytest.raises(ValueError, match="record takes whole numbers"):
        solve(torch.cos, z0, Anderson(), record=(-1,))
    with pytest.raises(ValueError, match=r"batch of 2 .*: got shape \(3,\) at args\[0\]"):
        solve(lambda z, x: z + x, z0, Anderson(), args=(torch.zeros(3),), compact=True)


def test_a_solve_works_in_inference_mode_and_under_autocast() -> None:
    layer = torch.nn.Linear(16, 16)
    with torch.no_grad():
        layer.weight.mul_(0.5)
    x = torch.randn(4, 16)
    for name in SOLVERS:
        with torch.inference_mode():
            solution = solve(
                lambda z: torch.tanh(layer(z) + x), torch.zeros(4, 16), SOLVERS[name]()
            )
            assert not solution.stats.failed.any()
        with torch.autocast("cpu", torch.bfloat16):
            solution = solve(
                lambda z: torch.tanh(layer(z) + x), torch.zeros(4, 16), SOLVERS[name](),
                StopRule(60, 1e-2, "rel"),
            )  # fmt: skip
        assert solution.z.dtype == torch.float32
        assert not solution.stats.failed.any()
