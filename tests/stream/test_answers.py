"""Any arrival order, any slots, any neighbours give the answer of a solve of its own."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from torchdeq import Anderson, Broyden, FixedPointIter, Solver, StopRule, solve
from torchdeq.stream import Request, Result, Stream, StreamStatus

SOLVERS: list[Solver[Any]] = [
    FixedPointIter(),
    FixedPointIter(tau=0.8),
    Anderson(),
    Anderson(m=3, restart=True),
    Anderson(type=1),
    Broyden(),
    Broyden(l_thres=3),
    Broyden(update="bad"),
]
D = 6


def layer(z: Tensor, W: Tensor, x: Tensor) -> Tensor:
    """Return tanh(W z + x), with a matrix for each sample."""
    return torch.tanh(torch.bmm(W, z.unsqueeze(2)).squeeze(2) + x)


def pair(a: Tensor, b: Tensor, W: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
    z = layer(torch.cat((a, b.flatten(1)), dim=1), W, x)
    return z[:, :2], z[:, 2:].view(-1, 2, 2)


def named(state: dict[str, Tensor], args: dict[str, Tensor]) -> dict[str, Tensor]:
    a, b = pair(state["a"], state["b"], args["W"], args["x"])
    return {"b": b, "a": a}


MAPS: dict[str, Any] = {"tensor": layer, "tuple": pair, "dict": named}


def split(kind: str, z: Tensor, W: Tensor, x: Tensor) -> tuple[Any, tuple[Any, ...]]:
    """Return a start and arguments in the structure of one kind of state."""
    a, b = z[..., :2], z[..., 2:].unflatten(-1, (2, 2))
    if kind == "dict":
        return {"a": a, "b": b}, ({"W": W, "x": x},)
    return (z if kind == "tensor" else (a, b)), (W, x)


def flat(kind: str, z: Any) -> Tensor:
    if kind == "tensor":
        return torch.as_tensor(z).flatten()
    a, b = (z["a"], z["b"]) if kind == "dict" else z
    return torch.cat((a.flatten(), b.flatten()))


def samples(n: int, seed: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """Return starts, matrices and inputs of samples of very different difficulty."""
    rng = torch.Generator().manual_seed(seed)
    W = torch.randn(n, D, D, generator=rng, dtype=torch.float64)
    gain = torch.rand(n, 1, 1, generator=rng, dtype=torch.float64) * 0.9
    W = gain * W / torch.linalg.matrix_norm(W, 2)[:, None, None]
    z0, x = (torch.randn(n, D, generator=rng, dtype=torch.float64) for _ in range(2))
    return z0.to(dtype), W.to(dtype), x.to(dtype)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@settings(max_examples=6)
@given(
    n=st.integers(1, 14),
    slots=st.integers(1, 9),
    seed=st.integers(0, 2**16),
    kind=st.sampled_from(list(MAPS)),
    every=st.sampled_from([1, 1, 2, 5]),
    budget=st.sampled_from([1, 2, 6, 90]),
    mode=st.sampled_from(["abs", "rel"]),
    ordered=st.booleans(),
)
def test_a_request_gets_the_answer_that_it_gets_alone(
    solver: Solver[Any],
    dtype: torch.dtype,
    n: int,
    slots: int,
    seed: int,
    kind: str,
    every: int,
    budget: int,
    mode: str,
    ordered: bool,
) -> None:
    tol, error = (1e-10, 1e-12) if dtype == torch.float64 else (2e-6, 1e-5)
    stop = StopRule(budget, tol, mode, check_every=every)
    z0, W, x = samples(n, seed, dtype)
    stream = Stream(MAPS[kind], slots=slots, solver=solver, stop=stop)
    requests = [Request(*split(kind, z0[i], W[i], x[i]), id=i) for i in range(n)]
    results = list(stream.run(requests, ordered=ordered))
    assert sorted(r.id for r in results) == list(range(n))
    assert not ordered or [r.id for r in results] == list(range(n))
    for result in results:
        i = slice(result.id, result.id + 1)
        start, args = split(kind, z0[i], W[i], x[i])
        alone = solve(MAPS[kind], start, solver, stop, args=args, on_failure="ignore")
        one = flat(kind, alone.z)
        torch.testing.assert_close(flat(kind, result.z), one, atol=error, rtol=error)
        if dtype == torch.float64:
            check_figures(result, alone.stats, every)
    assert stream.counts.finished == n


def check_figures(result: Result, stats: Any, every: int) -> None:
    assert int(result.status) == int(stats.status[0])
    assert result.steps == int(stats.nstep[0])
    assert result.residual == pytest.approx(float(stats.abs_lowest[0]), rel=1e-3, abs=1e-13)
    assert result.relative == pytest.approx(float(stats.rel_lowest[0]), rel=1e-3, abs=1e-13)
    if every == 1:
        assert result.evaluations == stats.nfe


@pytest.mark.parametrize("every", [1, 3])
def test_plain_iteration_of_a_map_of_single_numbers_is_the_same_bit_for_bit(every: int) -> None:
    rates = torch.linspace(-0.9, 0.9, 23, dtype=torch.float64)[torch.randperm(23)][:, None]
    x, stop = torch.randn(23, 5, dtype=torch.float64), StopRule(600, 1e-6, check_every=every)

    def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        return rate * z + x

    found = Stream(f, slots=4, solver=FixedPointIter(), stop=stop).solve(x, (rates, x))
    for i in range(23):
        row = slice(i, i + 1)
        alone = solve(f, x[row], FixedPointIter(), stop, args=(rates[row], x[row]))
        assert torch.equal(alone.z, found.z[row])
        assert alone.stats.nstep[0] == found.stats.nstep[i]
        assert alone.stats.abs_lowest[0] == found.stats.abs_lowest[i]


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("scale", [1e-25, 1.0, 1e25])
def test_residuals_of_any_size_are_measured_as_in_a_solve(
    solver: Solver[Any], scale: float
) -> None:
    """Squares of these numbers leave the range of float32."""
    W, x = (
        0.5 * torch.eye(4) + 0.1,
        torch.randn(9, 4) * torch.tensor([scale, 1.0, 1.0])[torch.arange(9) % 3].unsqueeze(1),
    )
    stop = StopRule(40, 1e-4, "rel")
    found = Stream(lambda z, x: z @ W + x, slots=2, solver=solver, stop=stop).solve(
        torch.zeros_like(x), (x,), on_failure="ignore"
    )
    for i in range(9):
        row = slice(i, i + 1)
        alone = solve(
            lambda z, x: z @ W + x, torch.zeros(1, 4), solver, stop, args=(x[row],),
            on_failure="ignore",
        )  # fmt: skip
        assert int(alone.stats.status[0]) == int(found.stats.status[i])
        torch.testing.assert_close(alone.z, found.z[row], rtol=1e-3, atol=1e-5 * scale)


@pytest.mark.parametrize("solver", SOLVERS, ids=str)
@pytest.mark.parametrize("tol", [1e-6, None])
def test_samples_that_break_or_diverge_end_as_they_do_alone(
    solver: Solver[Any], tol: float | None
) -> None:
    """NaN, infinity and growth in one row touch no other, and idle rows touch nothing."""
    rate = torch.tensor([0.5, torch.nan, 0.9, 30.0, torch.inf, 0.2, -40.0, 0.7, torch.nan])
    rate, x = rate.double()[:, None], torch.randn(9, 3, dtype=torch.float64)
    stop = StopRule(12, tol)

    def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        return rate * z + x

    stream = Stream(f, slots=3, solver=solver, stop=stop)
    found = stream.solve(torch.zeros_like(x), (rate, x), on_failure="ignore")
    for i in range(9):
        row = slice(i, i + 1)
        alone = solve(
            f, torch.zeros(1, 3, dtype=torch.float64), solver, stop, args=(rate[row], x[row]),
            on_failure="ignore",
        )  # fmt: skip
        assert int(alone.stats.status[0]) == int(found.stats.status[i]), i
        torch.testing.assert_close(alone.z, found.z[row], rtol=1e-6, atol=1e-9)
    assert found.z.isfinite().all()


def test_a_residual_at_the_limit_of_the_precision_stalls_at_the_same_evaluation() -> None:
    W = torch.randn(5, 5)
    W = 0.6 * W / torch.linalg.matrix_norm(W, 2)
    x, stop = torch.randn(20, 5) * 100, StopRule(300, 1e-9)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return (z.unsqueeze(1) * W).sum(2) + x

    for solver in (FixedPointIter(), Anderson(), Broyden()):
        found = Stream(f, slots=3, solver=solver, stop=stop).solve(torch.zeros(20, 5), (x,))
        assert set(found.stats.status.tolist()) <= {StreamStatus.CONVERGED, StreamStatus.STALLED}
        assert StreamStatus.STALLED in found.stats.status.tolist()
        if isinstance(solver, FixedPointIter):
            for i in range(20):
                alone = solve(f, torch.zeros(1, 5), solver, stop, args=(x[i : i + 1],))
                assert int(alone.stats.status[0]) == int(found.stats.status[i])
                assert torch.equal(alone.z[0], found.z[i])


def test_the_batch_shrinks_when_requests_run_out_and_grows_when_they_come() -> None:
    sizes: list[int] = []

    def f(z: Tensor, rate: Tensor) -> Tensor:
        sizes.append(len(z))
        return rate * z + 1

    rates = torch.tensor([0.1] * 7 + [0.9]).double()[:, None]
    stream = Stream(f, slots=8, solver=FixedPointIter(), stop=StopRule(300, 1e-9))
    stream.solve(torch.zeros(8, 1, dtype=torch.float64), (rates,))
    assert sizes[0] == 8
    assert sizes[-1] == 1
    assert sum(size > 1 for size in sizes) < 15


def test_stop_rules_of_requests_differ() -> None:
    rules = [StopRule(50, 1e-3), StopRule(50, 1e-8, "rel"), StopRule(3, 1e-9), None,
             StopRule(50, None), StopRule(50, tol=None, rtol=1e-6, atol=1e-6),
             StopRule(50, 1e-5, norm="rms"), StopRule(7, None, return_final=True),
             StopRule(0)]  # fmt: skip
    x = torch.linspace(-1, 1, len(rules), dtype=torch.float64)
    requests = [Request(x[i], (x[i],), i, rule) for i, rule in enumerate(rules)]
    common = StopRule(30, 1e-6)

    def f(z: Tensor, x: Tensor) -> Tensor:
        return torch.cos(z + x)

    for result in Stream(f, slots=4, solver=Anderson(), stop=common).run(requests):
        i = result.id
        alone = solve(
            f, x[i : i + 1], Anderson(), rules[i] or common, args=(x[i : i + 1],),
            on_failure="ignore",
        )  # fmt: skip
        assert result.z.shape == ()
        torch.testing.assert_close(result.z, alone.z[0], atol=1e-12, rtol=0)
        assert int(result.status) == int(alone.stats.status[0])
        if result.residual > 1e-14:
            assert result.steps == int(alone.stats.nstep[0])
        assert result.residual == pytest.approx(float(alone.stats.abs_lowest[0]), abs=1e-14)


def test_batches_follow_each_other_without_a_pause() -> None:
    """The hard sample of the first batch runs while those of the next ones come and go."""
    calls: list[int] = []
    x = torch.randn(12, 2, dtype=torch.float64)
    rate = torch.tensor([0.97] + [0.1] * 11, dtype=torch.float64)[:, None]

    def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        calls.append(len(z))
        return rate * z + x

    read: list[int] = []

    def batches(sizes: list[int]) -> Any:
        first = 0
        for n in sizes:
            read.append(n)
            part = slice(first, first + n)
            yield torch.zeros(n, 2, dtype=torch.float64), (rate[part], x[part])
            first += n

    stop = StopRule(2000, 1e-10)
    stream = Stream(f, slots=3, solver=FixedPointIter(), stop=stop)
    careful = Stream(f, slots=3, solver=FixedPointIter(), stop=stop, ahead=2)
    next(careful.solve_batches(batches([4, 4, 1, 1, 1, 1])))
    assert read == [4, 4]  # the second one is read while less than 5 samples have been taken
    read.clear()
    calls.clear()
    solutions = stream.solve_batches(batches([4, 0, 1, 7]))
    assert read == []
    first = next(solutions)
    assert len(first.z) == 4
    found = [first, *solutions]
    assert [len(s.z) for s in found] == [4, 0, 1, 7]
    exact = x / (1 - rate)
    torch.testing.assert_close(torch.cat([s.z for s in found]), exact, atol=1e-7, rtol=0)
    hard = int(first.stats.nstep[0])
    assert first.stats.nfe == hard
    assert found[2].stats.nfe < 20
    assert len(calls) == hard  # the others cost no further calls
    with pytest.raises(ValueError, match="shape"):
        list(
            stream.solve_batches(
                [
                    (torch.zeros(2, 2), (torch.ones(2, 1), torch.ones(2, 2))),
                    (torch.zeros(2, 3), (torch.ones(2, 1), torch.ones(2, 3))),
                ]
            )
        )


def test_batches_may_differ_in_their_order_of_memory() -> None:
    def f(z: Tensor, x: Tensor) -> Tensor:
        return 0.5 * torch.sin(z) + x

    x = torch.randn(6, 3, 4, 5, dtype=torch.float64)
    last = x.contiguous(memory_format=torch.channels_last)
    exact = solve(f, torch.zeros_like(x), FixedPointIter(), StopRule(60, 1e-10), args=(x,)).z
    stream = Stream(f, slots=2, solver=FixedPointIter(), stop=StopRule(60, 1e-10))
    for orders in ((x, last), (last, x)):
        found = stream.solve_batches((torch.zeros_like(t), (t,)) for t in orders)
        for solution in found:
            torch.testing.assert_close(solution.z, exact, atol=1e-9, rtol=0)
    for orders in ((x, last), (last, x)):
        requests = [Request(torch.zeros_like(t[i]), (t[i],), i) for i in range(6) for t in orders]
        for result in stream.run(requests):
            torch.testing.assert_close(result.z, exact[result.id], atol=1e-9, rtol=0)
