"""Contracts of every registered solver; its class attributes decide which of them apply."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from tests import problems
from tests.contracts.solvers import NAMES, WATCHING, run
from torchdeq.solver import (
    SOLVERS,
    Auto,
    ConvergenceWarning,
    Status,
    StopRule,
    make_solver,
    solve,
)

#: Solvers that converge on maps that do not contract; the others do with damping, if they have it.
BEYOND_CONTRACTIONS = [
    name for name in NAMES if not SOLVERS[name].needs_contraction or hasattr(SOLVERS[name], "tau")
]
DTYPES = [(torch.float64, 1e-10, 1e-8), (torch.float32, 1e-5, 1e-3), (torch.bfloat16, 3e-2, 0.3)]


@pytest.mark.parametrize("name", NAMES)
@given(rho=st.floats(0.0, 0.9), seed=st.integers(0, 2**16))
def test_finds_the_fixed_point_of_any_affine_contraction(name: str, rho: float, seed: int) -> None:
    f, z0, exact = problems.affine(problems.contraction(rho, seed=seed), seed=seed)
    solution = run(name, f, z0, StopRule(max_iter=400, tol=1e-10))
    torch.testing.assert_close(solution.z, exact, atol=1e-8, rtol=0)
    assert solution.stats.converged.all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize(("dtype", "tol", "error"), DTYPES)
@pytest.mark.parametrize("batch", [1, 257])
def test_every_precision_and_batch_size(
    name: str, dtype: torch.dtype, tol: float, error: float, batch: int
) -> None:
    f, z0, exact = problems.affine(problems.contraction(0.7), batch, dtype=dtype)
    solution = run(name, f, z0, StopRule(100, tol, "rel"))
    assert solution.z.dtype == dtype
    assert solution.z.shape == z0.shape
    assert (solution.z - exact).norm(dim=1).div(exact.norm(dim=1)).max() < error
    assert not solution.stats.failed.any()


@pytest.mark.parametrize("name", NAMES)
def test_converges_on_a_rotation_with_complex_eigenvalues(name: str) -> None:
    f, z0, exact = problems.affine(problems.rotation(0.95))
    solution = run(name, f, z0, StopRule(max_iter=600, tol=1e-9))
    torch.testing.assert_close(solution.z, exact, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_survives_the_growth_of_a_non_normal_map(name: str) -> None:
    f, z0, exact = problems.affine(problems.non_normal())
    solution = run(name, f, z0, StopRule(max_iter=400, tol=1e-9))
    torch.testing.assert_close(solution.z, exact, atol=1e-6, rtol=1e-8)


@pytest.mark.parametrize("name", BEYOND_CONTRACTIONS)
def test_converges_on_a_repelling_map(name: str) -> None:
    f, z0, exact = problems.affine(problems.repelling())
    options = {"tau": 0.3} if SOLVERS[name].needs_contraction else {}
    solution = run(name, f, z0, StopRule(max_iter=400, tol=1e-9), options)
    torch.testing.assert_close(solution.z, exact, atol=1e-6, rtol=1e-8)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("budget", [0, 1, 2, 3, 6, 17])
@pytest.mark.parametrize("tol", [0.0, 1e-12])
def test_the_budget_is_the_number_of_evaluations(name: str, budget: int, tol: float) -> None:
    """A product with the Jacobian counts as one evaluation, and calls f once."""
    f, z0 = problems.tanh_layer(gain=1.5)  # too hard for any solver within the budget
    g, calls = problems.counted(f)
    solution = run(name, g, z0, StopRule(budget, tol))
    assert len(calls) == budget
    assert solution.stats.nfe == budget
    assert solution.z.isfinite().all()
    if not budget:
        assert solution.z is z0 or torch.equal(solution.z, z0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, 1e-3])
def test_as_many_states_are_recorded_as_asked(name: str, tol: float) -> None:
    f, z0 = problems.tanh_layer(gain=0.5)
    solution = run(name, f, z0, StopRule(20, tol), record=(7, 0, 3, 20, 99))
    assert len(solution.states) == 5
    assert torch.equal(solution.states[1], z0)
    assert torch.equal(solution.states[3], solution.z)
    assert torch.equal(solution.states[4], solution.z)
    errors = [(f(z) - z).norm() for z in (solution.states[i] for i in (1, 2, 0, 3))]
    assert errors == sorted(errors, reverse=True)


@pytest.mark.parametrize("name", [n for n in WATCHING if not SOLVERS[n].plans_by_budget])
def test_a_recorded_state_is_the_best_at_that_step(name: str) -> None:
    """Recording k of a long solve gives what a solve with budget k would have returned."""
    f, z0 = problems.tanh_layer(gain=0.9)
    long = run(name, f, z0, StopRule(20, 0.0), record=(1, 2, 5, 11))
    for k, state in zip((1, 2, 5, 11), long.states, strict=True):
        torch.testing.assert_close(state, run(name, f, z0, StopRule(k, 0.0)).z, rtol=0, atol=0)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, 1e-6])
def test_a_sample_alone_gets_the_answer_it_gets_in_a_batch(name: str, tol: float) -> None:
    f, rates, x = problems.rated_samples()
    z0, stop = torch.zeros_like(x), StopRule(60, tol)
    together = run(name, f, z0, stop, args=(rates, x))
    for i in range(5):
        alone = run(name, f, z0[i : i + 1], stop, args=(rates[i : i + 1], x[i : i + 1]))
        torch.testing.assert_close(alone.z[0], together.z[i], atol=1e-6, rtol=0)
        assert alone.stats.status[0] == together.stats.status[i]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, 1e-8])
def test_batch_order_is_irrelevant(name: str, tol: float) -> None:
    z0 = torch.zeros(6, 16, dtype=torch.float64)
    order = torch.tensor([3, 1, 5, 0, 2, 4])
    W = problems.contraction(0.9, 16)
    x = torch.randn(6, 16, dtype=torch.float64)
    stop = StopRule(80, tol)
    one = run(name, lambda z: torch.tanh(z @ W.mT + x), z0, stop)
    two = run(name, lambda z: torch.tanh(z @ W.mT + x[order]), z0, stop)
    torch.testing.assert_close(one.z[order], two.z, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", WATCHING)
@pytest.mark.parametrize("tol", [0.0, 1e-8])
@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_a_sample_that_breaks_does_not_touch_its_neighbour(
    name: str, tol: float, bad: float
) -> None:
    f, z0 = problems.tanh_layer(batch=3, gain=0.8)
    calls = 0

    def broken(z: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        fz = f(z)
        if calls >= 5:
            fz = torch.cat((fz[:1], torch.full_like(fz[1:2], bad), fz[2:]))
        return fz

    stop = StopRule(60, tol)
    whole = run(name, broken, z0, stop)
    alone = run(name, f, z0, stop)
    keep = torch.tensor([0, 2])
    torch.testing.assert_close(whole.z[keep], alone.z[keep], atol=1e-6, rtol=0)
    assert whole.z.isfinite().all()
    assert whole.stats.status[1] == Status.NONFINITE
    assert whole.stats.nstep[1] < 5
    # The returned state is the best one before the break, not the start.
    assert (f(whole.z)[1] - whole.z[1]).norm() < (f(z0)[1] - z0[1]).norm()


@pytest.mark.parametrize("name", WATCHING)
def test_a_start_that_breaks_at_once_is_returned(name: str) -> None:
    z0 = torch.zeros(2, 3)
    solution = run(name, lambda z: z * torch.nan, z0, StopRule(5))
    assert torch.equal(solution.z, z0)
    assert (solution.stats.status == Status.NONFINITE).all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("shape", [(), (5,), (0, 4), (3, 0), (1, 1), (2, 3, 4), (2, 3, 4, 5)])
@pytest.mark.parametrize("tol", [0.0, 1e-6])
def test_every_shape(name: str, shape: tuple[int, ...], tol: float) -> None:
    z0 = torch.zeros(shape, dtype=torch.float64)
    solution = run(name, torch.cos, z0, StopRule(80, tol))
    torch.testing.assert_close(solution.z, torch.full_like(z0, problems.COSINE), atol=1e-5, rtol=0)
    batch = shape[0] if shape else 1
    assert solution.stats.status.shape == (batch,)
    assert solution.stats.abs_trace.shape[0] == batch


@pytest.mark.parametrize("name", NAMES)
def test_every_structure(name: str) -> None:
    a, b = torch.zeros(3, 4), torch.zeros(3, 2, 2)

    def f(u: Tensor, v: Tensor) -> list[Tensor]:
        mix = 0.3 * u.view(3, 2, 2) - 0.4 * v
        return [torch.tanh(0.5 * u + v.flatten(1) * 0.2 + 1), torch.cos(mix)]

    stop = StopRule(100, 1e-6)
    u, v = run(name, f, (a, b), stop).z
    for structure in ([a, b], (a, b)):
        solution = run(name, f, structure, stop).z
        assert type(solution) is type(structure)
        torch.testing.assert_close(list(solution), [u, v])
    named = run(
        name,
        lambda z: dict(zip("ba", f(z["a"], z["b"])[::-1], strict=True)),
        {"a": a, "b": b},
        stop,
    ).z
    torch.testing.assert_close([named["a"], named["b"]], [u, v])
    torch.testing.assert_close(f(u, v), [u, v], atol=1e-5, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_nothing_of_the_callers_is_changed_and_no_graph_is_built(name: str) -> None:
    f, z0 = problems.tanh_layer()
    z0.requires_grad_()
    before = z0.detach().clone()
    solution = run(name, f, z0, StopRule(20, 1e-9))
    assert torch.equal(z0, before)
    assert not solution.z.requires_grad
    assert z0.grad is None


@pytest.mark.parametrize("name", NAMES)
def test_is_deterministic_and_keeps_nothing_between_calls(name: str) -> None:
    solver, stop = SOLVERS[name](), StopRule(15, 0.0)
    f, z0 = problems.tanh_layer(gain=0.95)
    first = solve(f, z0, solver, stop)
    solve(f, torch.ones_like(z0), solver, stop)
    again = solve(f, z0, solver, stop)
    assert torch.equal(first.z, again.z)
    assert torch.equal(first.stats.abs_trace, again.stats.abs_trace)


@pytest.mark.parametrize("name", NAMES)
def test_solves_may_be_nested(name: str) -> None:
    inner_f, inner_z0 = problems.tanh_layer(batch=2, d=4)
    stop = StopRule(100, 1e-11)

    def f(z: Tensor) -> Tensor:
        inner = run("fixed_point_iter", lambda y: inner_f(y + 0.1 * z), inner_z0, stop).z
        return 0.5 * inner

    solution = run(name, f, inner_z0, StopRule(60, 1e-8), SOLVERS[name].options_without_jvp)
    torch.testing.assert_close(f(solution.z), solution.z, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", NAMES)
def test_solves_a_map_without_forward_mode(name: str) -> None:
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    options = SOLVERS[name].options_without_jvp
    solution = run(name, problems.opaque_cosine, z0, StopRule(60, 1e-8), options)
    torch.testing.assert_close(solution.z, z0 + problems.COSINE, atol=1e-7, rtol=0)


@pytest.mark.parametrize("name", [n for n in NAMES if n != "auto"])
def test_a_chain_goes_on_from_every_solver_that_returns_residuals(name: str) -> None:
    f, z0 = problems.tanh_layer()
    chain = (name, "broyden")
    if not SOLVERS[name].chains:
        with pytest.raises(ValueError, match=f"{name!r} returns no residuals"):
            Auto(chain=chain)
        return
    solution = solve(f, z0, Auto(chain=chain), StopRule(60, 1e-10))
    torch.testing.assert_close(f(solution.z), solution.z, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", WATCHING)
def test_the_statistics_are_those_of_the_returned_state(name: str) -> None:
    """A solver that answers with images reports |f(z) - z| at the point before the answer."""
    f, z0 = problems.tanh_layer(gain=0.9)
    solution = run(name, f, z0, StopRule(60, 1e-7, "rel"), record=(60,))
    stats = solution.stats
    assert stats.converged.all()
    assert (stats.rel_lowest <= 1e-7).all()
    at_answer = (f(solution.z) - solution.z).norm(dim=1)
    if SOLVERS[name].answers_point:
        torch.testing.assert_close(at_answer, stats.abs_lowest)
    assert (at_answer <= stats.abs_lowest * 1.5 + 1e-14).all()
    n = stats.abs_trace.shape[1]
    assert stats.rel_trace.shape == (4, n)
    assert (stats.abs_trace[:, -1] == stats.abs_lowest).all()
    assert (stats.nstep <= stats.nfe).all()


@pytest.mark.parametrize("name", NAMES)
def test_non_contiguous_starts_and_images_work(name: str) -> None:
    W = problems.contraction(0.5, 6)
    x = torch.randn(6, 4, dtype=torch.float64)
    z0 = torch.zeros(6, 4, dtype=torch.float64).mT  # (4, 6) with strides (1, 4)
    solution = run(name, lambda z: torch.tanh(W @ z.mT + x).mT, z0, StopRule(80, 1e-10))
    dense = run(name, lambda z: torch.tanh(z @ W.mT + x.mT), z0.contiguous(), StopRule(80, 1e-10))
    torch.testing.assert_close(solution.z, dense.z, atol=1e-9, rtol=0)


@pytest.mark.parametrize("name", WATCHING)
def test_finished_samples_leave_the_batch_when_asked(name: str) -> None:
    rates = torch.tensor([0.1, 0.2, 0.3, 0.95], dtype=torch.float64)[:, None]
    x = torch.randn(4, 5, dtype=torch.float64)

    def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        sizes.append(len(z))
        return torch.tanh(rate * z + x)

    sizes: list[int] = []
    stop = StopRule(200, 1e-10)
    whole = run(name, f, torch.zeros_like(x), stop, args=(rates, x))
    assert set(sizes) == {4}
    sizes.clear()
    compact = run(name, f, torch.zeros_like(x), stop, args=(rates, x), compact=True, record=(3, 9))
    torch.testing.assert_close(compact.z, whole.z, atol=1e-9, rtol=0)
    assert torch.equal(compact.stats.status, whole.stats.status)
    assert compact.stats.abs_trace.shape[0] == 4
    assert compact.stats.abs_trace.isfinite().all()
    assert compact.states[0].shape == x.shape
    assert min(sizes) < 4
    assert sum(sizes) < 4 * whole.stats.nfe


@pytest.mark.parametrize("name", WATCHING)
def test_a_failure_warns_once_per_call_site_and_names_what_happened(name: str) -> None:
    f, z0 = problems.tanh_layer(gain=0.99)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("default")
        for x in (z0, z0 + 1):
            solve(f, x, make_solver(name, {}), StopRule(2, 1e-12), on_failure="warn")
    (warning,) = [w for w in caught if w.category is ConvergenceWarning]
    assert warning.filename == __file__
    assert "MAX_ITER: the budget" in str(warning.message)


@pytest.mark.parametrize("name", WATCHING)
def test_a_failure_can_raise_or_be_ignored(name: str, recwarn: pytest.WarningsRecorder) -> None:
    from torchdeq import ConvergenceError

    f, z0 = problems.tanh_layer(gain=0.99)
    with pytest.raises(ConvergenceError, match=r"MAX_ITER 4; 2 evaluations"):
        run(name, f, z0, StopRule(2, 1e-12), on_failure="raise")
    run(name, f, z0, StopRule(2, 1e-12))
    run(name, f, z0, StopRule(2, 0.0), on_failure="raise")  # without a tolerance nothing fails
    run(name, f, z0, StopRule(0), on_failure="raise")
    assert not recwarn.list


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("parts", [1, 2])
def test_f_gets_the_dtype_of_the_state(name: str, parts: int) -> None:
    dtypes: set[torch.dtype] = set()

    def f(*z: Tensor) -> Any:
        dtypes.update(t.dtype for t in z)
        images = tuple(torch.cos(t) for t in z)
        return images[0] if parts == 1 else images

    z0 = tuple(torch.zeros(3, 4, dtype=torch.bfloat16) for _ in range(parts))
    solver = SOLVERS[name](**SOLVERS[name].options_without_jvp)
    stop = StopRule(12, 1e-9)
    solve(f, z0[0] if parts == 1 else z0, solver, stop, on_failure="ignore")
    assert dtypes == {torch.bfloat16}
