"""Fitting a signal: the task that fields are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.errors import DataError
from deq_zoo.inr.blocks import block_size, mean_of, summed
from deq_zoo.inr.data import Source
from deq_zoo.inr.derivatives import value_and_gradient
from deq_zoo.inr.model import FieldConfig, Output
from deq_zoo.inr.order import sampled
from deq_zoo.inr.signal import coordinates
from deq_zoo.inr.signal_task import SignalTask
from deq_zoo.inr.warm import States, check_memory
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, steps_in_epoch
from torchdeq import DEQConfig, SolverStat, fp_correction

_STATS = 64  # points of a block whose statistics are kept: those of all would be a burden
_RADII = 16  # points whose spectral radius is estimated

Predict = Callable[[Tensor, Tensor], list[Tensor]]  # points, their places: values by state


@dataclass(frozen=True)
class FitSignal(SignalTask):
    """One field learns one signal, by the squared error at its samples.

    Args:
        net: the shape of the field.
        deq: options of the equilibrium.
        data: astronaut, chelsea, coffee or camera (with scikit-image); file; nature, text, celeba,
            video or audio (from `data_dir`); ripples (for tests).
        file: of the data `file`: an image, sound or video.
        data_dir: folder with the data set's files.
        index: which signal of a set.
        channels: of images, 3 or 1.
        side: of a square in the middle of every picture; 0 takes all of it.
        shrink: pictures get so many times smaller first.
        length: frames or samples to fit, from the start; 0 takes all.
        batch: points per step, in a random order; 0 takes all points at every step.
        warm: whether a step starts from the states of the last one and does not solve.
        supervise: fit values, or only the gradients of an image.
        points_at_once: of a block; 0 chooses by the width.
        eval_frames: of a video, evenly spread, that are judged; 0 judges all.
    """

    score: ClassVar[Score] = Score("psnr", "dB")

    net: FieldConfig = field(default_factory=FieldConfig)
    deq: DEQConfig = field(default_factory=lambda: DEQConfig(grad=[3]))
    data: Source = "file"
    file: str | None = None
    data_dir: str | None = None
    index: int = 0
    channels: int = 3
    side: int = 0
    shrink: int = 1
    length: int = 0
    batch: int = 0
    warm: bool = True
    supervise: Literal["values", "gradient"] = "values"
    points_at_once: int = 0
    eval_frames: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 0, "index", "side", "length", "batch", "points_at_once", "eval_frames")
        check_fields(self, 1, "shrink")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        if self.deq.jac_loss_weight:
            raise ValueError("fields are trained without a Jacobian loss: drop jac_loss_weight")
        if self.supervise == "gradient":
            self._check_gradient()

    def _check_gradient(self) -> None:
        exact = self.deq.implicit and self.deq.higher_order and not self.warm
        if self.net.implicit and not exact:
            raise ValueError(
                "supervise='gradient' differentiates the field twice, which is exact with "
                "ift=True, higher_order=True and warm=False: set all three"
            )
        if self.data in ("video", "audio"):
            raise ValueError(f"supervise='gradient' takes images, got data={self.data!r}")

    @property
    def steps_per_epoch(self) -> int:
        n = len(self.fit_rows)
        if self.follows:
            check_memory(n, self.net.width)  # before anything is made or replaced
        return steps_in_epoch(n, self.batch or n)

    @property
    def follows(self) -> bool:
        """Whether states are kept from step to step."""
        return self.warm and self.net.implicit

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        n = len(self.fit_rows)
        if not 0 < self.batch < n:
            return torch.arange(n)[shard.rank :: shard.world]
        return sampled(n, self.batch, step, seed, shard)

    def loss(self, model: nn.Module, batch: Tensor, carry: Any) -> Loss:
        stats: list[SolverStat] = []
        if not self.follows:

            def predict(x: Tensor, places: Tensor) -> list[Tensor]:
                out: Output = model(x)
                _note(stats, out)
                return out.values

            return Loss(self.error(model, batch, predict), stats=stats[0] if stats else None)
        states = States.of(carry, len(self.fit_rows), self.net.width, model)

        def follow(x: Tensor, places: Tensor) -> list[Tensor]:
            z0, visited = states.start(places)
            out: Output = model(x, z0, **({"f_max_iter": 0} if visited else {}))
            assert out.state is not None
            states.keep(places, out.state)
            if not visited:
                _note(stats, out)
            return out.values

        value = self.error(model, batch, follow)
        return Loss(value, stats=stats[0] if stats else None, carry=states.carry())

    def error(self, model: nn.Module, batch: Tensor, predict: Predict) -> Tensor:
        """The mean squared error of some points, computed block by block."""
        parameters = [p for p in model.parameters() if p.requires_grad]
        dtype, rows = parameters[0].dtype, self.fit_rows.to(batch.device)
        shape, total = self.signal.shape, len(batch)

        def losses() -> Iterator[Tensor]:
            for places in batch.split(self.block):
                x = coordinates(shape, rows[places], dtype)
                if self.supervise == "gradient":
                    values = [self._differences(predict, x, places)]
                    wanted = self.target_differences.to(x)[rows[places]]
                else:
                    values, wanted = predict(x, places), self.signal.targets(rows[places], dtype)
                share = len(places) / max(1, total)
                yield share * fp_correction(_squared_error, (values, wanted), gamma=self.deq.gamma)

        return summed(losses(), parameters)

    @property
    def block(self) -> int:
        """Points at once."""
        return self.points_at_once or block_size(self.net.width)

    @cached_property
    def target_differences(self) -> Tensor:
        """(N, c, 2) by how much the image changes from pixel to pixel, along (column, row)."""
        image = self.signal.targets(torch.arange(len(self.signal))).view(*self.signal.shape, -1)
        rows, columns = torch.gradient(image, dim=(0, 1))
        return torch.stack((columns, rows), dim=-1).flatten(0, 1)

    def _differences(self, predict: Predict, x: Tensor, places: Tensor) -> Tensor:
        """The field's gradient in the units of `target_differences`."""
        _, gradient = value_and_gradient(lambda x: predict(x, places)[-1], x)
        height, width = self.signal.shape
        return gradient * (2 / (x.new_tensor((width, height)) - 1).clamp_min(1))

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        if thorough and self.net.implicit:
            dtype = next(model.parameters()).dtype
            spread = self.fit_rows[:: max(1, len(self.fit_rows) // _RADII)][:_RADII]
            few = coordinates(self.signal.shape, spread.to(device), dtype)
            record.radii += model(few, sradius_mode=True).stats["sradius"].tolist()
        metrics = {
            name: self.psnr(model, rows, device, record) for name, rows in self.judged().items()
        }
        return Evaluation(metrics, record)

    def psnr(
        self, model: nn.Module, rows: Tensor, device: torch.device, record: SolverRecord
    ) -> float:
        """In dB, at some samples; a field that knows only gradients is moved to the right mean."""
        values = self.predicted(model, rows, device, record)
        if self.supervise == "gradient":
            held = torch.cat(list(values))
            offset = (self.signal.targets(rows, held.dtype) - held).mean(0)
            values = iter((held + offset).split(self.block))
        blocks = zip(rows.split(self.block), values, strict=True)
        return self.signal.psnr(torch.cat([self.signal.squared_errors(v, r) for r, v in blocks]))

    def predicted(
        self, model: nn.Module, rows: Tensor, device: torch.device, record: SolverRecord
    ) -> Iterator[Tensor]:
        """Values at some samples, block by block, on the CPU."""
        dtype = next(model.parameters()).dtype
        for part in rows.split(self.block):
            out: Output = model(coordinates(self.signal.shape, part.to(device), dtype))
            if out.stats is not None:
                record.add(thinned(out.stats))
            yield out.values[-1].to(dtype).cpu()

    @torch.no_grad()
    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.inr.pictures import compare, unrolled

        rows = self.judged()["psnr"] if self.kind == "video" else torch.arange(len(self.signal))
        values = torch.cat(list(self.predicted(model, rows, device, SolverRecord())))
        if self.supervise == "gradient":
            values = values + (self.signal.targets(rows) - values).mean(0)
        if self.kind == "audio":
            return [unrolled(self.signal, values)]
        return [compare(self.signal, rows, {"fit": values}, self.told_by())]


@dataclass(frozen=True)
class GeneraliseImage(FitSignal):
    """A field learns every second pixel of every second line and is asked for those between.

    It is judged by the pixels that lie diagonally between those it has learnt, as in the paper; the
    best model is chosen by others, those to the right.

    Args: see `FitSignal`.
    """

    score: ClassVar[Score] = Score("val_psnr", "dB")

    @cached_property
    def fit_rows(self) -> Tensor:
        return self._pixels(0, 0)

    def judged(self) -> dict[str, Tensor]:
        return {
            "psnr": self._pixels(1, 1),
            "val_psnr": self._pixels(0, 1),
            "fit_psnr": self._pixels(0, 0),
        }

    def told_by(self) -> Tensor:
        return self.judged()["psnr"]

    def _pixels(self, top: int, left: int) -> Tensor:
        """Every second one of every second line."""
        if self.signal.kind != "image" or min(self.signal.shape) < 2:
            raise DataError(
                f"generalisation is between the pixels of an image, got {self.signal.kind} of "
                f"{self.signal.shape}"
            )
        rows = torch.arange(len(self.signal)).view(self.signal.shape)
        return rows[top::2, left::2].flatten()


def thinned(stats: SolverStat, most: int = _STATS) -> SolverStat:
    """Statistics of a few of the points, evenly spread."""
    status = stats.status
    rows = torch.arange(0, len(status), max(1, len(status) // most), device=status.device)
    held = {name: value[rows] for name, value in stats.items() if len(value) == len(status)}
    return SolverStat(held, nfe=stats.nfe, status=status[rows])


def _note(stats: list[SolverStat], out: Output) -> None:
    """Keep what the first block's solve did: the others do the same."""
    if not stats and out.stats is not None:
        stats.append(thinned(out.stats))


def _squared_error(values: Tensor, wanted: Tensor) -> Tensor:
    if values.shape != wanted.shape:
        raise ValueError(
            f"the field says {tuple(values.shape)}, the signal {tuple(wanted.shape)}: build it "
            "with the signal's channels"
        )
    return mean_of((values - wanted).square())
