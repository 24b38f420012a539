"""Two fields on one signal, side by side: an equilibrium and a network without."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from deq_zoo.errors import ZooError
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.task import GeneraliseImage
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Shard

_ENTRIES = 128  # of a course
_STRIDE = 5  # steps between its first entries
_WATCHED = 1024  # held-out pixels that it looks at


class Course(nn.Module):
    """How two fields get on: processor seconds of each, and PSNR of each on held-out pixels.

    Its buffers go into checkpoints. When it is full, every second entry goes, and from then on it
    takes note half as often.
    """

    entries: Tensor
    count: Tensor
    seconds: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("entries", torch.zeros(_ENTRIES, 4))
        self.register_buffer("count", torch.tensor([0, 0, _STRIDE]))  # held, steps, stride
        self.register_buffer("seconds", torch.zeros(2))

    @contextmanager
    def timed(self, who: int) -> Iterator[None]:
        """A block whose time is spent by one of the two."""
        began = time.process_time()
        yield
        self.seconds[who] += time.process_time() - began

    def due(self) -> bool:
        """Whether to take note at this step, which is counted."""
        _, steps, stride = self.count.tolist()
        self.count[1] += 1
        return bool(steps % stride == 0)

    def note(self, *psnr: float) -> None:
        """The PSNR of both."""
        held = int(self.count[0])
        if held == _ENTRIES:
            held //= 2
            self.entries[:held] = self.entries[::2].clone()
            self.count[2] *= 2
        self.entries[held] = torch.tensor([*self.seconds.tolist(), *psnr])
        self.count[0] = held + 1

    def told(self) -> Tensor:
        """(n, 4): seconds of both, then PSNR of both."""
        return self.entries[: int(self.count[0])]


class Pair(Representation):
    """A representation and its rival.

    Args:
        field: the equilibrium.
        rival: trained on the same points at the same steps.
    """

    def __init__(self, field: Field, rival: Field) -> None:
        super().__init__(field)
        self.rival, self.course = rival, Course()


@dataclass(frozen=True)
class Duel(GeneraliseImage):
    """Image generalisation by an equilibrium and by a rival of about as many parameters.

    They share nothing but the optimiser's settings: the loss is the sum of theirs, and no parameter
    is in both. The best model is chosen by the equilibrium's `val_psnr`, and the rival is judged
    at the same step. Runs in one process.

    Args:
        rival: the shape of the other field. Others: see `GeneraliseImage`.
    """

    rival: FieldConfig = field(default_factory=lambda: FieldConfig(kind="siren", layers=2))

    def build(self) -> nn.Module:
        return self.framed(Pair(self.make(self.net), self.make(self.rival)))

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        if shard.world > 1:
            raise ZooError(
                f"a duel runs in one process: start it without a launcher, got {shard.world} "
                "processes; other inr presets run in several"
            )
        return super().train_batch(step, seed, shard)

    def loss(self, model: nn.Module, batch: Tensor, carry: Any) -> Loss:
        assert isinstance(model, Pair)

        def predict(x: Tensor, places: Tensor) -> list[Tensor]:
            values: list[Tensor] = model.rival(x).values
            return values

        with model.course.timed(0):
            ours = super().loss(model.field, batch, carry)
        with model.course.timed(1):
            theirs = self.error(model.rival, batch, predict)
        if model.course.due():
            model.course.note(*(self._glimpse(each, batch) for each in (model.field, model.rival)))
        return Loss(ours.value + theirs, stats=ours.stats, carry=ours.carry)

    @torch.no_grad()
    def _glimpse(self, field: nn.Module, batch: Tensor) -> float:
        """PSNR at some of the validation pixels; the time it takes is nobody's."""
        rows = self.judged()["val_psnr"]
        field.eval()
        found = self.psnr(
            field, rows[:: max(1, len(rows) // _WATCHED)], batch.device, SolverRecord()
        )
        field.train()
        return found

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        assert isinstance(model, Pair)
        found = super().evaluate(model, device, thorough)
        rows = self.judged()["psnr"]
        rival = self.psnr(model.rival, rows, device, SolverRecord())
        return Evaluation({**found.metrics, "rival_psnr": rival}, found.solver)

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.inr.pictures import compare, race

        assert isinstance(model, Pair)
        rows = torch.arange(len(self.signal))
        fields: dict[str, Any] = {f"DEQ {_size(model.field)}": model.field}
        fields[f"{self.rival.kind.upper()} {_size(model.rival)}"] = model.rival
        values = {
            name: torch.cat(list(self.predicted(each, rows, device, SolverRecord())))
            for name, each in fields.items()
        }
        note = "Weights are those of the step with the DEQ's best val_psnr, for both fields."
        return [
            compare(self.signal, rows, values, self.told_by(), note),
            race(model.course.told(), list(values)),
        ]

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        raise ZooError(
            "a duel holds two fields, the authors' weights are of one: convert them with --preset "
            "inr-nature, inr-text or inr-file"
        )


def _size(field: Field) -> str:
    return f"({sum(p.numel() for p in field.parameters()):,} parameters)"
