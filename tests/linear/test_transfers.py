"""Reads from the device: none without a tolerance, few with one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from benchmarks.accelerator import Meter
from tests.linear.systems import Batch
from torchdeq import numbers
from torchdeq.linear import GMRES, LINEAR, gmres
from torchdeq.solver import StopRule

NAMES = list(LINEAR)


class Reads(torch.overrides.TorchFunctionMode):
    """A counter of reads: tensors whose values Python looks at."""

    names = ("tolist", "item", "__bool__", "__int__", "__float__", "nonzero")
    count = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += getattr(func, "__name__", "") in self.names
        return func(*args, **(kwargs or {}))


@pytest.fixture
def transfers(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the sizes of transfers to the host; the host's memory plays that of a device."""
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


@pytest.mark.parametrize("name", NAMES)
def test_a_device_is_read_once_per_check(name: str) -> None:
    batch = Batch(torch.float64, d=32, rho=0.95)
    counts = []
    for every in (1, 4):
        meter = Meter(simulated=True)
        A, b = meter.put(batch.A), meter.put(batch.b)

        def product(v: Tensor, A: Tensor = A) -> Tensor:
            return torch.bmm(A, v[:, :, None])[:, :, 0]

        with meter:
            stop = StopRule(33, 1e-13, "rel", check_every=every)
            LINEAR[name]().solve(product, b, stop)
        counts.append(meter.tally.reads)
    assert counts[0] <= 35
    assert counts[1] <= 11
