"""A solve in a graph gives the states, statuses and counts of the library's own solve.

Unrolled, the body of the loop runs as plain Python, so that many cases take little time.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from tests.problems import contraction, repelling, rotation, tanh_layer
from torchdeq import (
    Anderson,
    FixedPointIter,
    SimpleFixedPointIter,
    Status,
    StopRule,
    export,
    solve,
)
from torchdeq.export.in_graph import InGraph
from torchdeq.pytree import walk

SOLVERS = [
    FixedPointIter(),
    FixedPointIter(tau=0.6),
    Anderson(m=4),
    Anderson(m=3, tau=0.7, ridge=1e-4),
    SimpleFixedPointIter(tau=0.8),
]


def compare(f: Any, z0: Any, solver: Any, stop: StopRule, tol: float = 1e-9, **call: Any) -> Tensor:
    """Assert that a solve in a graph equals the library's; return the statuses."""
    own = solve(f, z0, solver, stop, on_failure="ignore", **call)
    in_graph = InGraph("unroll")
    with torch.no_grad():
        other = in_graph(f, z0, solver=solver, stop=stop, keep_estimate=True, **call)
    (report,) = in_graph.reports
    for (_, a), (_, b) in zip(walk(own.z), walk(other.z), strict=True):
        torch.testing.assert_close(b, a, atol=tol, rtol=tol, equal_nan=True)
    assert report.status.tolist() == own.stats.status.tolist()
    assert report.steps.tolist() == own.stats["nstep"].tolist()
    relative = stop.mode == "rel" and stop.rtol is None
    residual = own.stats["rel_lowest" if relative else "abs_lowest"]
    if stop.rtol is None:
        torch.testing.assert_close(report.residual, residual, atol=1e-8, rtol=1e-3, equal_nan=True)
    return own.stats.status


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@settings(max_examples=8)
@given(
    seed=st.integers(0, 2**16),
    gain=st.floats(0.3, 1.3),
    mode=st.sampled_from(["abs", "rel"]),
    tol=st.sampled_from([0.0, 1e-1, 1e-4, 1e-8]),
    budget=st.integers(0, 30),
)
def test_any_layer_is_solved_alike(
    solver: Any, seed: int, gain: float, mode: str, tol: float, budget: int
) -> None:
    f, z0 = tanh_layer(gain=gain, seed=seed)
    compare(f, z0, solver, StopRule(budget, tol, mode), tol=1e-6)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
@pytest.mark.parametrize(
    "stop",
    [
        StopRule(40, None, rtol=1e-4, atol=1e-6),
        StopRule(40, None, rtol=1e-4, atol=0.0),
        StopRule(40, 1e-4, norm="rms"),
        StopRule(40, 1e-4, "rel", norm="rms"),
        StopRule(20, 1e-4, return_final=True),
    ],
    ids=str,
)
def test_every_kind_of_stop_rule_is_known(solver: Any, stop: StopRule) -> None:
    compare(*tanh_layer(), solver, stop)


def test_a_sample_keeps_the_state_that_first_met_the_tolerance() -> None:
    f, z0 = tanh_layer(batch=6, gain=0.95)
    scale = torch.tensor([0.1, 0.5, 1.0, 1.0, 2.0, 4.0], dtype=z0.dtype)[:, None]
    statuses = compare(lambda z: scale * f(z / scale), z0, FixedPointIter(), StopRule(30, 1e-2))
    assert Status.CONVERGED in statuses.tolist()


def test_divergence_is_noticed() -> None:
    A = repelling()
    z0 = torch.ones(3, len(A), dtype=A.dtype)
    statuses = compare(lambda z: z @ A.mT + 1, z0, FixedPointIter(), StopRule(12, 1e-6))
    assert set(statuses.tolist()) == {Status.DIVERGED}


def test_a_nan_ends_its_own_sample_only() -> None:
    f, z0 = tanh_layer()
    bad = torch.tensor([0.0, 1.0, 0.0, 0.0], dtype=z0.dtype)[:, None]

    def breaks(z: Tensor) -> Tensor:
        return torch.where((bad > 0) & (z.norm(dim=1, keepdim=True) > 1), torch.nan, f(z))

    for solver in SOLVERS[:4]:
        statuses = compare(breaks, z0, solver, StopRule(60, 1e-6, "rel"), tol=1e-6)
        assert statuses[1] == Status.NONFINITE
        assert statuses[0] == Status.CONVERGED


def test_stalls_are_found_where_the_library_finds_them() -> None:
    A = rotation(0.5).float()
    b = 1e4 * torch.randn(4, len(A))
    stop = StopRule(80, 1e-9)
    statuses = compare(lambda z: z @ A.mT + b, torch.zeros_like(b), FixedPointIter(), stop, 1e-6)
    assert Status.STALLED in statuses.tolist()


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_a_coupled_batch_is_one_system(solver: Any) -> None:
    f, z0 = tanh_layer()
    statuses = compare(lambda z: f(z).roll(1, 0), z0, solver, StopRule(60, 1e-5), coupled=True)
    assert len(statuses) == len(z0)


@pytest.mark.parametrize("solver", SOLVERS, ids=repr)
def test_states_of_any_structure_are_known(solver: Any) -> None:
    W = contraction(0.5, 6)

    def pair(v: Tensor, m: Tensor) -> list[Tensor]:
        return [torch.tanh(v @ W.mT + m.mean((1, 2))[:, None] + 1), torch.cos(0.5 * m)]

    v, m = torch.zeros(3, 6, dtype=W.dtype), torch.zeros(3, 2, 4, dtype=W.dtype)
    stop = StopRule(40, 1e-5)
    compare(pair, (v, m), solver, stop)
    compare(
        lambda z: dict(zip("ab", pair(z["a"], z["b"]), strict=True)), {"a": v, "b": m}, solver, stop
    )
    compare(torch.cos, torch.linspace(0, 1, 5, dtype=W.dtype), solver, stop)
    compare(torch.cos, torch.tensor(0.3, dtype=W.dtype), solver, stop)


def test_half_precision_is_mixed_in_single_precision() -> None:
    f, z0 = tanh_layer(gain=0.5)
    half = z0.to(torch.bfloat16)
    with torch.no_grad():
        z = InGraph("unroll")(
            lambda z: f(z.double()).to(torch.bfloat16), half, solver=Anderson(),
            stop=StopRule(20, 1e-1, "rel"), keep_estimate=True,
        ).z  # fmt: skip
    exact = solve(f, z0, FixedPointIter(), StopRule(200, 1e-9)).z
    assert z.dtype == torch.bfloat16
    assert float((z.double() - exact).abs().max()) < 0.05


def test_what_a_graph_cannot_do_is_an_error() -> None:
    f, z0 = tanh_layer()
    with pytest.raises(ValueError, match="recorded states"):
        InGraph("unroll")(f, z0, solver=FixedPointIter(), stop=StopRule(5), record=[2])
    with pytest.raises(ValueError, match="shared iterates"):
        InGraph("unroll")(f, z0, solver=FixedPointIter(), stop=StopRule(5), shared=True)
    for solver, words in (
        (Anderson(restart=True), "restart=True"),
        (Anderson(type=1), "type=1"),
        (Anderson(safeguard=2.0), "safeguard=2.0"),
    ):
        with pytest.raises(ValueError, match=words):
            InGraph("unroll")(f, z0, solver=solver, stop=StopRule(5))


def test_a_version_of_torch_without_exported_loops_is_named(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "__version__", "2.6.0+cpu")
    with pytest.raises(
        RuntimeError, match=r"needs torch 2\.9 or later, .* torch 2\.6\.0.*'unroll'"
    ):
        export.export(torch.tanh, torch.zeros(2, 3), start=torch.zeros(2, 3))
