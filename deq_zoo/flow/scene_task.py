"""Optical flow on scenes: photographs in layers, frames of several sizes, starts near the truth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.base import Batch, FlowTask
from deq_zoo.flow.scenes import Scenes
from deq_zoo.flow.scoring import Sets, collate
from deq_zoo.flow.warps import motorcycle, near_flow
from deq_zoo.task import WHOLE, Shard, generator, steps_in_epoch

_PAIRS = 1000  # of scenes, which have no end, in one epoch
_RECENT = 3  # sizes that take turns


@dataclass(frozen=True)
class SceneTask(FlowTask):
    """Layers of photographs that move and cover each other, made as they are needed.

    Training, validation and test have photographs of their own. Frames grow in the course of
    training: after every `grow` steps the next of `sizes` joins, and the three largest so far take
    turns. Each step has as many pairs as hold the pixels of `batch` pairs of the smallest size, one
    at least. Further options: see `FlowTask`; `crop` is the size of pairs in evaluation.

    Args:
        sizes: heights and widths of training pairs, the smallest first.
        grow: steps between one size and the next.
        val_pairs: scenes to choose the best checkpoint by.
        eval_pairs: scenes of the test.
        stereo: whether evaluation includes a stereo pair with true disparity, at half its size.
        near: share of training pairs whose solve starts near the true flow, not at zero.
        near_error: the largest distance from the true flow, in pixels.
    """

    batch: int = 4
    eval_batch: int = 4
    crop: tuple[int, int] = (256, 320)
    sizes: tuple[tuple[int, int], ...] = ((128, 160),)
    grow: int = 1000
    val_pairs: int = 24
    eval_pairs: int = 48
    stereo: bool = True
    near: float = 0.3
    near_error: float = 12.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.near <= 1:
            raise ValueError(f"near is a share of pairs, from 0 to 1, got {self.near}")
        check_fields(self, 0, "near_error", finite=True)
        check_fields(self, 1, "val_pairs", "eval_pairs", "grow")
        if not self.sizes or not all(map(_is_size, self.sizes)):
            raise ValueError(
                f"sizes takes pairs of multiples of 8 from 64 on, one at least, got {self.sizes}"
            )
        areas = [height * width for height, width in self.sizes]
        if areas != sorted(areas):
            raise ValueError(f"sizes takes the smallest first, got {self.sizes}")
        if self.data_dir is not None:
            raise ZooError("scenes are made from photographs of packages: drop --data-dir")

    @property
    def train_set(self) -> Scenes:
        return Scenes("train")

    @cached_property
    def val_set(self) -> Sets:
        return {"scenes": Scenes("val").first(self.val_pairs, self.crop), **self._stereo()}

    @cached_property
    def test_set(self) -> Sets:
        return {"scenes": Scenes("test").first(self.eval_pairs, self.crop), **self._stereo()}

    def _stereo(self) -> Sets:
        return {"motorcycle": [motorcycle(half=True)]} if self.stereo else {}

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(_PAIRS, self.batch)

    def size_at(self, step: int, seed: int) -> tuple[int, int]:
        """Return height and width of the frames of a step."""
        last = min(step // self.grow, len(self.sizes) - 1)
        choice = self.sizes[max(0, last - _RECENT + 1) : last + 1]
        return choice[int(torch.randint(len(choice), (), generator=generator("size", seed, step)))]

    def pairs_of(self, size: tuple[int, int]) -> int:
        """Return how many pairs of a size make a batch."""
        (h, w), (height, width) = self.sizes[0], size
        return max(1, round(self.batch * h * w / (height * width)))

    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        size = self.size_at(step, seed)
        return [self.train_set.draw(step * self.batch + k, size, seed) for k in rows]

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Batch:
        self.rows(Shard(shard.world - 1, shard.world))  # raises if pairs are fewer than processes
        count = max(self.pairs_of(self.size_at(step, seed)), shard.world)
        rows = range(count)[shard.rank :: shard.world]
        pairs = self.noisy_pairs(step, rows, seed)
        z0 = []
        for k, pair in zip(rows, pairs, strict=True):
            rng = generator("start", seed, step, k)
            close, error = torch.rand(2, generator=rng).tolist()
            near = near_flow(pair.flow, self.near_error * error**2, rng)
            z0.append(near if close < self.near else torch.zeros_like(near))
        return *collate(pairs), torch.stack(z0)


def _is_size(size: Any) -> bool:
    """Return whether a value is a height and a width that the model takes without padding."""
    return (
        isinstance(size, Sequence)
        and len(size) == 2
        and all(isinstance(side, int) and side >= 64 and side % 8 == 0 for side in size)
    )
