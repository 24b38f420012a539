"""What does a training step of a field cost beside torchdeq 0.1.0? Part of `benchmarks.inr`.

Ours computes in blocks, and takes no solve in a warm start.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from statistics import median
from types import ModuleType
from typing import Any

import torch
from torch import Tensor, nn

from benchmarks.contest import PUBLISHED
from benchmarks.mdeq import published
from deq_zoo.inr import FieldConfig, FitSignal, Signal, coordinates
from torchdeq import DEQConfig


def time_steps(points: int, width: int, deq: DEQConfig, rounds: int) -> dict[str, Any]:
    """Take steps of three implementations in turns; return the median time of each."""
    torch.manual_seed(0)
    warm = deq.n_states == 1
    contestants: dict[str, Callable[[], None]] = {
        "ours": _ours(points, width, deq, warm),
        "0.1.0, as released": _released(published(PUBLISHED), points, width, deq, warm, False),
        "0.1.0, our f": _released(published(PUBLISHED), points, width, deq, warm, True),
    }
    seconds: dict[str, list[float]] = {name: [] for name in contestants}
    for _ in range(rounds + 1):
        for name, step in contestants.items():
            began = time.process_time()
            step()
            seconds[name].append(time.process_time() - began)
    medians = {name: median(spent[1:]) for name, spent in seconds.items()}
    ratios = {
        name: f"{medians['ours'] / medians[name]:.3f}" for name in contestants if name != "ours"
    }
    return {
        "model": "a step",
        "seconds": medians,
        "ours_over": ratios,
        "points": points,
        "width": width,
    }


def _ours(points: int, width: int, deq: DEQConfig, warm: bool) -> Callable[[], None]:
    noise = torch.randint(256, (points // 64, 64, 3), dtype=torch.uint8)
    task = FitSignal(net=FieldConfig(width=width), deq=deq, warm=warm)
    task = task.with_signal(Signal("image", noise))
    model, batch = task.build(), task.train_batch(0, 0)
    carry: list[Any] = [None]

    def step() -> None:
        model.zero_grad()
        loss = task.loss(model, batch, carry[0])
        carry[0] = loss.carry
        loss.value.backward()

    return step


class Released(nn.Module):
    """DEQ-SIREN on torchdeq 0.1.0, as in the authors' release: all filters are inside f.

    Args:
        package: torchdeq 0.1.0.
        width: of the state.
        deq: options of the equilibrium.
        ahead: compute the terms without z before the solve, as ours does.
    """

    def __init__(self, package: ModuleType, width: int, deq: DEQConfig, ahead: bool) -> None:
        super().__init__()
        self.package, self.ahead = package, ahead
        self.x_map, self.f = nn.Linear(2, 2 * width), nn.ModuleList([nn.Linear(width, width)])
        self.output_map = nn.Linear(width, 3)
        with torch.no_grad():
            self.x_map.weight.mul_(128 / 2**0.5)
            nn.init.uniform_(self.x_map.bias, -torch.pi, torch.pi)
        package.apply_norm(self.f, "weight_norm")
        names = ("f_max_iter", "f_tol", "f_stop_mode", "n_states")
        options = {name: getattr(deq, name) for name in names}
        self.deq = package.get_deq(grad=deq.grad[0], **options)

    def forward(self, x: Tensor, z0: Tensor | None) -> tuple[list[Tensor], Tensor]:
        self.package.reset_norm(self.f)
        u, v = self.x_map(x).chunk(2, dim=-1)
        mix: Any = self.f[0]
        W = mix.weight.T
        k = torch.addmm(mix.bias + v, u.sin(), W) if self.ahead else None

        def f(z: Tensor) -> Tensor:
            if k is not None:
                return torch.addmm(k, z, W).sin()
            return torch.sin(mix(z + torch.sin(u)) + v)

        options = {} if z0 is None else {"solver_kwargs": {"f_max_iter": 0}}
        states, _ = self.deq(f, torch.zeros_like(u) if z0 is None else z0, **options)
        return [self.output_map(z) for z in states], states[-1].detach()


def _released(
    package: ModuleType, points: int, width: int, deq: DEQConfig, warm: bool, ahead: bool
) -> Callable[[], None]:
    model = Released(package, width, deq, ahead)
    x = coordinates((points // 64, 64), torch.arange(points))
    y = 2 * torch.rand(points, 3) - 1
    kept: list[Tensor | None] = [None]

    def step() -> None:
        model.zero_grad()
        values, z = model(x, kept[0])
        kept[0] = z if warm else None
        n = len(values)
        losses = [0.8 ** (n - 1 - k) * (v - y).square().mean() for k, v in enumerate(values)]
        torch.stack(losses).sum().backward()

    return step
