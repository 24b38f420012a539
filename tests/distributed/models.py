"""A small equilibrium network whose data are easy in one process and hard in another."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from torchdeq import get_deq, mem_gc
from torchdeq.stats import SolverStat

WIDTH, INPUTS, BATCH = 12, 5, 3
PRECISE: dict[str, Any] = {
    "f_max_iter": 300,
    "f_tol": 1e-12,
    "f_stop_mode": "rel",
    "b_max_iter": 300,
    "b_tol": 1e-12,
    "on_failure": "raise",
}


class Cell(nn.Module):
    """Two contracting layers: the function whose fixed point the layer finds."""

    def __init__(self) -> None:
        super().__init__()
        linears = [nn.Linear(WIDTH, WIDTH) for _ in range(2)]
        self.layers = nn.ModuleList(linears)
        for layer in linears:
            nn.init.orthogonal_(layer.weight)
            with torch.no_grad():
                layer.weight.mul_(0.85)

    def forward(self, z: Tensor, x: Tensor) -> Tensor:
        for layer in self.layers:
            z = torch.tanh(layer(z) + x)
        return z


class Layer(nn.Module):
    """The module whose forward contains the solve."""

    def __init__(self, cell: nn.Module, options: dict[str, Any], compact: bool = False) -> None:
        super().__init__()
        self.cell, self.deq, self.compact = cell, get_deq(options), compact
        self.checkpoint = ""  # what is computed again in the backward pass: layer, cell or nothing
        self.forward_stats: list[SolverStat] = []
        self.backward_stats: list[SolverStat] = []

    def forward(self, x: Tensor) -> Tensor:
        if self.checkpoint == "layer":
            z: Tensor = checkpoint(self.solve, x, use_reentrant=False)
            return z
        return self.solve(x)

    def solve(self, x: Tensor) -> Tensor:
        """Return the fixed point of the cell."""
        states, stats = self.deq(
            (lambda z, x: mem_gc(self.cell, (z, x))) if self.checkpoint == "cell" else self.cell,
            torch.zeros_like(x),
            args=(x,),
            compact=self.compact,
            backward_writer=self.backward_stats.append,
        )
        self.forward_stats.append(stats)
        z: Tensor = states[-1]
        return z


class Net(nn.Module):
    """An encoder, the equilibrium layer and a head."""

    def __init__(
        self, options: dict[str, Any], cell: nn.Module | None = None, compact: bool = False
    ) -> None:
        super().__init__()
        self.encoder = nn.Linear(INPUTS, WIDTH)
        self.layer = Layer(Cell() if cell is None else cell, options, compact)
        self.head = nn.Linear(WIDTH, 2)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.layer(self.encoder(x)))
        return y


def make_net(options: dict[str, Any], cell: nn.Module | None = None, **keywords: Any) -> Net:
    """Return the same network in every process, in double precision."""
    torch.manual_seed(0)
    return Net(PRECISE | options, cell, **keywords).double()


def data(rank: int) -> Tensor:
    """Return the inputs of one process; each has another size and so another difficulty."""
    generator = torch.Generator().manual_seed(7 + rank)
    x = torch.randn(BATCH, INPUTS, generator=generator, dtype=torch.float64)
    return x * (0.05, 6.0, 0.8)[rank]


def joined() -> Tensor:
    """Return the inputs of all processes."""
    return torch.cat([data(rank) for rank in range(dist.get_world_size())])


def loss_of(y: Tensor) -> Tensor:
    """Return a loss that is the mean over samples, as data parallelism averages gradients."""
    return y.square().sum(1).mean()


def reference_gradients(options: dict[str, Any], **keywords: Any) -> dict[str, Tensor]:
    """Return the gradients of one process on the joined batch."""
    net = make_net(options, **keywords)
    loss_of(net(joined())).backward()
    return {name: p.grad for name, p in net.named_parameters() if p.grad is not None}


def largest_error(net: nn.Module, expected: dict[str, Tensor]) -> float:
    """Return the largest relative error of the gradients of a network, over its parameters."""
    found = {name.removeprefix("module."): p.grad for name, p in net.named_parameters()}
    assert found.keys() == expected.keys()
    errors = []
    for name, right in expected.items():
        grad = found[name]
        assert grad is not None, f"{name} has no gradient"
        whole = grad.full_tensor() if hasattr(grad, "full_tensor") else grad
        errors.append(float((whole - right).norm() / right.norm()))
    return max(errors)


@contextmanager
def counted_collectives() -> Iterator[Counter[str]]:
    """Return a block that counts the collectives of `fully_shard` and of the library."""
    counts: Counter[str] = Counter()
    names = {  # torch 2.13 has renamed two of them
        "all_reduce": "all_reduce",
        "all_gather_single": "all_gather",
        "all_gather_into_tensor": "all_gather",
        "reduce_scatter_single": "reduce_scatter",
        "reduce_scatter_tensor": "reduce_scatter",
    }

    def counted(name: str) -> Any:
        original = getattr(dist, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            counts[names[name]] += 1
            return original(*args, **kwargs)

        return call

    with pytest.MonkeyPatch.context() as patch:
        for name in filter(partial(hasattr, dist), names):
            patch.setattr(dist, name, counted(name))
        yield counts
