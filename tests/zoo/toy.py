"""A task of milliseconds: an equilibrium layer learns a linear map; for tests of the frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.optim import Adam
from deq_zoo.preset import PRESETS, Preset
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    Task,
    batch_indices,
    generator,
    steps_in_epoch,
)
from deq_zoo.values import trust
from torchdeq import DEQConfig, get_deq

trust("tests")


class ToyModel(nn.Module):
    def __init__(self, width: int, deq: DEQConfig) -> None:
        super().__init__()
        self.f, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self.drop = nn.Dropout(0.1)
        self.deq = get_deq(deq)

    def forward(self, x: Tensor, z0: Tensor, sradius_mode: bool = False) -> Any:
        (z,), stats = self.deq(
            lambda z: torch.tanh(0.3 * self.f(z) + x), z0, sradius_mode=sradius_mode
        )
        return self.out(self.drop(z)).squeeze(1), z, stats


@dataclass(frozen=True)
class ToySampling:
    scale: float = 1.0
    n_lines: int = 1
    text: str = ""


@dataclass(frozen=True)
class Toy(Task):
    score: ClassVar[Score] = Score("mse", higher_is_better=False)

    deq: DEQConfig = field(
        default_factory=lambda: DEQConfig(f_max_iter=20, f_tol=1e-4, on_failure="ignore")
    )
    width: int = 8
    batch: int = 16
    data_dir: str | None = None
    sizes: tuple[int, ...] = (64, 32)

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(sum(self.sizes), self.width, generator=generator("toy"))
        return x, x.sum(1).tanh()

    def build(self) -> nn.Module:
        return ToyModel(self.width, self.deq)

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(self.sizes[0], self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard) -> tuple[Tensor, Tensor]:
        rows = batch_indices(self.sizes[0], self.batch, step, seed, shard)
        return self.data[0][rows], self.data[1][rows]

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: Any) -> Loss:
        x, y = batch
        start = torch.zeros_like(x) if carry is None else carry
        predicted, z, stats = model(x, start)
        return Loss((predicted - y).square().mean(), stats=stats, carry=z)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        x, y = (t[self.sizes[0] :].to(device) for t in self.data)
        predicted, _, stats = model(x, torch.zeros_like(x), sradius_mode=thorough)
        record.add(stats)
        return Evaluation({"mse": float((predicted - y).square().mean())}, record)

    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.report import line_plot

        y = self.data[1][self.sizes[0] :].sort().values
        return [line_plot("targets", "The targets.", [("y", range(len(y)), y.tolist())], "k", "y")]

    def sampling(self) -> ToySampling:
        return ToySampling()

    def sample(
        self, model: nn.Module, options: ToySampling, out: Path, device: torch.device
    ) -> Iterator[str]:
        for k in range(options.n_lines):
            yield f"{k} x {options.scale} {options.text}"

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return {key.replace("linear", "f"): value for key, value in state.items()}


@PRESETS.register("toy")
def toy() -> Preset:
    """A toy."""
    return Preset(
        task=Toy(), optim=Adam(lr=0.02), steps=24, log_every=4, eval_every=8, save_every=5
    )
