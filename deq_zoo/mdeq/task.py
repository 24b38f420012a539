"""Image classification: the task that MDEQ is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy

from deq_zoo.checks import check_fields
from deq_zoo.compaction import Compaction
from deq_zoo.data_dir import data_folder
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.images.cifar import CIFAR10_CHANNELS, CIFAR10_CLASSES, cifar10
from deq_zoo.images.labelled import (
    IMAGENET_CHANNELS,
    Channels,
    ImageFolder,
    Images,
    Labelled,
    hold_out,
)
from deq_zoo.images.mnist import MNIST_CHANNELS, mnist_digits
from deq_zoo.mdeq.augment import normalise, random_crop, random_flip, random_resized_crop
from deq_zoo.mdeq.config import TINY, MDEQConfig
from deq_zoo.mdeq.convert import from_authors, to_authors
from deq_zoo.mdeq.drawings import from_test_paper, vary_drawings
from deq_zoo.mdeq.exporting import make_export
from deq_zoo.mdeq.model import MDEQClassifier
from deq_zoo.mdeq.noise import NOISE_SIDE, bright_quarters
from deq_zoo.mdeq.prediction import crop_middle
from deq_zoo.metrics import accuracy
from deq_zoo.output import Output, solve_data, unsettled
from deq_zoo.predictions import Failure, OutFolder, Prediction, predict_each
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
from torchdeq import DEQConfig, fp_correction

Source = Literal["digits", "cifar10", "imagenet", "noise"]
_CHANNELS = {
    "imagenet": IMAGENET_CHANNELS,
    "cifar10": CIFAR10_CHANNELS,
    "digits": MNIST_CHANNELS,
}
_SHOWN = 24  # images in the report


@dataclass(frozen=True)
class ClassifyImages(Task):
    """Images to one of several classes; cross-entropy, accuracy.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium.
        data: digits (embedded), cifar10 or imagenet (from `data_dir`), noise (for tests).
        data_dir: folder with the data set's files.
        val_images: training images held out to choose the best checkpoint by; 0 holds out none, and
            the last checkpoint counts.
        batch: images per step.
        eval_batch: images per step of evaluation.
        eval_slots: images that evaluation solves at the same time, where one that has converged
            makes room for the next; 0 solves each batch to its end.
        crop: zeros around a training image before a random crop of its size; 0 crops nothing.
        flip: whether training images are mirrored at random.
        paper: whether training images, drawings, vary in shape, thickness and place, half of them
            on paper in uneven light; evaluations then also score pictures of drawings on paper.
        size: side of ImageNet's crops.
        limit: use only so many training images; 0 uses all.
        channels_last: keep a pixel's channels together in memory; a tenth faster on a CPU.
    """

    score: ClassVar[Score] = Score("accuracy", "%")

    net: MDEQConfig = TINY
    deq: DEQConfig = field(default_factory=DEQConfig)
    data: Source = "cifar10"
    data_dir: str | None = None
    val_images: int = 0
    batch: int = 128
    eval_batch: int = 500
    eval_slots: int = 0
    crop: int = 0
    flip: bool = False
    paper: bool = False
    size: int = 224
    limit: int = 0
    channels_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch", "eval_batch", "size")
        check_fields(self, 0, "crop", "limit", "val_images", "eval_slots")
        if self.paper and self.data != "digits":
            raise ValueError(f"paper=true is for drawings, data=digits, got data={self.data}")

    @property
    def costly_batches(self) -> bool:
        return self.data == "imagenet"

    @property
    def reads_data_dir(self) -> bool:
        return self.data in ("cifar10", "imagenet")

    @cached_property
    def _train_and_val(self) -> tuple[Labelled, Labelled | None]:
        data = self._open("train")
        if not self.val_images:
            return data, None
        return hold_out(data, self.val_images)

    @cached_property
    def train_set(self) -> Labelled:
        data, _ = self._train_and_val
        return data.subset(torch.arange(min(len(data), self.limit))) if self.limit else data

    @property
    def val_set(self) -> Labelled | None:
        return self._train_and_val[1]

    @cached_property
    def test_set(self) -> Labelled:
        return self._open("test")

    def _open(self, split: str) -> Labelled:
        if self.data == "digits":
            return mnist_digits(split)
        if self.data == "noise":
            return bright_quarters(split, self.net)
        root = data_folder(self.data_dir, self.data)
        if self.data == "cifar10":
            return cifar10(root, split)
        return ImageFolder(root / ("train" if split == "train" else "val"))

    def facts(self) -> dict[str, Any]:
        channels = self._channels
        facts: dict[str, Any] = {
            "side": {"digits": 28, "cifar10": 32, "noise": NOISE_SIDE}.get(self.data, self.size),
            "mean": list(channels.mean),
            "std": list(channels.std),
            "crop": self.data == "imagenet",
            "classes": list(CIFAR10_CLASSES if self.data == "cifar10" else self.train_set.classes),
        }
        return facts | {"ground": "dark"} if self.data == "digits" else facts

    def build(self, facts: Mapping[str, Any] | None = None) -> MDEQClassifier:
        model = MDEQClassifier(self.net, self.deq)
        return model.to(memory_format=self._format)  # type: ignore[call-overload,no-any-return]

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.preserve_format

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(len(self.train_set), self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
        rows = batch_indices(len(self.train_set), self.batch, step, seed, shard)
        rng = generator("augment", seed, step, shard.rank)
        data = self.train_set
        if isinstance(data, ImageFolder):
            items = [data[int(i)] for i in rows]
            images = torch.stack([random_resized_crop(each, self.size, rng) for each, _ in items])
            labels = torch.tensor([label for _, label in items])
        else:
            images, labels = data.pixels[rows], data.labels[rows]
            if self.crop:
                images = random_crop(images, images.shape[-1], rng, self.crop)
            if self.paper:
                images = vary_drawings(images, rng)
        if self.flip:
            images = random_flip(images, rng)
        return self._normalise(images), labels

    def _normalise(self, images: Tensor) -> Tensor:
        return normalise(images, self._channels).to(memory_format=self._format)

    @property
    def _channels(self) -> Channels:
        """Return mean and spread of the pixels, without opening the data where possible."""
        return _CHANNELS.get(self.data) or self.train_set.channels

    def loss(self, model: Any, batch: tuple[Tensor, Tensor], carry: Any) -> Loss:
        x, y = batch
        out: Output[Tensor, Any] = model(x)
        value = fp_correction(cross_entropy, (out.predictions, y), gamma=self.deq.gamma)
        right = (out.prediction.argmax(1) == y).float().mean()
        return Loss(value, {"train_accuracy": 100 * right}, out.stats)

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        data = self.test_set if split == "test" else self.val_set
        assert data is not None, "the training loop asks for no score without validation data"
        record, labels = SolverRecord(), data.labels
        logits = self._logits(model, self._batches(data), record, thorough)
        loss = float(cross_entropy(logits, labels))
        metrics = {"accuracy": accuracy(logits, labels), "loss": loss}
        if self.paper:
            assert isinstance(data, Images), "paper is for images in memory"
            sheets = from_test_paper(data.pixels).split(self.eval_batch)
            read = self._logits(model, iter(sheets), SolverRecord(), thorough=False)
            metrics["paper_accuracy"] = accuracy(read, labels)
        return Evaluation(metrics, record)

    def _logits(
        self, model: Any, batches: Iterator[Tensor], record: SolverRecord, thorough: bool
    ) -> Tensor:
        """Return the logits (N, classes) of batches of pixels; add their solves to a record."""

        def inputs() -> Iterator[Tensor]:
            for k, images in enumerate(batches):
                x = model.place(self._normalise(images))
                if thorough and not k:  # a few images: a radius costs a hundred products
                    record.radii += model(x[:8], sradius_mode=True).stats["sradius"].tolist()
                yield x

        logits: list[Tensor] = []
        if self.eval_slots:  # images enter and leave a running batch
            for solution in model.solve_stream(map(model.inject, inputs()), self.eval_slots):
                record.add(solution.stats)
                logits.append(model.classify(solution.z).float().cpu())
            return torch.cat(logits)
        solve = Compaction(model)
        for x in inputs():
            out: Output[Tensor, Any] = solve(x)
            record.add(out.stats)
            logits.append(out.prediction.float().cpu())
        return torch.cat(logits)

    def _batches(self, data: Labelled) -> Iterator[Tensor]:
        for rows in torch.arange(len(data)).split(self.eval_batch):
            yield self._images(data, rows)[0]

    def _images(self, data: Labelled, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Return pixels and labels of some images, in the form that evaluation shows them."""
        if not isinstance(data, ImageFolder):
            return data.pixels[rows], data.labels[rows]
        items = [data[int(i)] for i in rows]
        images = torch.stack([crop_middle(image, self.size) for image, _ in items])
        return images, torch.tensor([label for _, label in items])

    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.mdeq.pictures import gallery

        n = len(self.test_set)
        rows = torch.randperm(n, generator=generator("pictures"))[:_SHOWN]
        pixels, labels = self._images(self.test_set, rows)
        with torch.no_grad():
            logits = model(model.place(self._normalise(pixels))).prediction
        return [gallery(pixels, logits.softmax(1).cpu(), labels, self.test_set.classes)]

    def from_authors(self, state: Weights) -> Converted:
        return Converted(from_authors(self.build(), state), self.available_facts())

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        return to_authors(state)

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        def classify(path: Path) -> Prediction:
            found = model.predict(path)
            classes, notes = found.prediction, [f"{found.stats.nfe} evaluations"]
            if classes.inverted:
                notes.append("light and dark exchanged: the model was trained on a dark ground")
            if not classes.drawn:
                notes.append("no ink on an even ground is seen: the answer may mean nothing")
            if doubt := unsettled(found.stats):
                notes.append(doubt)
            best = list(classes.probabilities.items())[:3]
            likely = ", ".join(f"{name} {100 * p:.1f} %" for name, p in best)
            data = {"probabilities": dict(best)}
            data |= {"inverted": classes.inverted, "drawn": classes.drawn}
            data |= solve_data(found.stats)
            return Prediction(str(path), f"{path}: {likely} ({'; '.join(notes)})", data)

        return predict_each(paths, classify)

    def export(self, model: Any, options: NoOptions) -> Exportable:
        return make_export(model, model.facts)
