"""A model, its task and its smoke preset."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import ClassVar

import torch
from torch import nn

from deq_zoo.errors import DataError
from deq_zoo.model import Model
from deq_zoo.output import Output
from deq_zoo.predictions import Prediction, predict_each
from deq_zoo.preset import PRESETS, Preset
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Score, Task, batch_indices, generator
from deq_zoo.uses import GRADIENT, SOLVE
from torchdeq import DEQConfig, get_deq


class Adder(Model):
    """A linear map of the equilibrium of tanh(Wz + x)."""

    def __init__(self, deq):
        super().__init__()
        self.f, self.out, self.deq = nn.Linear(8, 8), nn.Linear(8, 1), get_deq(deq)

    def forward(self, x, z0=None, **call):
        z0 = torch.zeros_like(x) if z0 is None else z0
        (z,), stats = self.deq(lambda z: torch.tanh(0.3 * self.f(z) + x), z0, **call)
        return Output([self.out(z)[:, 0]], z.detach(), stats)

    def _predict(self, x, z0, **call):
        out = self(torch.tensor([x], device=self.device), z0, **call)
        return Output([float(out.prediction)], out.state, out.stats)


@dataclass(frozen=True)
class AddNumbers(Task):
    """Sums of eight numbers."""

    score: ClassVar = Score("mse", higher_is_better=False)
    deq: DEQConfig = field(default_factory=lambda: DEQConfig(f_max_iter=20, f_tol=1e-4))
    uses = SOLVE | GRADIENT
    train_set, val_set, test_set = range(64), range(64, 96), range(96, 128)
    steps_per_epoch = 4

    def numbers(self, rows):
        x = torch.randn(128, 8, generator=generator("numbers"))[rows]
        return x, x.sum(1)

    def build(self, facts=None):
        return Adder(self.deq)

    def train_batch(self, step, seed, shard=WHOLE):
        return self.numbers(batch_indices(64, 16, step, seed, shard))

    def loss(self, model, batch, carry):
        out = model(batch[0])
        return Loss((out.prediction - batch[1]).square().mean(), stats=out.stats)

    def evaluate(self, model, split, thorough=False):
        x, y = self.numbers(self.val_set if split == "val" else self.test_set)
        out, record = model(x.to(model.device), sradius_mode=thorough), SolverRecord()
        record.add(out.stats)
        error = (out.prediction.cpu() - y).square().mean()
        return Evaluation({"mse": float(error)}, record)

    def predict(self, model, paths, out):
        def add(path: Path) -> Prediction:
            try:
                x = [float(word) for word in path.read_text().split()]
            except ValueError as error:
                raise DataError(f"{path} is no list of numbers: {error}") from None
            total = model.predict(x).prediction
            return Prediction(str(path), f"{path}: {total:.3g}", {"sum": total})

        return predict_each(paths, add)


@PRESETS.register("sums-smoke")
def sums_smoke() -> Preset:
    """Sums of eight numbers, for tests: a second."""
    return Preset(AddNumbers(), steps=8, log_every=2, eval_every=4, save_every=3)
