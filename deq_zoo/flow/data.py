"""The data of a training stage: mixtures of sets, and what each stage is judged on."""

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
    """Several sets as one: each set's pairs come as often as it says."""

    parts: tuple[Part, ...]

    def __len__(self) -> int:
        return sum(len(part.pairs) * part.repeat for part in self.parts)

    def draw(self, index: int, rng: torch.Generator) -> Pair:
        """Pair `index`, augmented."""
        for part in self.parts:
            size = len(part.pairs) * part.repeat
            if index < size:
                pair = part.pairs[index % len(part.pairs)]
                known = pair.valid & plausible(pair.flow)
                return part.augment(pair._replace(valid=known), rng)
            index -= size
        raise IndexError(index)


def training_data(stage: Stage, data_dir: str | None, crop: tuple[int, int]) -> Mixture:
    """The published mixture of a stage, from folders below `data_dir`."""
    at = _finder(data_dir)
    if stage == "chairs":
        augment = Augment(crop, (-0.1, 1.0))
        return Mixture((Part(datasets.chairs(at("chairs"), "train"), 1, augment),))
    if stage == "things":
        return Mixture((Part(datasets.things(at("things")), 1, Augment(crop, (-0.4, 0.8))),))
    sparse = Augment(crop, (-0.2, 0.4), flips=False, sparse=True)
    if stage == "kitti":
        return Mixture((Part(datasets.kitti(at("kitti")), 1, sparse),))
    dense, road = Augment(crop, (-0.2, 0.6)), replace(sparse, flips=True)
    return Mixture(
        (
            Part(datasets.sintel(at("sintel"), rendering="clean"), 100, dense),
            Part(datasets.sintel(at("sintel"), rendering="final"), 100, dense),
            Part(datasets.kitti(at("kitti")), 200, replace(road, scale=(-0.3, 0.5))),
            Part(datasets.hd1k(at("hd1k")), 5, replace(road, scale=(-0.5, 0.2))),
            Part(datasets.things(at("things"), ("clean",)), 1, dense),
        )
    )


#: What a model can be judged on, from disk.
JUDGES: dict[str, Callable[[Callable[[str], Path]], FlowSet]] = {
    "chairs": lambda at: datasets.chairs(at("chairs"), "val"),
    "things_clean": lambda at: datasets.things(at("things"), ("clean",), "TEST"),
    "things_final": lambda at: datasets.things(at("things"), ("final",), "TEST"),
    "sintel_clean": lambda at: datasets.sintel(at("sintel"), rendering="clean"),
    "sintel_final": lambda at: datasets.sintel(at("sintel"), rendering="final"),
    "kitti": lambda at: datasets.kitti(at("kitti")),
    "middlebury": lambda at: datasets.middlebury(at("middlebury")),
}


def held_out(name: str, data_dir: str | None) -> FlowSet:
    """A set to judge by, from folders below `data_dir`."""
    return JUDGES[name](_finder(data_dir))


def in_batches(pairs: Sequence[Pair] | FlowSet, size: int) -> Iterator[list[Pair]]:
    """Pairs in order, at most `size` of one shape together."""
    held: list[Pair] = []
    for k in range(len(pairs)):
        pair = pairs[k]
        if held and (len(held) == size or held[0].valid.shape != pair.valid.shape):
            yield held
            held = []
        held.append(pair)
    if held:
        yield held


def _finder(data_dir: str | None) -> Callable[[str], Path]:
    def at(name: str) -> Path:
        folder = _FOLDERS[name]
        root = data_folder(data_dir, folder)
        for place in (root / folder, root):
            if place.name == folder and place.is_dir():
                return place
        raise DataError(
            f"there is no {folder} in {data_dir}: put it there, or leave it out where the task's "
            "setting validate names it"
        )

    return at
