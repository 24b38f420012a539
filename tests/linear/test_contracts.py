"""What holds for every registered linear solver, against dense solves in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import problems
from torchdeq.linear import GMRES, LINEAR, BiCGStab
from torchdeq.solver import Status, StopRule

NAMES = list(LINEAR)
REL = StopRule(80, 1e-5, "rel")
KEEP = torch.tensor([0, 2])


class Batch:
    """Four systems of their own matrices, well conditioned: products, counted, and answers."""

    def __init__(self, dtype: torch.dtype = torch.float32, d: int = 10, rho: float = 0.6) -> None:
        Js = torch.stack([problems.contraction(rho, d, seed=i) for i in range(4)])
        self.A64 = torch.eye(d, dtype=torch.float64) - Js
        self.A = self.A64.to(torch.promote_types(dtype, torch.float32))
        generator = torch.Generator().manual_seed(3)
        self.b = torch.randn(4, d, generator=generator, dtype=torch.float64).to(dtype)
        self.calls = 0

    def __call__(self, v: Tensor) -> Tensor:
        self.calls += 1
        return torch.einsum("bij,bj->bi", self.A[: len(v)], v.to(self.A.dtype)).to(v.dtype)

    def exact(self, b: Tensor) -> Tensor:
        return torch.linalg.solve(self.A64[: len(b)], b.double().unsqueeze(2)).squeeze(2)


def _times(A: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda v: v @ A.mT


def error(x: Tensor, exact: Tensor) -> Tensor:
    """Each row relative to its own exact solution."""
    return (x.double() - exact).norm(dim=1) / exact.norm(dim=1)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
@pytest.mark.parametrize("where", ["b", "x0"])
def test_a_row_that_is_not_finite_gives_nan_and_harms_no_other(
    name: str, bad: float, tol: float, where: str
) -> None:
    batch, stop = Batch(), StopRule(40, tol, "rel")
    b, x0 = batch.b, 0.1 * batch.b if where == "x0" else None
    clean = LINEAR[name]().solve(batch, b, stop, x0)
    b, x0 = b.clone(), None if x0 is None else x0.clone()
    (b if x0 is None else x0)[1, 3] = bad
    seen: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        seen.append(v)
        return batch(v)

    x, stats = LINEAR[name]().solve(product, b, stop, x0)
    assert x[1].isnan().all()
    assert stats.status[1] == Status.NONFINITE
    assert torch.equal(x[KEEP], clean.x[KEEP])
    assert torch.equal(stats.status[KEEP], clean.stats.status[KEEP])
    assert all(v.isfinite().all() for v in seen)  # nothing that could spread is ever fed to A


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_every_row_is_right_relative_to_its_own_right_hand_side(name: str, tol: float) -> None:
    batch = Batch()
    b = batch.b * torch.tensor([1.0, 1e-10, 1e-25, 1e20])[:, None]
    x, stats = LINEAR[name]().solve(batch, b, StopRule(40, tol, "rel"))
    assert (error(x, batch.exact(b)) < 1e-4).all()
    true = (b.double() - torch.einsum("bij,bj->bi", batch.A64, x.double())).norm(dim=1)
    assert (stats.abs_lowest <= 1e-5 * b.double().norm(dim=1)).all()
    assert (true <= 2e-5 * b.double().norm(dim=1)).all()
    if tol:
        assert stats.converged.all()
        assert stats.nfe < 40


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("every", [1, 4])
@pytest.mark.parametrize("tol", [0.0, 1e-5])
def test_rows_are_independent(name: str, every: int, tol: float) -> None:
    """Easy and hard systems: each gets what it gets alone, however often the device is read."""
    rates = torch.tensor([0.05, 0.9, 0.3, 0.6], dtype=torch.float64)[:, None, None]
    J = rates * torch.stack([problems.contraction(1.0, 8, seed=i) for i in range(4)])
    b = torch.randn(4, 8, dtype=torch.float64)
    stop = StopRule(60, tol, "rel", check_every=every)

    def product(J: Tensor) -> Callable[[Tensor], Tensor]:
        return lambda v: v - torch.einsum("bij,bj->bi", J, v)

    together = LINEAR[name]().solve(product(J), b, stop)
    for i in range(4):
        alone = LINEAR[name]().solve(product(J[i : i + 1]), b[i : i + 1], stop)
        torch.testing.assert_close(alone.x[0], together.x[i], atol=1e-10, rtol=0)
        assert alone.stats.status[0] == together.stats.status[i]
        if tol:
            assert alone.stats.nstep[0] == together.stats.nstep[i]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("every", [1, 3, 4, 100])
@pytest.mark.parametrize("budget", [0, 1, 2, 5, 13, 80])
@pytest.mark.parametrize("known", [False, True])
def test_reading_less_often_never_exceeds_the_budget(
    name: str, every: int, budget: int, known: bool
) -> None:
    batch = Batch(torch.float64)
    first = batch(batch.b) if known else None
    batch.calls = 0
    stop = StopRule(budget, 1e-6, "rel", check_every=every)
    x, stats = LINEAR[name]().solve(batch, batch.b, stop, first=first)
    assert batch.calls == stats.nfe <= budget
    often = LINEAR[name]().solve(batch, batch.b, StopRule(budget, 1e-6, "rel"), first=first)
    assert stats.nfe >= often.stats.nfe
    if budget == 80:
        assert stats.converged.all()
        assert (error(x, batch.exact(batch.b)) < 1e-5).all()
        if every < 10:
            assert stats.nfe <= often.stats.nfe + 3 * every


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("scale", [1.0, 1e-20])
def test_a_first_product_that_is_known_is_not_made_again(name: str, scale: float) -> None:
    batch = Batch()
    b = scale * batch.b
    plain = LINEAR[name]().solve(batch, b, REL)
    first = batch(b)
    batch.calls = 0
    seen: list[Tensor] = []

    def product(v: Tensor) -> Tensor:
        seen.append(v / v.norm(dim=1, keepdim=True))
        return batch(v)

    x, stats = LINEAR[name]().solve(product, b, REL, first=first)
    torch.testing.assert_close(x, plain.x, rtol=1e-5, atol=0)
    assert batch.calls == stats.nfe == plain.stats.nfe - 1
    unit = b / b.norm(dim=1, keepdim=True)
    assert not any((v - unit).abs().max() < 1e-3 for v in seen)


@pytest.mark.parametrize("name", NAMES)
def test_a_first_product_goes_with_a_zero_start_only(name: str) -> None:
    batch = Batch()
    with pytest.raises(ValueError, match="drop x0 or first"):
        LINEAR[name]().solve(batch, batch.b, REL, batch.b, first=batch.b)
    with pytest.raises(ValueError, match=r"first must have the shape of b, \(4, 10\), got \(4,"):
        LINEAR[name]().solve(batch, batch.b, REL, first=batch.b[:, :2])
    with pytest.raises(ValueError, match="x0 must have the shape of b"):
        LINEAR[name]().solve(batch, batch.b, REL, batch.b[:2])


@pytest.mark.parametrize("name", NAMES)
def test_zero_rows_cost_nothing_and_are_solved_by_zero(name: str) -> None:
    batch = Batch()
    b = batch.b.clone()
    b[1] = 0
    x, stats = LINEAR[name]().solve(batch, b, REL)
    assert not x[1].any()
    assert stats.converged.all()
    assert stats.nstep[1] == 0
    assert (error(x[KEEP], batch.exact(b)[KEEP]) < 1e-4).all()
    batch.calls = 0
    for stop in (REL, StopRule(30, 1e-3), StopRule(30, None, rtol=1e-4, atol=0.0)):
        x, stats = LINEAR[name]().solve(batch, 0 * b, stop)
        assert batch.calls == stats.nfe == 0
        assert stats.converged.all()


@pytest.mark.parametrize("name", NAMES)
def test_a_start_beside_a_zero_row_is_told_its_true_residual(name: str) -> None:
    """Nothing is small relative to zero; the statistics still say how far each system came."""
    batch = Batch()
    b, x0 = torch.zeros_like(batch.b), batch.b * torch.tensor([[0.1], [1.0], [2.0], [50.0]])
    x, stats = LINEAR[name]().solve(batch, b, StopRule(3, 1e-5, "rel"), x0)
    assert (stats.status == Status.MAX_ITER).all()
    torch.testing.assert_close(stats.abs_lowest, batch(x).norm(dim=1))


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("stop", [REL, StopRule(80, 1e-5), StopRule(80, None, rtol=1e-5, atol=0.0)])
def test_a_whole_batch_may_be_one_system(name: str, stop: StopRule) -> None:
    """Rows that depend on each other, given as (1, B D)."""
    M = problems.contraction(0.7, 40)
    A = torch.eye(40, dtype=torch.float64) - M
    b = torch.randn(1, 40, dtype=torch.float64)
    x, stats = LINEAR[name]().solve(lambda v: v @ A.mT, b, stop)
    torch.testing.assert_close(x[0], torch.linalg.solve(A, b[0]), atol=1e-3, rtol=0)
    assert stats.converged.tolist() == [True]


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tol", [0.0, 1e-6])
@pytest.mark.parametrize("budget", [1, 2, 3, 10, 60])
def test_singular_systems_give_bounded_answers_and_fail(
    name: str, dtype: torch.dtype, tol: float, budget: int
) -> None:
    for seed in range(12):
        generator = torch.Generator().manual_seed(seed)
        Q, _ = torch.linalg.qr(torch.randn(8, 8, generator=generator, dtype=torch.float64))
        spectrum = torch.linspace(0.0, 2.0, 8, dtype=torch.float64)  # I - J, J with eigenvalue 1
        A = (Q @ torch.diag(spectrum) @ Q.mT).to(dtype)
        b = torch.randn(3, 8, generator=generator, dtype=torch.float64).to(dtype)
        x, stats = LINEAR[name]().solve(_times(A), b, StopRule(budget, tol, "rel"))
        residual = (b - x @ A.mT).norm(dim=1)
        most = max(1e5, torch.finfo(dtype).eps ** -0.5)
        assert (x.norm(dim=1) <= most * b.norm(dim=1)).all()
        assert (residual <= 1.001 * b.norm(dim=1)).all()  # never worse than the start
        assert stats.failed.all()


@pytest.mark.parametrize("name", NAMES)
def test_the_answer_is_never_worse_than_the_start(name: str) -> None:
    A = torch.diag(torch.tensor([1e-9, -3.0, 5.0, 0.0]))  # nothing for a series
    b, x0 = torch.ones(1, 4), torch.tensor([[0.0, -0.3, 0.2, 7.0]])
    for budget in range(1, 12):
        x, stats = LINEAR[name]().solve(lambda v: v @ A, b, StopRule(budget, 1e-6, "rel"), x0)
        assert (b - x @ A).norm() <= (b - x0 @ A).norm() * (1 + 1e-6)
        assert stats.failed.all()


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("half", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("rho", [0.5, 0.8])
def test_products_of_low_precision_end_at_their_floor(
    name: str, half: torch.dtype, rho: float
) -> None:
    """A vjp under autocast: the residual stalls where its rounding is, and is the true one."""
    W, b = problems.contraction(rho, 64).to(half), torch.randn(8, 64)

    def product(v: Tensor) -> Tensor:
        return v - (v.to(half) @ W).float()

    eps = torch.finfo(half).eps
    x, stats = LINEAR[name]().solve(product, b, StopRule(60, 1e-8, "rel"), eps=eps)
    assert ((stats.status == Status.STALLED) | stats.converged).all()
    assert (stats.status == Status.STALLED).sum() >= 4
    assert stats.nfe < {"gmres": 26, "neumann": 45, "bicgstab": 60}[name]
    true = (b - product(x)).norm(dim=1)
    torch.testing.assert_close(stats.abs_lowest, true, rtol=1e-3, atol=1e-7)
    assert (true <= eps * b.norm(dim=1)).all()


@pytest.mark.parametrize("name", NAMES)
def test_a_tolerance_above_the_floor_is_met(name: str) -> None:
    batch = Batch()
    _, stats = LINEAR[name]().solve(batch, batch.b, REL, eps=torch.finfo(torch.bfloat16).eps)
    assert stats.converged.all()  # eps is the worst that may be, not what is


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_solved_in_single(name: str, dtype: torch.dtype) -> None:
    batch = Batch(dtype, rho=0.4)
    x, _ = LINEAR[name]().solve(batch, batch.b, StopRule(40, 1e-2, "rel"))
    assert x.dtype == dtype
    assert (error(x, batch.exact(batch.b)) < 0.05).all()


@pytest.mark.parametrize("name", NAMES)
def test_goals_and_starts_are_honoured_row_by_row(name: str) -> None:
    batch = Batch(torch.float64, rho=0.8)
    goal = torch.tensor([1.0, 1e-2, 1e-5, 1e-9], dtype=torch.float64)
    x, stats = LINEAR[name]().solve(batch, batch.b, StopRule(120, None), goal=goal)
    residual = (batch.b - batch(x)).norm(dim=1)
    assert (residual <= goal).all()
    assert (residual[:2] > 1e-9).all()
    near = batch.exact(batch.b) + 1e-7
    batch.calls = 0
    x, stats = LINEAR[name]().solve(batch, batch.b, StopRule(120, 1e-5, "rel"), near)
    assert batch.calls == stats.nfe == 1
    assert torch.equal(x, near)


@pytest.mark.parametrize("name", NAMES)
def test_a_root_mean_square_tolerance_means_the_same_at_every_size(name: str) -> None:
    def product(v: Tensor) -> Tensor:
        return v - 0.5 * v.flip(1)

    found = [
        LINEAR[name]().solve(product, torch.ones(2, d), StopRule(60, 1e-3, norm="rms"))
        for d in (4, 4000)
    ]
    assert found[0].stats.nfe == found[1].stats.nfe
    torch.testing.assert_close(found[0].stats.abs_lowest, found[1].stats.abs_lowest)
    assert found[0].stats.converged.all()
    assert (found[1].stats.abs_lowest <= 1e-3).all()
    torch.testing.assert_close(found[1].stats.abs_trace[:, 0], torch.ones(2))


def test_gmres_tells_the_true_residual_where_its_recurrence_is_refuted() -> None:
    """A product that lies: the recurrence sees a small residual that is not there."""
    batch = Batch(torch.float64)
    calls = 0

    def lying(v: Tensor) -> Tensor:
        nonlocal calls
        calls += 1
        return batch(v) * (1.05 if calls == 2 else 1.0)

    x, stats = GMRES().solve(lying, batch.b, StopRule(9, 1e-3, "rel"))
    true = (batch.b - batch(x)).norm(dim=1)
    torch.testing.assert_close(stats.abs_lowest, true, rtol=0.2, atol=0)


@pytest.mark.parametrize("budget", [1, 2, 3, 5, 9])
def test_bicgstab_does_not_follow_the_null_space(budget: int) -> None:
    """f(z) = z: the adjoint system is 0 x = b, up to rounding."""
    Q, _ = torch.linalg.qr(torch.randn(6, 6, dtype=torch.float64))
    A = torch.eye(6, dtype=torch.float64) - Q @ Q.mT
    b = torch.ones(2, 6, dtype=torch.float64)
    for tol in (0.0, 1e-6):
        x, stats = BiCGStab().solve(lambda v: v @ A, b, StopRule(budget, tol, "rel"))
        assert (x.abs() <= 1e8).all()
        assert stats.failed.all()


class Reads(torch.overrides.TorchFunctionMode):
    """Counts the tensors that are looked at, or moved to the host."""

    names = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero", "to_host")
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Moves from a device to the host; the host's own memory passes for that of a device."""
    from torchdeq import numbers
    from torchdeq.linear import gmres

    moved: list[int] = []

    def counted(t: Tensor) -> Tensor:
        moved.append(t.numel())
        return numbers.to_host(t)

    monkeypatch.setattr(gmres, "to_host", counted)
    monkeypatch.setattr(numbers, "reads_are_free", lambda device: False)
    return moved


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("tol", [0.0, None])
def test_without_a_tolerance_nothing_is_read(
    name: str, tol: float | None, transfers: list[int]
) -> None:
    batch = Batch()
    with Reads() as reads:
        _, stats = LINEAR[name]().solve(batch, batch.b, StopRule(40, tol))
        assert stats.status.shape == (4,)
    assert reads.count == len(transfers) == 0
    assert stats.nfe == 40


@pytest.mark.parametrize("every", [1, 2, 5])
def test_gmres_moves_one_tensor_per_check(every: int, transfers: list[int]) -> None:
    batch = Batch(torch.float64, d=32, rho=0.95)
    _, stats = GMRES().solve(batch, batch.b, StopRule(26, 1e-13, "rel", check_every=every))
    assert stats.nfe == 26
    assert len(transfers) == 1 + -(-25 // every)  # the sizes at the start, then one per check


@pytest.mark.parametrize("name", ["neumann", "bicgstab"])
def test_others_read_once_a_check(name: str, transfers: list[int]) -> None:
    batch = Batch(torch.float64, d=32, rho=0.95)
    counts = []
    for every in (1, 4):
        with Reads() as reads:
            stop = StopRule(33, 1e-13, "rel", check_every=every)
            LINEAR[name]().solve(batch, batch.b, stop)
        counts.append(reads.count)
    assert counts[0] <= 34
    assert counts[1] <= 10
