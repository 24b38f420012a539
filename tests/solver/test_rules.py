"""Properties of single update rules, beyond the contracts of all solvers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq.packed import PackedFn
from torchdeq.packing import Packing
from torchdeq.solver import (
    Anderson,
    Auto,
    Broyden,
    FixedPointIter,
    NewtonKrylov,
    SimpleFixedPointIter,
    StopRule,
    low_rank,
    solve,
)
from torchdeq.solver.base import FixedPointFn, Iterate
from torchdeq.solver.image_window import ImageWindow
from torchdeq.solver.line_search import backtrack
from torchdeq.solver.low_rank import LowRank


def nfe(f: Any, z0: Tensor, solver: Any, tol: float = 1e-8, budget: int = 300) -> int:
    stats = solve(f, z0, solver, StopRule(budget, tol, "rel"), on_failure="ignore").stats
    return stats.nfe if stats.converged.all() else 10 * budget


# --- plain iteration ------------------------------------------------------------------------------


def test_damping_moves_part_of_the_way() -> None:
    f, z0 = problems.tanh_layer()
    solution = solve(f, z0, FixedPointIter(tau=0.25), StopRule(2, 0.0, return_final=True))
    z1 = 0.75 * z0 + 0.25 * f(z0)
    torch.testing.assert_close(solution.z, 0.75 * z1 + 0.25 * f(z1))


@pytest.mark.parametrize("kind", [FixedPointIter, SimpleFixedPointIter])
@pytest.mark.parametrize("tol", [0.0, 1e-6])
def test_a_sample_alone_takes_exactly_the_steps_it_takes_in_a_batch(kind: Any, tol: float) -> None:
    """Nothing in plain iteration is summed over the batch: every digit is the same."""
    f, rates, x = problems.rated_samples()
    ask: Any = {"solver": kind(), "stop": StopRule(60, tol), "on_failure": "ignore"}
    together = solve(f, torch.zeros_like(x), args=(rates, x), **ask)
    for i in range(5):
        alone = solve(f, torch.zeros(1, 6).double(), args=(rates[i, None], x[i, None]), **ask)
        assert torch.equal(alone.z[0], together.z[i])
        assert alone.stats.nstep[0] == together.stats.nstep[i]


@pytest.mark.parametrize("tau", [0.0, -1.0, 1.5])
def test_damping_lies_between_zero_and_one(tau: float) -> None:
    for kind in (FixedPointIter, Anderson):
        with pytest.raises(ValueError, match=r"tau must lie in \(0, 1\]"):
            kind(tau=tau)


# --- Anderson -------------------------------------------------------------------------------------


def test_anderson_weights_solve_the_constrained_least_squares_problem() -> None:
    window = ImageWindow(torch.zeros(3, 9, dtype=torch.float64), 4, 0.0, 0.0, False)
    Z, F = torch.randn(2, 6, 3, 9, dtype=torch.float64)
    for z, fz in zip(Z, F, strict=True):  # six iterates through four slots
        window.insert(Iterate(z, fz))
    G = (F - Z)[2:]
    for i in range(3):
        g = G[:, i]  # min |sum a_j g_j| with sum a = 1, by elimination of the last weight
        d = (g[:-1] - g[-1]).mT
        a = torch.linalg.lstsq(d, -g[-1][:, None]).solution[:, 0]
        weights = torch.cat((a, 1 - a.sum(0, keepdim=True)))
        expected = (weights[:, None] * F[2:, i]).sum(0)
        torch.testing.assert_close(window.mix(1.0)[i], expected)
        damped = (weights[:, None] * (0.4 * F[2:, i] + 0.6 * Z[2:, i])).sum(0)
        torch.testing.assert_close(window.mix(0.4)[i], damped)


@pytest.mark.parametrize("type_", [1, 2])
def test_anderson_with_a_full_window_ends_after_as_many_steps_as_dimensions(type_: int) -> None:
    f, z0, exact = problems.affine(problems.contraction(0.95, 6))
    solution = solve(f, z0, Anderson(m=8, type=type_, lam=0.0), StopRule(9, 0.0))
    torch.testing.assert_close(solution.z, exact, atol=1e-7, rtol=0)


@pytest.mark.parametrize("scale", [1e-6, 1e6])
def test_anderson_does_not_depend_on_the_scale_of_the_state(scale: float) -> None:
    f, z0 = problems.tanh_layer(gain=0.95)
    assert nfe(f, z0, Anderson()) == nfe(lambda z: scale * f(z / scale), scale * z0, Anderson())


def test_anderson_beats_plain_iteration_on_hard_contractions() -> None:
    f, z0, _ = problems.affine(problems.rotation(0.97))
    assert nfe(f, z0, Anderson()) < nfe(f, z0, FixedPointIter()) / 3


@pytest.mark.parametrize("seed", range(20))
def test_anderson_is_hardly_ever_behind_plain_iteration(seed: int) -> None:
    f, z0 = problems.tanh_layer(gain=0.95, d=32, seed=seed, dtype=torch.float32)
    for tol in (1e-5, 1e-6):
        assert nfe(f, z0, Anderson(), tol) <= 1.1 * nfe(f, z0, FixedPointIter(), tol) + 2


def test_a_window_of_one_is_plain_iteration() -> None:
    f, z0 = problems.tanh_layer()
    stop = StopRule(12, 0.0)
    plain = solve(f, z0, FixedPointIter(), stop).z
    for type_ in (1, 2):
        torch.testing.assert_close(solve(f, z0, Anderson(m=1, type=type_), stop).z, plain)


@pytest.mark.parametrize("type_", [1, 2])
def test_restarting_forgets_the_window(type_: int) -> None:
    f, z0 = problems.tanh_layer(gain=0.9)
    once = solve(f, z0, Anderson(m=4, restart=True, type=type_), StopRule(4, 0.0), (4,))
    fresh = solve(f, z0, Anderson(m=4, type=type_), StopRule(4, 0.0))
    torch.testing.assert_close(once.z, fresh.z)
    assert nfe(f, z0, Anderson(m=4, restart=True, type=type_)) < 60


@pytest.mark.parametrize("type_", [1, 2])
def test_the_safeguard_answers_growth_with_a_plain_step(type_: int) -> None:
    """The second mixed step goes far off at a kink; with a safeguard, the window is emptied."""

    def f(z: Tensor) -> Tensor:
        return torch.where(z > 1.5, 0.2 * z + 3.0, -0.9 * z + 0.5)

    z0 = torch.tensor([[0.0], [1.4]], dtype=torch.float64)
    stop = StopRule(3, 0.0, return_final=True)
    guarded = solve(f, z0, Anderson(safeguard=1e-3, type=type_), stop)
    z = z0
    for _ in range(3):  # any growth at all, hence every step after the first, is plain
        z = f(z)
    torch.testing.assert_close(guarded.z, z)
    loose = solve(f, z0, Anderson(safeguard=1e9, type=type_), stop)
    torch.testing.assert_close(loose.z, solve(f, z0, Anderson(type=type_), stop).z)


def test_the_absolute_ridge_is_that_of_the_published_release() -> None:
    """With 0.1.0's lam as ridge, one mixing of two iterates gives its weights."""
    window = ImageWindow(torch.zeros(2, 5, dtype=torch.float64), 2, 0.0, 1e-2, False)
    Z, F = torch.randn(2, 2, 2, 5, dtype=torch.float64)
    for z, fz in zip(Z, F, strict=True):
        window.insert(Iterate(z, fz))
    G = (F - Z).permute(1, 0, 2)
    H = torch.zeros(2, 3, 3, dtype=torch.float64)
    H[:, 0, 1:] = H[:, 1:, 0] = 1
    H[:, 1:, 1:] = G @ G.mT + 1e-2 * torch.eye(2)
    alpha = torch.linalg.solve(H, torch.tensor([1.0, 0, 0], dtype=torch.float64).expand(2, 3))[
        :, 1:
    ]
    torch.testing.assert_close(window.mix(1.0), (alpha[:, :, None] * F.permute(1, 0, 2)).sum(1))


@pytest.mark.parametrize(
    "options",
    [
        {"m": 0},
        {"m": 2.5},
        {"lam": -1.0},
        {"lam": float("nan")},
        {"ridge": -1.0},
        {"type": 3},
        {"safeguard": 0.0},
    ],
)
def test_anderson_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Anderson(**options)


# --- Broyden --------------------------------------------------------------------------------------


def dense(H: LowRank) -> Tensor:
    """Return the operator as matrices, (B, D, D), built term by term."""
    n = H.rank
    U, V = H.U[:n].permute(1, 0, 2), H.V[:n].permute(1, 0, 2)
    return -torch.eye(U.shape[2], dtype=U.dtype) + torch.einsum("bni,bnj->bij", U, V)


@pytest.mark.parametrize("update", ["good", "bad"])
@pytest.mark.parametrize("limit", [2, 3, None])
def test_broyden_satisfies_the_secant_equation_even_when_it_starts_over(
    update: Any, limit: int | None
) -> None:
    f, z0 = problems.tanh_layer(batch=2, d=6)
    solver = Broyden(update=update, l_thres=limit)
    fn = FixedPointFn(PackedFn(Packing(z0), f), 20)
    it = solver.at(fn, z0)
    state = solver.init(it)
    for _ in range(7):
        before = it
        it, state = solver.step(fn, it, state)
        dz, dg = it.z - before.z, it.residual - before.residual
        H = dense(state.H)
        torch.testing.assert_close((H @ dg[:, :, None])[:, :, 0], dz)
        torch.testing.assert_close(state.Hg, (H @ it.residual[:, :, None])[:, :, 0])


@pytest.mark.parametrize("update", ["good", "bad"])
def test_broyden_follows_the_dense_formula(update: Any) -> None:
    f, z0 = problems.tanh_layer(batch=1, d=5)
    solution = solve(f, z0, Broyden(update=update, l_thres=None, alpha=0.8), StopRule(7, 0.0), (7,))
    z, H = z0[0], -torch.eye(5, dtype=torch.float64)
    g = f(z[None])[0] - z
    best, lowest = z, g.norm()
    for _ in range(6):
        new = z - 0.8 * H @ g
        new_g = f(new[None])[0] - new
        dz, dg = new - z, new_g - g
        v = H.mT @ dz if update == "good" else dg
        H = H + torch.outer(dz - H @ dg, v) / (v @ dg)
        z, g = new, new_g
        if g.norm() < lowest:
            best, lowest = z, g.norm()
    torch.testing.assert_close(solution.z[0], best)


def test_products_with_the_operator_and_its_transpose() -> None:
    H = LowRank(torch.zeros(3, 7, dtype=torch.float64), None)
    for _ in range(20):  # past the first allocation
        H.make_room(remaining=40)
        H.U[H.rank], H.V[H.rank] = torch.randn(2, 3, 7, dtype=torch.float64)
        H.extend()
    x = torch.randn(3, 7, dtype=torch.float64)
    torch.testing.assert_close(H.matvec(x), (dense(H) @ x[:, :, None])[:, :, 0])
    torch.testing.assert_close(H.rmatvec(x), (dense(H).mT @ x[:, :, None])[:, :, 0])
    rows = torch.tensor([2, 0])
    torch.testing.assert_close(H.take(rows).matvec(x[rows]), H.matvec(x)[rows])


def test_broydens_memory_is_bounded_by_its_terms() -> None:
    f, z0 = problems.tanh_layer()
    solver = Broyden(l_thres=4)
    fn = FixedPointFn(PackedFn(Packing(z0), f), 30)
    it = solver.at(fn, z0)
    state = solver.init(it)
    for _ in range(20):
        it, state = solver.step(fn, it, state)
    assert state.H.U.shape[0] == 4


def test_broydens_memory_grows_with_its_terms_and_never_past_the_budget(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(low_rank, "_LITTLE", 0)  # small states get all rows at once
    f, z0 = problems.tanh_layer(gain=0.99)
    assert Broyden().l_thres is None  # the published default
    for budget in (2, 5, 9, 13, 40):
        fn, rows = FixedPointFn(PackedFn(Packing(z0), f), budget), []
        solver = Broyden()
        it = solver.at(fn, z0)
        state = solver.init(it)
        while fn.left:
            it, state = solver.step(fn, it, state)
            rows.append(len(state.H.U))
            assert state.H.rank <= rows[-1] <= max(16, 2 * state.H.rank)
        assert max(rows) == state.H.rank == budget - 1


@pytest.mark.parametrize("limit", [4, 10])
def test_limited_memory_costs_few_evaluations(limit: int) -> None:
    """Dropping only the oldest term, as is often done, does not converge at all here."""
    Q, _ = torch.linalg.qr(torch.randn(64, 64))
    W = Q @ torch.diag(torch.linspace(-0.95, 0.95, 64)) @ Q.mT
    x = 0.1 * torch.randn(32, 64)

    def f(z: Tensor) -> Tensor:
        return torch.tanh(z @ W + x)

    full = nfe(f, torch.zeros_like(x), Broyden(l_thres=None), 1e-6)
    assert nfe(f, torch.zeros_like(x), Broyden(l_thres=limit), 1e-6) <= 2.5 * full


def test_the_line_search_rescues_broyden_far_from_the_solution() -> None:
    """f(z) = z - atan(4 z): the whole step overshoots from a distant start."""
    z0 = torch.tensor([[20.0], [-3.0]], dtype=torch.float64)

    def f(z: Tensor) -> Tensor:
        return z - 12 * torch.atan(4 * z)

    solution = solve(f, z0, Broyden(ls=True, ls_tries=8), StopRule(200, 1e-9))
    assert solution.z.abs().max() < 1e-8


@pytest.mark.parametrize(
    "options",
    [{"l_thres": 0}, {"l_thres": 2.5}, {"alpha": 0.0}, {"update": "ugly"}, {"ls_tries": 0}],
)
def test_broyden_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        Broyden(**options)


# --- line search ----------------------------------------------------------------------------------


def test_backtracking_accepts_sample_by_sample_and_respects_the_budget() -> None:
    scale = torch.tensor([[1.0], [10.0], [1000.0]], dtype=torch.float64)
    z = torch.ones(3, 1, dtype=torch.float64)
    fn = FixedPointFn(PackedFn(Packing(z), lambda z: 2 * z), 50)  # g(z) = z, zero at the origin
    d = -scale * z
    point, image, g = backtrack(fn, z, d, z, tries=20)
    assert (g.abs() < z.abs()).all()
    torch.testing.assert_close(point[0], torch.zeros(1, dtype=torch.float64))
    torch.testing.assert_close(image - point, g)
    short = FixedPointFn(PackedFn(Packing(z), lambda z: 2 * z), 2)
    backtrack(short, z, d, z, tries=20)
    assert short.nfe == 2


def test_backtracking_shortens_a_step_that_is_not_finite() -> None:
    z = torch.ones(1, 1, dtype=torch.float64)
    fn = FixedPointFn(PackedFn(Packing(z), lambda z: z + torch.log(z + 0.5)), 20)
    point, _, g = backtrack(fn, z, torch.full_like(z, -2.0), torch.log(z + 0.5), tries=6)
    assert g.isfinite().all()
    assert g.abs() < torch.log(z + 0.5).abs()
    assert point.isfinite().all()


# --- Newton-Krylov --------------------------------------------------------------------------------


@pytest.mark.parametrize("jacobian", ["exact", "difference"])
def test_newton_solves_where_plain_iteration_diverges(jacobian: Any) -> None:
    f, z0 = problems.tanh_layer(gain=2.0, d=24)
    solution = solve(f, z0, NewtonKrylov(jacobian=jacobian), StopRule(600, 1e-9))
    torch.testing.assert_close(f(solution.z), solution.z, atol=1e-8, rtol=0)


def test_newton_converges_faster_than_linearly() -> None:
    f, z0 = problems.tanh_layer(gain=1.5)
    trace = solve(f, z0, NewtonKrylov(inner=40, eta=1e-3), StopRule(200, 1e-13)).stats.abs_trace
    late = trace[0][trace[0] < 1e-2]
    assert late[1] < late[0] ** 1.4


def test_newton_explains_a_missing_forward_mode() -> None:
    z0 = torch.zeros(2, 3, dtype=torch.float64)
    with pytest.raises((NotImplementedError, RuntimeError), match="jacobian='difference'"):
        solve(problems.opaque_cosine, z0, NewtonKrylov(), StopRule(30, 1e-8))
    solver = NewtonKrylov(jacobian="difference")
    solution = solve(problems.opaque_cosine, z0, solver, StopRule(60, 1e-8))
    torch.testing.assert_close(solution.z, torch.full_like(z0, problems.COSINE), atol=1e-7, rtol=0)


@pytest.mark.parametrize(
    "options", [{"inner": 0}, {"ls_tries": 0}, {"eta": 1.0}, {"jacobian": "?"}]
)
def test_newton_refuses_nonsense(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=next(iter(options))):
        NewtonKrylov(**options)


# --- auto -----------------------------------------------------------------------------------------


def test_the_chain_reruns_only_the_samples_that_failed() -> None:
    rates = torch.tensor([[0.1], [0.999], [-5.0], [0.2]], dtype=torch.float64)
    x = torch.ones(4, 3, dtype=torch.float64)
    sizes: list[int] = []

    def f(z: Tensor, rate: Tensor, x: Tensor) -> Tensor:
        sizes.append(len(z))
        return rate * z + x

    stop = StopRule(80, 1e-9)
    plain = solve(f, 0 * x, FixedPointIter(), stop, args=(rates, x), on_failure="ignore")
    assert plain.stats.converged.tolist() == [True, False, False, True]
    sizes.clear()
    solution = solve(f, 0 * x, Auto(), stop, args=(rates, x), compact=True)
    assert solution.stats.converged.all()
    torch.testing.assert_close(solution.z, x / (1 - rates), rtol=1e-6, atol=1e-8)
    assert sizes[0] == 4
    assert max(sizes[20:]) == 2
    easy = torch.tensor([0, 3])
    assert torch.equal(solution.z[easy], plain.z[easy])
    assert torch.equal(solution.stats.nstep[easy], plain.stats.nstep[easy])


def test_the_chain_never_returns_something_worse_than_an_earlier_link() -> None:
    f, z0 = problems.tanh_layer(gain=0.9)
    first = solve(f, z0, FixedPointIter(), StopRule(10, 0.0))
    chain = solve(f, z0, Auto(), StopRule(40, 0.0))
    assert (chain.stats.abs_lowest <= first.stats.abs_lowest).all()


def test_a_chain_of_ones_own() -> None:
    f, z0 = problems.tanh_layer(gain=0.9)
    solution = solve(f, z0, Auto(chain=("anderson",)), StopRule(20, 0.0))
    assert torch.equal(solution.z, solve(f, z0, Anderson(), StopRule(20, 0.0)).z)
    with pytest.raises(KeyError, match="did you mean 'anderson'"):
        Auto(chain=("andersen",))
    with pytest.raises(ValueError, match="own chain"):
        Auto(chain=("auto",))
    with pytest.raises(ValueError, match="at least one"):
        Auto(chain=())
