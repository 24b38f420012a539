"""Optical flow: the tasks that DEQ-Flow is trained on."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import ClassVar

import torch

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.flow.augment import Augment, Pair
from deq_zoo.flow.base import Batch, FlowTask
from deq_zoo.flow.data import (
    SCORED,
    TRAINED_ON,
    VALIDATION,
    Mixture,
    Stage,
    open_scored,
    spread,
    training_data,
)
from deq_zoo.flow.scoring import Pairs, Sets
from deq_zoo.flow.warps import Motion, Warps, motorcycle, near_flow
from deq_zoo.task import WHOLE, Shard, batch_indices, generator, steps_in_epoch
from torchdeq.registry import suggest

_PAIRS = 1000  # of warps, which have no end, in one epoch


@dataclass(frozen=True)
class WarpTask(FlowTask):
    """Photographs under random smooth motion, made as they are needed.

    Training, validation and test have photographs of their own. A stereo pair with true disparity
    belongs to the test. Further options: see `FlowTask`.

    Args:
        motion: the distribution of the flows.
        val_pairs: warps to choose the best checkpoint by.
        eval_pairs: warps of the test.
        stereo: whether the test includes the stereo pair, at half its size.
        colour: whether colours change from frame to frame and pair to pair.
        near: share of training pairs whose solve starts near the true flow, not at zero: a map that
            has seen errors of all directions leads back from them, and can continue from another
            pair's state.
        near_error: the distance from the true flow, in pixels; see `deq_zoo.flow.warps.near_flow`.
    """

    batch: int = 8
    eval_batch: int = 8
    crop: tuple[int, int] = (128, 128)
    motion: Motion = field(default_factory=Motion)
    val_pairs: int = 24
    eval_pairs: int = 24
    stereo: bool = True
    colour: bool = True
    near: float = 0.0
    near_error: float = 8.0

    def __post_init__(self) -> None:
        super().__post_init__()
        if not 0 <= self.near <= 1:
            raise ValueError(f"near is a share of pairs, from 0 to 1, got {self.near}")
        check_fields(self, 0, "near_error")
        check_fields(self, 1, "val_pairs", "eval_pairs")
        if self.data_dir is not None:
            raise ZooError("warps are made from photographs of packages: drop --data-dir")

    @property
    def train_set(self) -> Warps:
        return Warps("train", self.crop, self.motion)

    @cached_property
    def val_set(self) -> Sets:
        return {"warps": Warps("val", self.crop, self.motion).first(self.val_pairs)}

    @cached_property
    def test_set(self) -> Sets:
        warps: Pairs = Warps("test", self.crop, self.motion).first(self.eval_pairs)
        stereo: Sets = {"motorcycle": [motorcycle(half=True)]} if self.stereo else {}
        return {"warps": warps, **stereo}

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(_PAIRS, self.batch)

    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        augment = Augment(self.crop, flips=False, erase=0.0, colour=self.colour)
        pairs = []
        for k in rows:
            pair = self.train_set.draw(step * self.batch + k, seed)
            pairs.append(augment.recolour(pair, generator("colour", seed, step, k)))
        return pairs

    def train_batch(self, step: int, seed: int, shard: Shard = WHOLE) -> Batch:
        batch = super().train_batch(step, seed, shard)
        if not self.near:
            return batch
        z0 = []
        for k, flow in zip(self.rows(shard), batch[2], strict=True):
            rng = generator("start", seed, step, k)
            close = float(torch.rand((), generator=rng)) < self.near
            near = near_flow(flow, self.near_error, rng)
            z0.append(near if close else torch.zeros_like(near))
        return *batch, torch.stack(z0)


@dataclass(frozen=True)
class StageTask(FlowTask):
    """A stage of the published training, on data from disk.

    The best checkpoint of the stages `chairs` and `things` is chosen on a part of their own set
    that training does not use, unless `test_on` names that set. The stages `sintel` and `kitti`
    train on all labelled data: their last checkpoint counts. Further options: see `FlowTask`.

    Args:
        stage: the mixture of sets, and their augmentation.
        test_on: sets that are scored once, at the end, the most important first: chairs,
            things_clean, things_final, sintel_clean, sintel_final, kitti, middlebury. The errors on
            a set that the stage trains on are called `seen_...`.
        val_pairs: most pairs to choose the best checkpoint by, evenly spaced in their set.
    """

    former_fields: ClassVar = {"validate": "test_on"}

    stage: Stage = "chairs"
    test_on: tuple[str, ...] = ("sintel_clean",)
    val_pairs: int = 640

    def __post_init__(self) -> None:
        super().__post_init__()
        check_fields(self, 1, "val_pairs")
        for name in self.test_on:
            if name not in SCORED:
                raise ValueError(f"unknown set {name!r} to test on{suggest(name, SCORED)}")
        if not self.test_on:
            raise ValueError(f"test_on needs a set: any of {', '.join(SCORED)}")

    @cached_property
    def train_set(self) -> Mixture:
        data = training_data(self.stage, self.data_dir, self.crop)
        if len(data) < self.batch:
            raise ZooError(f"a batch of {self.batch} needs as many pairs, there are {len(data)}")
        return data

    @cached_property
    def val_set(self) -> Sets | None:
        name = VALIDATION.get(self.stage)
        # All renderings of a set show the same scenes.
        if name is None or any(each.startswith(self.stage) for each in self.test_on):
            return None
        return {name: spread(open_scored(name, self.data_dir), self.val_pairs)}

    @cached_property
    def test_set(self) -> Sets:
        seen = TRAINED_ON[self.stage]
        return {
            f"seen_{name}" if name in seen else name: open_scored(name, self.data_dir)
            for name in self.test_on
        }

    @property
    def costly_batches(self) -> bool:
        return True

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(len(self.train_set), self.batch, drop_last=True)

    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        data = self.train_set
        chosen = batch_indices(len(data), self.batch, step, seed, drop_last=True).tolist()
        return [data.draw(chosen[k], generator("augment", seed, step, k)) for k in rows]
