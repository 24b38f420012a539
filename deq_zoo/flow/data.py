"""The data sets of a training stage: its mixture, and the sets that a model is scored on."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Literal

import torch

from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError
from deq_zoo.flow import datasets
from deq_zoo.flow.augment import Augment, Pair
from deq_zoo.flow.datasets import FlowSet
from deq_zoo.flow.formats import plausible

Stage = Literal["chairs", "things", "sintel", "kitti"]
Folder = Callable[[str], Path]

_FOLDERS = {
    "chairs": "FlyingChairs_release",
    "things": "FlyingThings3D",
    "sintel": "Sintel",
    "kitti": "KITTI",
    "hd1k": "HD1K",
    "middlebury": "Middlebury",
}


@dataclass(frozen=True)
class Part:
    """A set in a mixture."""

    pairs: FlowSet
    repeat: int
    augment: Augment


@dataclass(frozen=True)
class Mixture:
    """Several sets as one; the pairs of each set are repeated as often as its part says."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.pairs) * part.repeat for part in self.parts)

    def draw(self, index: int, rng: torch.Generator) -> Pair:
        """Return pair `index`, augmented."""
        for part in self.parts:
            size = len(part.pairs) * part.repeat
            if index < size:
                pair = part.pairs[index % len(part.pairs)]
                valid = pair.valid & plausible(pair.flow)
                return part.augment(pair._replace(valid=valid), rng)
            index -= size
        raise IndexError(index)


def training_data(stage: Stage, data_dir: str | None, crop: tuple[int, int]) -> Mixture:
    """Open the published mixture of a stage, from folders below `data_dir`."""
    folder = _finder(data_dir)
    if stage == "chairs":
        augment = Augment(crop, (-0.1, 1.0))
        return Mixture((Part(datasets.chairs(folder("chairs"), "train"), 1, augment),))
    if stage == "things":
        return Mixture((Part(datasets.things(folder("things")), 1, Augment(crop, (-0.4, 0.8))),))
    sparse = Augment(crop, (-0.2, 0.4), flips=False, sparse=True)
    if stage == "kitti":
        return Mixture((Part(datasets.kitti(folder("kitti")), 1, sparse),))
    dense, road = Augment(crop, (-0.2, 0.6)), replace(sparse, flips=True)
    return Mixture(
        (
            Part(datasets.sintel(folder("sintel"), rendering="clean"), 100, dense),
            Part(datasets.sintel(folder("sintel"), rendering="final"), 100, dense),
            Part(datasets.kitti(folder("kitti")), 200, replace(road, scale=(-0.3, 0.5))),
            Part(datasets.hd1k(folder("hd1k")), 5, replace(road, scale=(-0.5, 0.2))),
            Part(datasets.things(folder("things"), ("clean",)), 1, dense),
        )
    )


#: The sets on disk that a model can be scored on.
SCORED: dict[str, Callable[[Folder], FlowSet]] = {
    "chairs": lambda folder: datasets.chairs(folder("chairs"), "val"),
    "things_clean": lambda folder: datasets.things(folder("things"), ("clean",), "TEST"),
    "things_final": lambda folder: datasets.things(folder("things"), ("final",), "TEST"),
    "sintel_clean": lambda folder: datasets.sintel(folder("sintel"), rendering="clean"),
    "sintel_final": lambda folder: datasets.sintel(folder("sintel"), rendering="final"),
    "kitti": lambda folder: datasets.kitti(folder("kitti")),
    "middlebury": lambda folder: datasets.middlebury(folder("middlebury")),
}

#: The set that each stage chooses its best checkpoint by. Fine-tuning trains on all labelled data.
VALIDATION: dict[Stage, str] = {"chairs": "chairs", "things": "things_final"}

#: The scored sets that each stage trains on: an error on them is no test error.
TRAINED_ON: dict[Stage, tuple[str, ...]] = {
    "chairs": (),
    "things": (),
    "sintel": ("sintel_clean", "sintel_final", "kitti"),
    "kitti": ("kitti",),
}


def open_scored(name: str, data_dir: str | None) -> FlowSet:
    """Open one of the sets in `SCORED`, from folders below `data_dir`."""
    return SCORED[name](_finder(data_dir))


def spread(pairs: FlowSet, count: int) -> FlowSet:
    """Return at most `count` pairs of a set, evenly spaced."""
    if len(pairs) <= count:
        return pairs
    return replace(pairs, files=tuple(pairs.files[k * len(pairs) // count] for k in range(count)))


def in_batches(pairs: Sequence[Pair] | FlowSet, size: int) -> Iterator[list[Pair]]:
    """Yield pairs in order, at most `size` of one shape together."""
    batch: list[Pair] = []
    for k in range(len(pairs)):
        pair = pairs[k]
        if batch and (len(batch) == size or batch[0].valid.shape != pair.valid.shape):
            yield batch
            batch = []
        batch.append(pair)
    if batch:
        yield batch


def _finder(data_dir: str | None) -> Folder:
    """Return a function from the name of a set to its folder below `data_dir`."""

    def find(name: str) -> Path:
        folder = _FOLDERS[name]
        root = data_folder(data_dir, folder)
        for place in (root / folder, root):
            if place.name == folder and place.is_dir():
                return place
        raise DataError(
            f"there is no {folder} in {data_dir}: put it there, or leave it out of the task's "
            "setting test_on if it is named there"
        )

    return find
