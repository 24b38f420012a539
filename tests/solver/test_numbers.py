"""Norms over the whole range of a precision, and devices without float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests import problems
from tests.linear.systems import error, times
from torchdeq import numbers
from torchdeq.linear import LINEAR, gmres
from torchdeq.numbers import has_double, row_norm, small_dtype, unit_scale
from torchdeq.solver import SOLVERS, Anderson, StopRule, make_solver, solve

KINDS = {
    "host": (True, True),
    "device": (False, True),  # reading waits
    "no float64": (False, False),
}


@pytest.fixture(params=list(KINDS))
def _kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    free, double = KINDS[request.param]
    monkeypatch.setattr(numbers, "reads_are_free", lambda device: free)
    monkeypatch.setattr(numbers, "has_double", lambda device: double)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("d", [1, 7, 20_000])
def test_row_norms_are_right_over_the_whole_range(dtype: torch.dtype, d: int) -> None:
    """Compare with a float64 sum of rows that a power of two scales to a norm near 1."""
    powers = {torch.float16: 12, torch.bfloat16: 110, torch.float32: 110, torch.float64: 1000}
    p = powers[dtype]
    exponents = torch.tensor([-p, -p // 2, 0, p // 2, p], dtype=torch.float64)
    rows = torch.rand(5, d, dtype=torch.float64) + 0.5
    t = (rows * 2.0 ** exponents[:, None]).to(dtype)
    near_one = t.double() * 2.0 ** -exponents[:, None]
    expected = near_one.square().sum(1).sqrt() * 2.0**exponents
    norm = row_norm(t)
    assert norm.dtype == torch.promote_types(dtype, torch.float32)
    torch.testing.assert_close(norm.double() / expected, torch.ones(5).double(), rtol=0, atol=2e-5)
    assert torch.equal(row_norm(t, keepdim=True), norm[:, None])
    torch.testing.assert_close(row_norm(t.expand(3, 5, d)), norm.expand(3, 5))


@pytest.mark.usefixtures("_kind")
def test_row_norms_of_zero_nonfinite_and_empty_rows() -> None:
    t = torch.tensor([[0.0, 0.0], [torch.nan, 1.0], [torch.inf, 1.0], [-torch.inf, torch.inf]])
    norm = row_norm(t)
    assert norm[0] == 0
    assert norm[1].isnan()
    assert not norm[2:].isfinite().any()
    assert row_norm(torch.zeros(0, 3)).shape == (0,)
    assert row_norm(torch.zeros(3, 0)).tolist() == [0.0] * 3
    scale = unit_scale(torch.zeros(0, 3))
    assert scale is None or scale.shape == (0, 1)


@pytest.mark.usefixtures("_kind")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_norm_does_not_depend_on_other_rows(dtype: torch.dtype) -> None:
    t = torch.randn(40, 1000, dtype=dtype)
    alone = row_norm(t)
    t[0], t[1], t[2] = 0.0, 1e30, torch.nan
    assert torch.equal(row_norm(t)[3:], alone[3:])


@pytest.mark.usefixtures("_kind")
def test_a_scale_brings_rows_near_one_exactly() -> None:
    t = torch.tensor([[3e-30, 0.0], [0.0, 0.0], [2e25, 1.0], [torch.nan, 1.0], [5.0, 0.0]])
    scale = unit_scale(t)
    assert scale is not None
    lengths = row_norm(t * scale)
    assert ((lengths[[0, 2, 4]] >= 1) & (lengths[[0, 2, 4]] < 2.01)).all()
    assert scale[[1, 3]].tolist() == [[1.0], [1.0]]
    assert torch.equal(scale.log2(), scale.log2().round())


def test_ordinary_rows_need_no_scale_on_the_host() -> None:
    assert unit_scale(torch.randn(3, 4)) is None


def test_the_host_has_float64() -> None:
    assert has_double(torch.device("cpu"))
    assert small_dtype(torch.device("cpu")) == torch.float64


class Device(TorchDispatchMode):
    """A dispatch mode in which the CPU plays both the host and a device without float64.

    A tensor belongs to the host if it was moved there or was computed from tensors of the host. All
    other tensors belong to the device and must not be float64 (except 0-d tensors). An operation
    must not mix tensors of both.
    """

    def __init__(self) -> None:
        super().__init__()
        self.host: dict[int, Tensor] = {}  # keeps tensors alive, so that no id is used twice
        self.moving = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = [t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor) and t.dim()]
        out = func(*args, **(kwargs or {}))
        if self.moving:
            return out
        hosts = [id(t) in self.host for t in given]
        if any(hosts):
            assert all(hosts), f"{func} mixes tensors of the host and of the device"
            for t in tree_leaves(out):
                if isinstance(t, Tensor):
                    self.host[id(t)] = t
            return out
        for t in tree_leaves(out):
            if isinstance(t, Tensor) and t.dim():
                assert t.dtype != torch.float64, f"{func} makes float64 on a device without it"
        return out

    def to_host(self, t: Tensor) -> Tensor:
        assert id(t) not in self.host
        self.moving = True
        moved = t.to(torch.float64)
        self.moving = False
        self.host[id(moved)] = moved
        return moved

    def from_host(self, t: Tensor, like: Tensor) -> Tensor:
        self.moving = True
        moved = t.to(like.dtype, copy=True)
        self.moving = False
        return moved


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> Device:
    device = Device()

    def from_host(t: Tensor, like: Tensor) -> Tensor:
        return device.from_host(t, like) if id(t) in device.host else numbers.from_host(t, like)

    monkeypatch.setattr(numbers, "reads_are_free", lambda device: False)
    monkeypatch.setattr(numbers, "has_double", lambda device: False)
    monkeypatch.setattr(gmres, "to_host", device.to_host)
    monkeypatch.setattr(gmres, "from_host", from_host)
    return device


@pytest.mark.parametrize("name", list(SOLVERS))
@pytest.mark.parametrize("tol", [0.0, 1e-4])
@pytest.mark.parametrize("scale", [1.0, 1e20])
def test_no_solver_makes_float64_on_a_device_without_it(
    name: str, tol: float, scale: float, device: Device
) -> None:
    f, z0, exact = problems.affine(problems.contraction(0.8), dtype=torch.float32)
    options = SOLVERS[name].options_without_jvp
    with device:
        z = solve(
            lambda z: scale * f(z / scale), z0, make_solver(name, options),
            StopRule(80, tol, "rel"), on_failure="ignore",
        ).z  # fmt: skip
    assert (error(z / scale, exact) < 1e-3).all()


@pytest.mark.parametrize("type_", [1, 2])
def test_anderson_accelerates_on_a_device_without_float64(type_: int, device: Device) -> None:
    f, z0, _ = problems.affine(problems.rotation(0.95), dtype=torch.float32)
    stop = StopRule(300, 1e-4, "rel")
    with device:
        fast = solve(f, z0, Anderson(type=type_), stop).stats.nfe
    assert fast < solve(f, z0, make_solver("fixed_point_iter", {}), stop).stats.nfe / 3


@pytest.mark.parametrize("name", list(LINEAR))
@pytest.mark.parametrize("tol", [0.0, 1e-5])
@pytest.mark.parametrize("every", [1, 4])
def test_no_linear_solver_makes_float64_on_a_device_without_it(
    name: str, tol: float, every: int, device: Device
) -> None:
    A = (torch.eye(12, dtype=torch.float64) - problems.contraction(0.7, 12)).float()
    b = torch.randn(3, 12) * torch.tensor([1.0, 1e-20, 1e20])[:, None]
    with device:
        x, stats = LINEAR[name]().solve(times(A), b, StopRule(60, tol, "rel", check_every=every))
        status = stats.status
    assert (error(x, torch.linalg.solve(A.double(), b.double().mT).mT) < 1e-4).all()
    assert not tol or not status.any()
