"""Fitting a signal: the tasks that fields are trained on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.errors import DataError
from deq_zoo.inr.blocks import mean_or_zero, sum_blocks
from deq_zoo.inr.data import Source
from deq_zoo.inr.derivatives import value_and_gradient
from deq_zoo.inr.model import FieldConfig
from deq_zoo.inr.order import sample_batch
from deq_zoo.inr.recipes import RECIPE, drop_recipe
from deq_zoo.inr.signal import coordinates
from deq_zoo.inr.signal_task import Samples, SignalTask
from deq_zoo.inr.statistics import thin
from deq_zoo.inr.warm import States, check_memory
from deq_zoo.output import Output
from deq_zoo.record import SolverRecord
from deq_zoo.task import WHOLE, Evaluation, Loss, Picture, Score, Shard, Split, steps_in_epoch
from deq_zoo.uses import GRADIENT, NORM, SOLVE, STATES
from torchdeq import DEQConfig, SolverStat, fp_correction

_RADII = 16  # points whose spectral radius is estimated

Evaluate = Callable[[Tensor, Tensor], list[Tensor]]  # points and their places to values by state


@dataclass(frozen=True)
class FitSignal(SignalTask):
    """One field learns one signal, by the squared error at its samples.

    A fit is scored on the signal it fits: there are no other data, and the test set is the signal.
    `psnr` is its peak signal-to-noise ratio in dB, with peak 1: of an image and a video as
    brightness from 0 to 1, of a video as the mean over frames, of a sound as it is.

    Args:
        net: the shape of the field.
        deq: options of the equilibrium.
        data: astronaut, chelsea, coffee or camera (of scikit-image); file; nature, text, celeba,
            video or audio (from `data_dir`); ripples (for tests).
        file: an image, sound or video, for the data `file`.
        data_dir: folder with the data set's files.
        index: number of the signal in a data set.
        channels: of images, 3 or 1.
        side: of a square in the middle of every picture; 0 takes the whole picture.
        shrink: divide the sides of pictures by this first.
        length: fit so many frames or samples from the start; 0 fits all.
        batch: points per step, in a random order; 0 takes all points at every step.
        warm: whether a step starts from the states of the step before, without a solve.
        supervise: fit values, or only the gradients of an image.
        points_at_once: in a block; 0 chooses by the width.
        eval_frames: evaluate so many frames of a video, evenly spread; 0 evaluates all.
    """

    score: ClassVar[Score] = Score("psnr", "dB")

    net: FieldConfig = field(default_factory=FieldConfig)
    deq: DEQConfig = RECIPE
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
        object.__setattr__(self, "deq", drop_recipe(self.deq, self.uses))
        super().__post_init__()
        check_fields(self, 0, "index", "side", "length", "batch", "points_at_once", "eval_frames")
        check_fields(self, 1, "shrink")
        if self.channels not in (1, 3):
            raise ValueError(f"channels must be 1 or 3, got {self.channels}")
        if self.supervise == "gradient":
            self._check_gradient()

    @property
    def uses(self) -> frozenset[str]:
        """Return the options that have an effect on the field; an explicit one has no solve."""
        return self.uses_of(self.net)

    def uses_of(self, net: FieldConfig) -> frozenset[str]:
        """Return the options of the equilibrium that have an effect on one field."""
        if net.implicit:
            one_state = self.supervise == "gradient"
            return SOLVE | GRADIENT | NORM | (frozenset() if one_state else STATES)
        return NORM if net.kind == "one_pass" else frozenset()

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
        n = len(self.train_set)
        if self.keeps_states:
            check_memory(n, self.net.width)
        return steps_in_epoch(n, self.batch or n)

    @property
    def keeps_states(self) -> bool:
        """Return whether states are kept from step to step."""
        return self.warm and self.net.implicit

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Tensor:
        n = len(self.train_set)
        if not 0 < self.batch < n:
            return torch.arange(n)[shard.rank :: shard.world]
        return sample_batch(n, self.batch, step, seed, shard)

    def loss(self, model: Any, batch: Tensor, carry: Any) -> Loss:
        stats: list[SolverStat] = []  # of the first block: the others do the same
        if not self.keeps_states:

            def solve(x: Tensor, places: Tensor) -> list[Tensor]:
                out: Output[Tensor, Any] = model(x)
                _keep_first(stats, out)
                return out.predictions

            return Loss(self.error(model, batch, solve), stats=stats[0] if stats else None)
        states = States.of(carry, len(self.train_set), self.net.width, model)

        def follow(x: Tensor, places: Tensor) -> list[Tensor]:
            z0, visited = states.start(places)
            out: Output[Tensor, Any] = model(x, z0, **({"f_max_iter": 0} if visited else {}))
            states.keep(places, out.state)
            if not visited:
                _keep_first(stats, out)
            return out.predictions

        value = self.error(model, batch, follow)
        return Loss(value, stats=stats[0] if stats else None, carry=states.carry())

    def split_carry(self, carries: Sequence[Any], shard: Shard) -> dict[str, Tensor]:
        """Return the states of all points that any process has had."""
        return States.merged(carries).carry()

    def error(self, model: Any, batch: Tensor, evaluate: Evaluate) -> Tensor:
        """Return the mean squared error at the points of a batch, computed block by block.

        Args:
            model: whose parameters get gradients.
            batch: places in the training set.
            evaluate: returns the values of a block of points.
        """
        parameters = [p for p in model.parameters() if p.requires_grad]
        dtype, rows = parameters[0].dtype, self.train_set.rows.to(batch.device)
        shape, total = self.signal.shape, len(batch)

        def losses() -> Iterator[Tensor]:
            for places in batch.split(self.block):
                x = coordinates(shape, rows[places], dtype)
                if self.supervise == "gradient":
                    values = [self._differences(evaluate, x, places)]
                    wanted = self.target_differences.to(x)[rows[places]]
                else:
                    values, wanted = evaluate(x, places), self.signal.targets(rows[places], dtype)
                share = len(places) / max(1, total)
                yield share * fp_correction(_squared_error, (values, wanted), gamma=self.deq.gamma)

        return sum_blocks(losses(), parameters)

    @cached_property
    def target_differences(self) -> Tensor:
        """Return the differences (N, c, 2) of neighbouring pixels, along (column, row)."""
        image = self.signal.targets(torch.arange(len(self.signal))).view(*self.signal.shape, -1)
        rows, columns = torch.gradient(image, dim=(0, 1))
        return torch.stack((columns, rows), dim=-1).flatten(0, 1)

    def _differences(self, evaluate: Evaluate, x: Tensor, places: Tensor) -> Tensor:
        """Return the gradient of the field in the units of `target_differences`."""
        _, gradient = value_and_gradient(lambda x: evaluate(x, places)[-1], x)
        height, width = self.signal.shape
        return gradient * (2 / (x.new_tensor((width, height)) - 1).clamp_min(1))

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record = SolverRecord()
        data = self.samples(split)
        if thorough and self.net.implicit:
            record.radii += self._radii(model)
        return Evaluation({"psnr": self.psnr(model, data.rows, record)}, record)

    def _radii(self, model: Any) -> list[float]:
        """Return spectral radii at a few points, evenly spread over the training set."""
        rows = self.train_set.rows
        few = rows[:: max(1, len(rows) // _RADII)][:_RADII].to(model.device)
        x = coordinates(self.signal.shape, few, next(model.parameters()).dtype)
        radii: list[float] = model(x, sradius_mode=True).stats["sradius"].tolist()
        return radii

    @torch.no_grad()
    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.inr.pictures import plot_pictures, plot_sound

        rows = self.test_set.rows if self.kind == "video" else torch.arange(len(self.signal))
        values = torch.cat(list(self.values(model, rows)))
        if self.supervise == "gradient":
            values = self.with_mean(values, rows)
        if self.kind == "audio":
            return [plot_sound(self.signal, values, self.source)]
        return [plot_pictures(self.signal, rows, {"fit": values}, self.caption, self._scored(rows))]

    @property
    def caption(self) -> str:
        """Return the sentences of a picture's caption about its data."""
        if self.supervise == "gradient":
            return (
                f"Data: {self.source}. The field has learnt the gradients of this image alone; its "
                "mean brightness is set to that of the image. PSNR is that of all pixels."
            )
        return (
            f"Data: {self.source}. PSNR is that of all pixels shown, and the field has learnt all "
            "of them."
        )

    def _scored(self, rows: Tensor) -> Tensor:
        """Return which of the samples of a picture count in its PSNR."""
        return torch.ones(len(rows), dtype=torch.bool)


@dataclass(frozen=True)
class GeneraliseImage(FitSignal):
    """A field learns every second pixel of every second line and is asked for pixels between them.

    The training pixels are those at even lines and columns. Validation data are the pixels to the
    right of them, by which the best checkpoint is chosen. The test data are the pixels diagonally
    between them, as in the paper. `psnr` is that of the pixels of one split, in dB.

    Args: see `FitSignal`.
    """

    @cached_property
    def train_set(self) -> Samples:
        """Return the pixels at even lines and columns."""
        return self._pixels(0, 0)

    @cached_property
    def val_set(self) -> Samples:
        """Return the pixels to the right of the training pixels."""
        return self._pixels(0, 1)

    @cached_property
    def test_set(self) -> Samples:
        """Return the pixels diagonally between the training pixels."""
        return self._pixels(1, 1)

    def _pixels(self, top: int, left: int) -> Samples:
        if self.signal.kind != "image" or min(self.signal.shape) < 2:
            raise DataError(
                f"generalisation is between the pixels of an image, got {self.signal.kind} of "
                f"{self.signal.shape}"
            )
        rows = torch.arange(len(self.signal)).view(self.signal.shape)
        return Samples(self.signal, rows[top::2, left::2].flatten())

    @property
    def caption(self) -> str:
        return (
            f"Data: {self.source}. The field has learnt every fourth pixel. PSNR is that of the "
            "test pixels, which lie diagonally between the learnt ones; the weights were chosen by "
            "other pixels, to the right of the learnt ones."
        )

    def _scored(self, rows: Tensor) -> Tensor:
        return torch.isin(rows, self.test_set.rows)


def _keep_first(stats: list[SolverStat], out: Output[Tensor, Any]) -> None:
    if not stats and out.stats is not None:
        stats.append(thin(out.stats))


def _squared_error(values: Tensor, wanted: Tensor) -> Tensor:
    if values.shape != wanted.shape:
        raise ValueError(
            f"the values of the field are {tuple(values.shape)}, those of the signal "
            f"{tuple(wanted.shape)}: build the field with the signal's channels"
        )
    return mean_or_zero((values - wanted).square())
