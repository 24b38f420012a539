"""A task about one signal: its samples, and the field that represents it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from math import prod
from pathlib import Path
from typing import Literal, Self

import torch
from torch import Tensor, nn

from deq_zoo.errors import DataError
from deq_zoo.inr.convert import from_authors
from deq_zoo.inr.data import Source, cropped, kind_of_source, open_signal
from deq_zoo.inr.fields import make_field
from deq_zoo.inr.model import Field, FieldConfig
from deq_zoo.inr.render import Rendering, write_rendering
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import DIMENSIONS, NAMES, Kind, Signal
from deq_zoo.task import Task


class SignalTask(Task):
    """The signal of a task and its field, apart from the training.

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
    eval_frames: int

    @property
    def kind(self) -> Kind:
        """Of signal; known without opening it."""
        signal: Signal | None = self.__dict__.get("signal")
        return kind_of_source(self.data, self.file) if signal is None else signal.kind

    @cached_property
    def signal(self) -> Signal:
        """What is fitted."""
        whole = open_signal(
            self.data, self.channels, self.file, self.data_dir, self.index, self.length
        )
        return self._checked(cropped(whole, self.side, self.shrink, self.length))

    def _checked(self, signal: Signal) -> Signal:
        if self.supervise == "gradient" and signal.kind != "image":
            raise DataError(f"supervise='gradient' takes images, got {NAMES[signal.kind]}")
        return signal

    def holding(self, signal: Signal) -> Self:
        """The task with a signal from memory in place of its data."""
        channels = signal.channels if signal.kind == "image" else self.channels
        task = replace(self, channels=channels)  # type: ignore[type-var]
        task.__dict__["signal"] = self._checked(signal)
        return task

    @cached_property
    def fit_rows(self) -> Tensor:
        """Samples to learn from; a batch holds places in this list."""
        return torch.arange(len(self.signal))

    def judged(self) -> dict[str, Tensor]:
        """Samples to judge by, for every metric."""
        if not self.eval_frames or self.signal.kind != "video":
            return {"psnr": torch.arange(len(self.signal))}
        frames, size = self.signal.shape[0], prod(self.signal.shape[1:])
        chosen = torch.linspace(0, frames - 1, min(frames, self.eval_frames)).round().long()
        return {"psnr": (chosen[:, None] * size + torch.arange(size)).flatten()}

    def told_by(self) -> Tensor | None:
        """Samples by which the PSNR of a picture is told; None takes those that are shown."""
        return None

    def build(self) -> nn.Module:
        return self.framed(Representation(self.make(self.net)))

    def make(self, net: FieldConfig) -> Field:
        """A field for this kind of signal."""
        channels = {"audio": 1, "image": self.channels, "video": 3}[self.kind]
        return make_field(DIMENSIONS[self.kind], channels, net, self.deq)

    def framed(self, model: Representation) -> Representation:
        """The model with the size of the signal, if that is at hand."""
        try:
            return model.frame_(self.signal.shape, self.signal.rate)
        except DataError:  # a trained model is rendered without its data: it knows its size
            return model

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        model = self.build()
        assert isinstance(model, Representation)
        found = from_authors(model.field, state)
        return {f"field.{key}": value for key, value in found.items()} | {"frame": model.frame}

    def sampling(self) -> Rendering:
        return Rendering()

    def sample(
        self, model: nn.Module, options: Rendering, out: Path, device: torch.device
    ) -> Iterator[str]:
        assert isinstance(model, Representation)
        try:
            signal = self.signal
        except DataError:
            signal = None
        yield from write_rendering(model, options, out, signal)
