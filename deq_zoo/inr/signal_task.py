"""The part of a task that is about its signal: splits, model, PSNR, weights and renderings."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

import torch
from torch import Tensor

from deq_zoo.errors import DataError, ZooError
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.inr.blocks import block_size
from deq_zoo.inr.convert import from_authors, pick_state, to_authors
from deq_zoo.inr.data import PHOTOS, Source, crop, kind_of_source, open_signal
from deq_zoo.inr.evaluation import evaluate_blocks
from deq_zoo.inr.exporting import make_export
from deq_zoo.inr.fields import make_field
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.inr.render_file import write_rendering
from deq_zoo.inr.rendering import Rendering
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import DIMENSIONS, NAMES, Grid, Kind, Signal
from deq_zoo.inr.statistics import thin
from deq_zoo.predictions import OutFolder, Prediction
from deq_zoo.record import SolverRecord
from deq_zoo.task import Converted, Split, Task, Weights

_PREFIX = "field."  # of a field's weights in a representation


class Samples(NamedTuple):
    """Some samples of a signal, by their numbers."""

    signal: Signal
    rows: Tensor

    def __len__(self) -> int:
        return len(self.rows)


class SignalTask(Task):
    """A task about one signal and its field.

    Subclasses are frozen dataclasses with these fields.
    """

    net: FieldConfig
    data: Source
    file: str | None
    data_dir: str | None
    index: int
    channels: int
    side: int
    shrink: int
    length: int
    supervise: Literal["values", "gradient"]
    points_at_once: int
    eval_frames: int

    @property
    def kind(self) -> Kind:
        """Return the kind of signal, without opening it."""
        signal: Signal | None = self.__dict__.get("signal")
        return kind_of_source(self.data, self.file) if signal is None else signal.kind

    @property
    def reads_data_dir(self) -> bool:
        return self.data not in ("file", "ripples", *PHOTOS)

    @property
    def source(self) -> str:
        """Return the name of the data, for captions."""
        if self.data == "file":
            return "from memory" if self.file is None else Path(self.file).name
        return f"{self.data}, number {self.index}" if self.data_dir else self.data

    @cached_property
    def signal(self) -> Signal:
        """Return the signal to fit."""
        whole = open_signal(
            self.data, self.channels, self.file, self.data_dir, self.index, self.length
        )
        return self._checked(crop(whole, self.side, self.shrink, self.length))

    def _checked(self, signal: Signal) -> Signal:
        if self.supervise == "gradient" and signal.kind != "image":
            raise DataError(f"supervise='gradient' takes images, got {NAMES[signal.kind]}")
        return signal

    def with_signal(self, signal: Signal) -> Self:
        """Return the task with a signal from memory in place of its data."""
        channels = signal.channels if signal.kind == "image" else self.channels
        task = replace(self, channels=channels)  # type: ignore[type-var]
        task.__dict__["signal"] = self._checked(signal)
        return task

    @cached_property
    def train_set(self) -> Samples:
        """Return all samples; a batch holds places in `train_set.rows`."""
        return Samples(self.signal, torch.arange(len(self.signal)))

    @property
    def val_set(self) -> Samples | None:
        """Return None: a fit has no data but its signal, and the last checkpoint counts."""
        return None

    @cached_property
    def test_set(self) -> Samples:
        """Return the signal that was fitted; of a video, `eval_frames` frames evenly spread."""
        if not self.eval_frames or self.signal.kind != "video":
            return self.train_set
        frames, size = self.signal.shape[0], prod(self.signal.shape[1:])
        chosen = torch.linspace(0, frames - 1, min(frames, self.eval_frames)).round().long()
        return Samples(self.signal, (chosen[:, None] * size + torch.arange(size)).flatten())

    def samples(self, split: Split) -> Samples:
        """Return the samples of a split; raise `ZooError` for one that the task does not have."""
        data = self.test_set if split == "test" else self.val_set
        if data is None:
            raise ZooError(
                f"{type(self).__name__} has no validation data: a fit is scored on the signal it "
                "fits, the split 'test'"
            )
        return data

    @property
    def block(self) -> int:
        """Return how many points are computed at once."""
        return self.points_at_once or block_size(self.net.width)

    def facts(self) -> dict[str, Any]:
        return self.signal.grid.facts()

    def build(self, facts: Mapping[str, Any] | None = None) -> Representation:
        return Representation(self.make_field(self.net), self._find_grid(facts))

    def make_field(self, net: FieldConfig) -> Field:
        """Return a freshly initialised field for this kind of signal."""
        channels = {"audio": 1, "image": self.channels, "video": 3}[self.kind]
        return make_field(DIMENSIONS[self.kind], channels, net, self.deq)

    def _find_grid(self, facts: Mapping[str, Any] | None) -> Grid | None:
        """Return the grid of facts, or without facts that of the signal if its data is there."""
        return Grid.from_facts(self.available_facts() if facts is None else facts)

    def pick_state(self, content: Any) -> Weights | None:
        """Return the weights of this field and image in the content of a `*_summary.pth` file.

        The shape of the field chooses the model, and `index` the image. None for other files.
        """
        return pick_state(content, self.net, self.index)

    def from_authors(self, state: Weights) -> Converted:
        weights = from_authors(self.make_field(self.net), state)
        return Converted({_PREFIX + k: v for k, v in weights.items()}, self.available_facts())

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        field = {key.removeprefix(_PREFIX): value for key, value in state.items()}
        return to_authors(field, self.net.filter)

    def sampling(self) -> Rendering:
        return Rendering()

    def sample(self, model: Any, options: Rendering, out: OutFolder) -> Iterator[Prediction]:
        try:
            signal = self.signal
        except DataError:
            signal = None
        return write_rendering(model, options, out, signal)

    def export(self, model: Any, options: NoOptions) -> Exportable:
        return make_export(model.field, model.facts)

    def psnr(self, model: Any, rows: Tensor, record: SolverRecord | None = None) -> float:
        """Return the PSNR in dB at some samples.

        Args:
            model: in evaluation mode.
            rows: numbers of samples; of a video those of whole frames.
            record: gets the statistics of the solves.
        """
        values = self.values(model, rows, record)
        if self.supervise == "gradient":
            values = iter(self.with_mean(torch.cat(list(values)), rows).split(self.block))
        blocks = zip(rows.split(self.block), values, strict=True)
        return self.signal.psnr(torch.cat([self.signal.squared_errors(v, r) for r, v in blocks]))

    def with_mean(self, values: Tensor, rows: Tensor) -> Tensor:
        """Return values moved to the mean of the signal, which gradients leave open."""
        return values + (self.signal.targets(rows, values.dtype) - values).mean(0)

    def values(
        self, model: Any, rows: Tensor, record: SolverRecord | None = None
    ) -> Iterator[Tensor]:
        """Yield the values at some samples block by block, on the CPU."""
        dtype = next(model.parameters()).dtype
        for out in evaluate_blocks(model, self.signal.shape, rows, self.block):
            if record is not None and out.stats is not None:
                record.add(thin(out.stats))
            yield out.prediction.to(dtype).cpu()
