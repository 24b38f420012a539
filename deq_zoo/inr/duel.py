"""Two fields on one image, side by side: an equilibrium and a network without one."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.inr.pair import Pair
from deq_zoo.inr.rendering import Rendering
from deq_zoo.inr.task import GeneraliseImage
from deq_zoo.predictions import OutFolder, Prediction
from deq_zoo.record import SolverRecord
from deq_zoo.task import Converted, Evaluation, Loss, Picture, Score, Split, Weights

_FILTERS = {
    "siren_like": "DEQ-SIREN",
    "fourier": "DEQ-MFN, Fourier",
    "gabor": "DEQ-MFN, Gabor",
}
_KINDS = {
    "one_pass": "one pass",
    "siren": "SIREN",
    "ffn": "FFN",
    "relu_pe": "ReLU-PE",
    "mfn": "MFN",
}
_TIMED = 5  # training steps whose time the report measures
_NO_CONVERSION = (
    "a duel has two fields, and the authors' weights are of one: use --preset inr-nature, inr-text "
    "or inr-file"
)


@dataclass(frozen=True)
class Duel(GeneraliseImage):
    """Image generalisation by an equilibrium and by a rival of about as many parameters.

    They share the training pixels and the optimiser's settings; the loss is the sum of their
    losses, and no parameter is in both. Both are compared at their own best: every `look_every`
    steps, each field whose validation PSNR is its best so far is copied. All metrics are those of
    the copies: `psnr` of the equilibrium, `rival_psnr` of the rival, and their mean `mean_psnr`,
    which grows whenever one of them gets better and so chooses the checkpoint with both.

    Args:
        rival: the shape of the other field.
        look_every: steps between two comparisons on the validation pixels.

    Other args: see `FitSignal`.
    """

    score: ClassVar[Score] = Score("mean_psnr", "dB")

    rival: FieldConfig = field(default_factory=lambda: FieldConfig(kind="siren", layers=2))
    look_every: int = 20

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "look_every")

    @property
    def uses(self) -> frozenset[str]:
        """Return the options that have an effect on either field."""
        return self.uses_of(self.net) | self.uses_of(self.rival)

    def build(self, facts: Mapping[str, Any] | None = None) -> Pair:
        ours, rival = self.make_field(self.net), self.make_field(self.rival)
        return Pair(ours, rival, self._find_grid(facts))

    def loss(self, model: Any, batch: Tensor, carry: Any) -> Loss:
        def evaluate(x: Tensor, places: Tensor) -> list[Tensor]:
            values: list[Tensor] = model(x, rival=True).predictions
            return values

        ours = super().loss(model, batch, carry)
        rival = self.error(model, batch, evaluate)
        metrics = {"field_loss": ours.value, "rival_loss": rival}
        return Loss(ours.value + rival, metrics, ours.stats, ours.carry)

    @torch.no_grad()
    def after_step(self, model: Pair) -> None:
        model.step += 1
        if int(model.step) % self.look_every:
            return
        fields = (model.field.eval(), model.rival.eval())
        psnr = [self.psnr(each, self.val_set.rows) for each in fields]
        model.look(torch.tensor(psnr, device=model.device), self.look_every)
        model.train()

    def evaluate(self, model: Pair, split: Split, thorough: bool = False) -> Evaluation:
        ours, rival = model.chosen
        result = super().evaluate(ours, split, thorough)
        a = result.metrics["psnr"]
        b = self.psnr(rival, self.samples(split).rows, SolverRecord())
        metrics = {"psnr": a, "rival_psnr": b, "mean_psnr": (a + b) / 2}
        return Evaluation(metrics, result.solver)

    @torch.no_grad()
    def pictures(self, model: Pair) -> list[Picture]:
        from deq_zoo.inr.pictures import plot_pictures, plot_race

        rows = torch.arange(len(self.signal))
        names = [_name(self.net, model.field), _name(self.rival, model.rival)]
        values = {
            name: torch.cat(list(self.values(each, rows)))
            for name, each in zip(names, model.chosen, strict=True)
        }
        steps = model.best_step.tolist()
        caption = f"{self.caption} Each field has its own best weights" + (
            f", those of the steps {steps[0]} and {steps[1]}." if all(steps) else "."
        )
        race = plot_race(*model.course.entries(), names, self._seconds_per_step(model))
        scored = self._scored(rows)
        return [plot_pictures(self.signal, rows, values, caption, scored), *race]

    @torch.enable_grad()
    def _seconds_per_step(self, model: Pair) -> list[float]:
        """Return the processor seconds of a training step of each field, measured on copies."""
        copy = deepcopy(model).train()
        seconds: tuple[list[float], list[float]] = ([], [])
        batch, carry = self.train_batch(0, 0).to(copy.device), None
        for _ in range(_TIMED + 1):  # the first one solves, and is left out
            for who in range(2):
                began = time.process_time()
                if who == 0:
                    loss = super().loss(copy, batch, carry)
                    carry = loss.carry
                    loss.value.backward()
                else:
                    self.error(copy, batch, lambda x, _: copy(x, rival=True).predictions).backward()
                seconds[who].append(time.process_time() - began)
        return [sorted(each[1:])[_TIMED // 2] for each in seconds]

    def sample(self, model: Pair, options: Rendering, out: OutFolder) -> Iterator[Prediction]:
        return super().sample(model.best_representation(), options, out)

    def from_authors(self, state: Weights) -> Converted:
        raise ZooError(_NO_CONVERSION)

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        raise ZooError(_NO_CONVERSION)


def _name(net: FieldConfig, field: Field) -> str:
    name = _FILTERS[net.filter] if net.kind == "deq" else _KINDS[net.kind]
    return f"{name} ({sum(p.numel() for p in field.parameters()):,} parameters)"
