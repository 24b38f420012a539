"""A task of milliseconds: an equilibrium layer learns a linear map; for tests of the frame."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.model import Model
from deq_zoo.optim import Adam
from deq_zoo.output import Output
from deq_zoo.predictions import OutFolder, Prediction
from deq_zoo.preset import PRESETS, Preset
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    WHOLE,
    Converted,
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    Split,
    Task,
    Weights,
    batch_indices,
    generator,
    steps_in_epoch,
)
from deq_zoo.uses import GRADIENT, SOLVE
from deq_zoo.values import trust
from torchdeq import DEQConfig, get_deq

trust("tests")


class ToyModel(Model):
    def __init__(self, width: int, deq: DEQConfig) -> None:
        super().__init__()
        self.f, self.out = nn.Linear(width, width), nn.Linear(width, 1)
        self.drop = nn.Dropout(0.1)
        self.deq = get_deq(deq)

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output[Tensor, Tensor]:
        start = torch.zeros_like(x) if z0 is None else z0
        (z,), stats = self.deq(lambda z: torch.tanh(0.3 * self.f(z) + x), start, **call)
        return Output([self.out(self.drop(z)).squeeze(1)], z.detach(), stats)


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
    former_fields: ClassVar = {"widht": "width", "gone": None}

    @cached_property
    def data(self) -> tuple[Tensor, Tensor]:
        x = torch.randn(sum(self.sizes), self.width, generator=generator("toy"))
        return x, x.sum(1).tanh()

    @property
    def uses(self) -> frozenset[str]:
        return SOLVE | GRADIENT

    @property
    def train_set(self) -> tuple[Tensor, ...]:
        return tuple(t[: self.sizes[0]] for t in self.data)

    @property
    def val_set(self) -> tuple[Tensor, ...]:
        return tuple(t[self.sizes[0] :] for t in self.data)

    @property
    def test_set(self) -> tuple[Tensor, ...]:
        x = torch.randn(self.sizes[1], self.width, generator=generator("toy test"))
        return x, x.sum(1).tanh()

    def facts(self) -> dict[str, Any]:
        return {"width": self.width}

    def build(self, facts: Mapping[str, Any] | None = None) -> ToyModel:
        return ToyModel(self.width, self.deq)

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(self.sizes[0], self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
        rows = batch_indices(self.sizes[0], self.batch, step, seed, shard)
        return self.data[0][rows], self.data[1][rows]

    def loss(self, model: Any, batch: tuple[Tensor, Tensor], carry: Any) -> Loss:
        x, y = batch
        out = model(x, carry)
        value = (out.prediction - y).square().mean()
        return Loss(value, stats=out.stats, carry=out.state)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record = SolverRecord()
        x, y = (model.place(t) for t in (self.val_set if split == "val" else self.test_set))
        out = model(x, sradius_mode=thorough)
        record.add(out.stats)
        return Evaluation({"mse": float((out.prediction - y).square().mean())}, record)

    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.drawing import Line, line_plot

        y = self.test_set[1].sort().values
        targets = Line("y", range(len(y)), y.tolist())
        return line_plot("targets", "All test targets, sorted.", [targets], "rank", "target")

    def sampling(self) -> ToySampling:
        return ToySampling()

    def sample(self, model: Any, options: ToySampling, out: OutFolder) -> Iterator[Prediction]:
        for k in range(options.n_lines):
            yield Prediction(str(k), f"{k} x {options.scale} {options.text}")

    def from_authors(self, state: Weights) -> Converted:
        return Converted({key.replace("linear", "f"): v for key, v in state.items()}, {})


@PRESETS.register("toy")
def toy() -> Preset:
    """A toy."""
    return Preset(
        task=Toy(), optim=Adam(lr=0.02), steps=24, log_every=4, eval_every=8, save_every=5
    )
