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
from deq_zoo.data_dir import data_folder
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
from deq_zoo.mdeq.model import MDEQClassifier
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
_NOISE_SIDE = 8
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
        crop: zeros around a training image before a random crop of its size; 0 crops nothing.
        flip: whether training images are mirrored at random.
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
    crop: int = 0
    flip: bool = False
    size: int = 224
    limit: int = 0
    channels_last: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "batch", "eval_batch", "size")
        check_fields(self, 0, "crop", "limit", "val_images")

    @property
    def costly_batches(self) -> bool:
        return self.data == "imagenet"

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
            return _noise(split, self.net)
        root = data_folder(self.data_dir, self.data)
        if self.data == "cifar10":
            return cifar10(root, split)
        return ImageFolder(root / ("train" if split == "train" else "val"))

    def facts(self) -> dict[str, Any]:
        channels = self._channels
        facts: dict[str, Any] = {
            "side": {"digits": 28, "cifar10": 32, "noise": _NOISE_SIDE}.get(self.data, self.size),
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
        record = SolverRecord()
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        for images, y in self._batches(split):
            x = self._normalise(images).to(model.device)
            if thorough and not logits:  # a few images: a radius costs a hundred products
                record.radii += model(x[:8], sradius_mode=True).stats["sradius"].tolist()
            out: Output[Tensor, Any] = model(x)
            record.add(out.stats)
            logits.append(out.prediction.float().cpu())
            labels.append(y)
        scores, truth = torch.cat(logits), torch.cat(labels)
        loss = float(cross_entropy(scores, truth))
        return Evaluation({"accuracy": accuracy(scores, truth), "loss": loss}, record)

    def _batches(self, split: Split) -> Iterator[tuple[Tensor, Tensor]]:
        data = self.test_set if split == "test" else self.val_set
        assert data is not None, "the training loop asks for no score without validation data"
        for rows in torch.arange(len(data)).split(self.eval_batch):
            yield self._images(data, rows)

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
            logits = model(self._normalise(pixels).to(model.device)).prediction
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
            if doubt := unsettled(found.stats):
                notes.append(doubt)
            best = list(classes.probabilities.items())[:3]
            likely = ", ".join(f"{name} {100 * p:.1f} %" for name, p in best)
            data = {"probabilities": dict(best), "inverted": classes.inverted}
            data |= solve_data(found.stats)
            return Prediction(str(path), f"{path}: {likely} ({'; '.join(notes)})", data)

        return predict_each(paths, classify)


def _noise(split: str, net: MDEQConfig) -> Images:
    """Return a few images whose class is their brightest quarter."""
    rng = generator("noise", split)
    labels = torch.randint(min(4, net.classes), (64,), generator=rng)
    shape = (64, net.in_channels, _NOISE_SIDE, _NOISE_SIDE)
    pixels = torch.randint(0, 120, shape, generator=rng, dtype=torch.uint8)
    for image, label in zip(pixels, labels, strict=True):
        top, left = 4 * (int(label) // 2), 4 * (int(label) % 2)
        image[:, top : top + 4, left : left + 4] += 120
    names = tuple(str(k) for k in range(net.classes))
    spread = (0.5,) * net.in_channels
    return Images(pixels, labels, names, Channels(spread, spread))
