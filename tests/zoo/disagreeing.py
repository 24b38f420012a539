"""A toy whose processes disagree: about running statistics, and about every score."""

from __future__ import annotations

import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.output import Output
from deq_zoo.preset import PRESETS, Preset
from deq_zoo.task import Evaluation, Loss, Split
from tests.zoo.toy import Toy, ToyModel, toy
from torchdeq import DEQConfig


class NormedModel(ToyModel):
    """The toy's model behind a batch norm, whose statistics depend on the samples of a process."""

    def __init__(self, width: int, deq: DEQConfig) -> None:
        super().__init__(width, deq)
        self.norm = nn.BatchNorm1d(width)

    def forward(self, x: Tensor, z0: Tensor | None = None, **call: Any) -> Output[Tensor, Tensor]:
        return super().forward(self.norm(x), z0, **call)


@dataclass(frozen=True)
class Disagreeing(Toy):
    """The toy with scores that depend on the process.

    Args:
        pause: seconds that a step takes at least.
        fails_at: the step at which process 1 alone raises an error; 0 is never.
    """

    pause: float = 0.0
    fails_at: int = 0

    def build(self, facts: Mapping[str, Any] | None = None) -> NormedModel:
        return NormedModel(self.width, self.deq)

    def train_batch(self, step: int, *args: Any) -> Any:
        if step + 1 == self.fails_at and os.environ.get("RANK") == "1":
            raise ArithmeticError("this process alone has failed")
        return super().train_batch(step, *args)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor], carry: Any) -> Loss:
        time.sleep(self.pause)
        return super().loss(model, batch, carry)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        evaluation = super().evaluate(model, split, thorough)
        rank = int(os.environ.get("RANK", 0))
        noise = float(torch.rand(1, generator=torch.Generator().manual_seed(rank)))
        factor = 1 - 2 * rank * noise
        return replace(evaluation, metrics={"mse": evaluation.metrics["mse"] * factor})


@PRESETS.register("disagreeing")
def disagreeing() -> Preset:
    """A toy for several processes."""
    return replace(toy(), task=Disagreeing(), steps=100, log_every=5, eval_every=5, save_every=5)
