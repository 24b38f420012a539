"""The common part of the tasks of optical flow."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.exportable import Exportable
from deq_zoo.flow.augment import Pair, with_noise
from deq_zoo.flow.config import FlowConfig
from deq_zoo.flow.convert import from_authors, to_authors
from deq_zoo.flow.exporting import FrameSize, make_export
from deq_zoo.flow.loss import sequence_loss, training_metrics
from deq_zoo.flow.model import DEQFlow, State
from deq_zoo.flow.predict import predict_files
from deq_zoo.flow.scoring import Sets, collate, score_sets
from deq_zoo.loading import open_model
from deq_zoo.output import Output
from deq_zoo.predictions import Failure, OutFolder, Prediction
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
    generator,
)
from deq_zoo.weights import check_fits, load_weights
from torchdeq import DEQConfig

Batch = tuple[Tensor, ...]  # two frames, true flow, where it is valid, and maybe a flow as z0
_ADVICE = "Files of the authors' first release need --set task.net.narrow_head=true"


@dataclass(frozen=True)
class FlowTask(Task):
    """A DEQ-Flow with pairs to train on; see the subclasses.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium.
        batch: pairs per step.
        eval_batch: pairs per step of evaluation, if of one size.
        crop: height and width of training pairs.
        data_dir: folder with the data sets' folders.
        start_from: run folder or checkpoint with the weights to begin with; a run that has begun
            does not need it any more.
        noise: largest standard deviation, in grey levels, of noise that training adds to both
            frames; 5 is usual.
    """

    score: ClassVar[Score] = Score("aepe", "px", higher_is_better=False)

    net: FlowConfig = field(default_factory=FlowConfig)
    deq: DEQConfig = field(default_factory=DEQConfig)
    batch: int = 6
    eval_batch: int = 1
    crop: tuple[int, int] = (368, 496)
    data_dir: str | None = None
    start_from: str | None = None
    noise: float = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch", "eval_batch")
        if min(self.crop) < 64 or any(side % 8 for side in self.crop):
            raise ValueError(f"crop takes two multiples of 8 from 64 on, got {self.crop}")
        if not 0 <= self.noise <= 255:
            raise ValueError(f"noise must lie in [0, 255], in grey levels, got {self.noise}")

    @property
    @abstractmethod
    def val_set(self) -> Sets | None: ...

    @property
    @abstractmethod
    def test_set(self) -> Sets: ...

    @abstractmethod
    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        """Return some pairs of a training batch, by their numbers in the batch."""

    def build(self, facts: Mapping[str, Any] | None = None) -> DEQFlow:
        return DEQFlow(self.net, self.deq)

    def begin(self, model: Any) -> None:
        if self.start_from is not None:
            earlier, _ = open_model(Path(self.start_from))
            load_weights(model, earlier.state_dict(), self.start_from)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Batch:
        return collate(self.noisy_pairs(step, self.rows(shard), seed))

    def noisy_pairs(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        """Return some pairs of a training batch, with the noise of the task."""
        pairs = self.draw(step, rows, seed)
        if not self.noise:
            return pairs
        return [
            with_noise(pair, self.noise, generator("noise", seed, step, k))
            for k, pair in zip(rows, pairs, strict=True)
        ]

    def rows(self, shard: Shard) -> Sequence[int]:
        """Return the numbers of the pairs in a batch that a process takes."""
        rows = range(self.batch)[shard.rank :: shard.world]
        if not rows:
            raise ZooError(f"a batch of {self.batch} is too small for {shard.world} processes")
        return rows

    def loss(self, model: Any, batch: Batch, carry: Any) -> Loss:
        image1, image2, truth, valid, *z0 = batch
        out: Output[Tensor, State] = model((image1, image2), *z0)
        value = sequence_loss(out.predictions, truth, valid, self.deq.gamma)
        return Loss(value, training_metrics(out.prediction, truth, valid), out.stats)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        sets = self.test_set if split == "test" else self.val_set
        assert sets is not None, "the training loop asks for no score without validation data"
        return score_sets(model, sets, self.eval_batch, thorough)

    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.flow.pictures import draw_examples, gallery

        with torch.no_grad():
            return [gallery(draw_examples(model, self.test_set))]

    def from_authors(self, state: Weights) -> Converted:
        weights = from_authors(state)
        with torch.device("meta"):
            expected = self.build().state_dict()
        check_fits(weights, expected, "the checkpoint", _ADVICE)
        return Converted(weights, {})

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        if self.net.widths.trunk:
            raise ZooError(f"the authors' programs have no model of size {self.net.size}")
        return to_authors(state)

    def exporting(self) -> FrameSize:
        return FrameSize()

    def export(self, model: Any, options: FrameSize) -> Exportable:
        height, width = self.crop
        return make_export(model, options.height or height, options.width or width)

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        return predict_files(model, paths, out)
