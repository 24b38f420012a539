"""Image classification: the task that MDEQ is trained on."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

from deq_zoo.checks import check_fields
from deq_zoo.data_dir import data_folder
from deq_zoo.images.cifar import CIFAR10_CHANNELS, CIFAR10_CLASSES, cifar10
from deq_zoo.images.files import read_image
from deq_zoo.images.labelled import IMAGENET_CHANNELS, Channels, ImageFolder, Images
from deq_zoo.images.mnist import MNIST_CHANNELS, mnist_digits
from deq_zoo.mdeq.augment import (
    center_crop,
    normalise,
    random_crop,
    random_flip,
    random_resized_crop,
    resize,
    resize_shorter,
)
from deq_zoo.mdeq.model import TINY, MDEQClassifier, MDEQConfig
from deq_zoo.metrics import accuracy
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    Task,
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


@dataclass(frozen=True)
class ClassifyImages(Task):
    """Images to one of several classes; cross-entropy, accuracy.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium.
        data: digits (embedded), cifar10 or imagenet (from `data_dir`), noise (for tests).
        data_dir: folder with the data set's files.
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
    batch: int = 128
    eval_batch: int = 500
    crop: int = 0
    flip: bool = False
    size: int = 224
    limit: int = 0
    channels_last: bool = False

    def __post_init__(self) -> None:
        check_fields(self, 1, "batch", "eval_batch", "size")
        check_fields(self, 0, "crop", "limit")
        if self.deq.jac_loss_weight:
            raise ValueError("MDEQ is trained without a Jacobian loss: drop jac_loss_weight")

    @cached_property
    def train_set(self) -> Images | ImageFolder:
        return self._open("train")

    @cached_property
    def test_set(self) -> Images | ImageFolder:
        return self._open("test")

    def _open(self, split: str) -> Images | ImageFolder:
        if self.data == "digits":
            return mnist_digits(split)
        if self.data == "noise":
            return _noise(split, self.net)
        root = data_folder(self.data_dir, self.data)
        if self.data == "cifar10":
            return cifar10(root, split)
        return ImageFolder(root / ("train" if split == "train" else "val"))

    @cached_property
    def _train_size(self) -> int:
        n = len(self.train_set)
        return min(n, self.limit) if self.limit else n

    def build(self) -> nn.Module:
        model = MDEQClassifier(self.net, self.deq)
        return model.to(memory_format=self._format)  # type: ignore[call-overload,no-any-return]

    @property
    def _format(self) -> torch.memory_format:
        return torch.channels_last if self.channels_last else torch.preserve_format

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(self._train_size, self.batch)

    def train_batch(self, step: int, seed: int, shard: Shard) -> tuple[Tensor, Tensor]:
        rows = batch_indices(self._train_size, self.batch, step, seed, shard)
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
        return self._ready(images, data.channels), labels

    def _ready(self, images: Tensor, channels: Channels) -> Tensor:
        return normalise(images, channels).to(memory_format=self._format)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor], carry: Any) -> Loss:
        x, y = batch
        logits, stats = model(x)
        value = fp_correction(cross_entropy, (logits, y), gamma=self.deq.gamma)
        right = (logits[-1].argmax(1) == y).float().mean()
        return Loss(value, {"train_accuracy": 100 * right}, stats)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record = SolverRecord()
        logits: list[Tensor] = []
        labels: list[Tensor] = []
        for x, y in self._test_batches():
            if thorough and not logits:  # a few images: a radius costs a hundred products
                record.radii += model(x[:8].to(device), sradius_mode=True)[1]["sradius"].tolist()
            found, stats = model(x.to(device))
            record.add(stats)
            logits.append(found[-1].float().cpu())
            labels.append(y)
        scores, truth = torch.cat(logits), torch.cat(labels)
        loss = float(cross_entropy(scores, truth))
        return Evaluation({"accuracy": accuracy(scores, truth), "test_loss": loss}, record)

    def _test_batches(self) -> Iterator[tuple[Tensor, Tensor]]:
        for rows in torch.arange(len(self.test_set)).split(self.eval_batch):
            images, labels = self._test_images(rows)
            yield self._ready(images, self._channels), labels

    def _centre(self, image: Tensor) -> Tensor:
        return center_crop(resize_shorter(image, self.size * 256 // 224), self.size)

    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.mdeq.pictures import gallery

        n = len(self.test_set)
        rows = torch.randperm(n, generator=generator("pictures"))[: self.eval_batch]
        pixels, labels = self._test_images(rows)
        with torch.no_grad():
            logits, _ = model(self._ready(pixels, self._channels).to(device))
        chance = logits[-1].softmax(1).cpu()
        wrong = (chance.argmax(1) != labels).nonzero().flatten()[:8]
        right = (chance.argmax(1) == labels).nonzero().flatten()[: 24 - len(wrong)]
        shown = torch.cat((right, wrong))
        return [gallery(pixels[shown], chance[shown], labels[shown], self.test_set.classes)]

    def _test_images(self, rows: Tensor) -> tuple[Tensor, Tensor]:
        """Pixels and labels of some test images, in the form the network sees them."""
        data = self.test_set
        if not isinstance(data, ImageFolder):
            return data.pixels[rows], data.labels[rows]
        items = [data[int(i)] for i in rows]
        images = torch.stack([self._centre(image) for image, _ in items])
        return images, torch.tensor([label for _, label in items])

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return dict(state)  # the names are the authors' own

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> list[str]:
        lines = []
        for file in files:
            x = self._ready(self._prepare(read_image(file))[None], self._channels)
            with torch.no_grad():
                logits, stats = model(x.to(device))
            chance = logits[-1].softmax(1)[0]
            best = chance.topk(min(3, len(chance)))
            told = ", ".join(
                f"{self._name(int(i))} {100 * float(p):.1f} %"
                for p, i in zip(best.values, best.indices, strict=True)
            )
            lines.append(f"{file}: {told} ({stats.nfe} evaluations)")
        return lines

    def _prepare(self, image: Tensor) -> Tensor:
        """A picture from anywhere in the form of the training images."""
        if self.data == "imagenet":
            return self._centre(image)
        side = {"digits": 28, "cifar10": 32, "noise": 8}[self.data]
        image = resize(image, side, side)
        if self.net.in_channels == 3:
            return image
        return image.float().mean(0, keepdim=True).round().byte()

    @property
    def _channels(self) -> Channels:
        """Return what images are normalised with, without opening the data where possible."""
        return _CHANNELS.get(self.data) or self.test_set.channels

    def _name(self, label: int) -> str:
        """The class, by name where that does not need the data."""
        return CIFAR10_CLASSES[label] if self.data == "cifar10" else str(label)


def _noise(split: str, net: MDEQConfig) -> Images:
    """A few images whose class is their brightest quarter."""
    rng = generator("noise", split)
    labels = torch.randint(min(4, net.classes), (64,), generator=rng)
    pixels = torch.randint(0, 120, (64, net.in_channels, 8, 8), generator=rng, dtype=torch.uint8)
    for image, label in zip(pixels, labels, strict=True):
        top, left = 4 * (int(label) // 2), 4 * (int(label) % 2)
        image[:, top : top + 4, left : left + 4] += 120
    names = tuple(str(k) for k in range(net.classes))
    spread = (0.5,) * net.in_channels
    return Images(pixels, labels, names, Channels(spread, spread))
