"""Optical flow: the tasks that DEQ-Flow is trained on."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.errors import ZooError
from deq_zoo.flow.augment import Augment, Pair, with_noise
from deq_zoo.flow.convert import from_authors
from deq_zoo.flow.data import JUDGES, Mixture, Stage, held_out, in_batches, training_data
from deq_zoo.flow.datasets import FlowSet
from deq_zoo.flow.formats import plausible
from deq_zoo.flow.loss import sequence_loss, training_metrics
from deq_zoo.flow.metrics import FlowScores
from deq_zoo.flow.model import DEQFlow, FlowConfig
from deq_zoo.flow.predict import predict_files
from deq_zoo.flow.warps import Motion, draw_pair, motorcycle, near_flow
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
from torchdeq import DEQConfig
from torchdeq.registry import suggest

Batch = tuple[Tensor, ...]  # two frames, flow, where it is known; a flow to start from
_PAIRS = 1000  # of warps, which have no end, in one epoch


@dataclass(frozen=True)
class FlowTask(Task):
    """What training on warps and on data sets share; see the subclasses.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium.
        batch: pairs per step.
        eval_batch: pairs per step of evaluation, if of one size.
        crop: height and width of training pairs.
        data_dir: folder with the data sets' folders.
        start_from: run folder or checkpoint whose weights to start from; a run that has begun
            needs it no more.
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
        check_fields(self, 1, "batch", "eval_batch")
        if min(self.crop) < 64 or any(side % 8 for side in self.crop):
            raise ValueError(f"crop takes two multiples of 8 from 64 on, got {self.crop}")
        if not 0 <= self.noise <= 255:
            raise ValueError(f"noise must lie in [0, 255], in grey levels, got {self.noise}")
        if self.deq.jac_loss_weight:
            raise ValueError("DEQ-Flow is trained without a Jacobian loss: drop jac_loss_weight")

    def build(self) -> nn.Module:
        return DEQFlow(self.net, self.deq)

    def begin(self, model: nn.Module) -> None:
        if self.start_from is not None:
            from deq_zoo.evaluate import open_model
            from deq_zoo.weights import load_weights

            earlier, _ = open_model(Path(self.start_from))
            load_weights(model, earlier.state_dict(), self.start_from)

    @abstractmethod
    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        """These pairs of a training batch."""

    def train_batch(self, step: int, seed: int, shard: Shard) -> Batch:
        mine = range(self.batch)[shard.rank :: shard.world]
        if not mine:
            raise ZooError(f"a batch of {self.batch} is too small for {shard.world} processes")
        pairs = self.draw(step, mine, seed)
        if self.noise:
            pairs = [
                with_noise(pair, self.noise, generator("noise", seed, step, k))
                for k, pair in zip(mine, pairs, strict=True)
            ]
        return collate(pairs)

    @abstractmethod
    def judges(self) -> dict[str, Sequence[Pair] | FlowSet]:
        """Held-out pairs by the name of their set, the one to choose by first."""

    def loss(self, model: nn.Module, batch: Batch, carry: Any) -> Loss:
        image1, image2, truth, valid, *start = batch
        flows, _, stats = model(image1, image2, *start)
        value = sequence_loss(flows, truth, valid, self.deq.gamma)
        return Loss(value, training_metrics(flows[-1], truth, valid), stats)

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record, metrics = SolverRecord(), dict[str, float]()
        for name, pairs in self.judges().items():
            scores = FlowScores()
            sparse, masked = _kind(pairs)
            for batch in in_batches(pairs, self.eval_batch):
                image1, image2, truth, valid = (t.to(device) for t in collate(batch))
                call = {"pad": "bottom" if sparse else "both"}
                if thorough and not record.samples:  # of one pair: it costs a hundred products
                    _, _, stats = model(image1[:1], image2[:1], **call, sradius_mode=True)
                    record.radii += stats["sradius"].tolist()
                flows, _, stats = model(image1, image2, **call)
                record.add(stats)
                for flow, true, known in zip(flows[-1], truth, valid, strict=True):
                    scores.add(flow, true, known)
            found = scores.summary(name, sparse, masked)
            metrics.setdefault("aepe", found[f"{name}_aepe"])
            metrics |= found
        return Evaluation(metrics, record)

    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.flow.pictures import Example, gallery

        examples: list[Example] = []
        for name, pairs in self.judges().items():
            pad = "bottom" if _kind(pairs)[0] else "both"
            for k in range(min(len(pairs), 3 if not examples else 1)):
                pair = pairs[k]
                with torch.no_grad():
                    flows, _, _ = model(*(t[None].to(device) for t in pair[:2]), pad=pad)
                flow = flows[-1][0].float().cpu()
                known = pair.valid & plausible(pair.flow)  # extremes would pale all others
                examples.append(Example(f"{name} {k}", *pair[:2], flow, pair.flow, known))
        return [gallery(examples)]

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return from_authors(state)

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> Iterator[str]:
        assert isinstance(model, DEQFlow)
        return predict_files(model, files, out or Path("flows"), device)


@dataclass(frozen=True)
class WarpTask(FlowTask):
    """Photographs under random smooth motion, made as they are needed.

    Judged by warps of photographs that training never sees; a stereo pair with true disparity is
    reported beside.

    Args: see `FlowTask`, and
        motion: how flows are drawn.
        eval_pairs: held-out warps.
        stereo: whether to report on the stereo pair too, at half its size.
        colour: whether colours change from frame to frame and pair to pair.
        near: share of training pairs whose solve starts near the true flow, not at zero: a map that
            has seen errors of all directions leads back from them, and takes up another pair's
            state.
        near_error: how near, in pixels; see `deq_zoo.flow.warps.near_flow`.
    """

    batch: int = 8
    eval_batch: int = 8
    crop: tuple[int, int] = (128, 128)
    motion: Motion = field(default_factory=Motion)
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
        check_fields(self, 1, "eval_pairs")
        if self.data_dir is not None:
            raise ZooError("warps are made from photographs of packages: drop --data-dir")

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(_PAIRS, self.batch)

    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        augment = Augment(self.crop, flips=False, erase=0.0, colour=self.colour)
        pairs = []
        for k in rows:
            pair = draw_pair("train", step * self.batch + k, self.crop, self.motion, seed)
            pairs.append(augment.recolour(pair, generator("colour", seed, step, k)))
        return pairs

    def train_batch(self, step: int, seed: int, shard: Shard) -> Batch:
        batch = super().train_batch(step, seed, shard)
        if not self.near:
            return batch
        starts = []
        for k, flow in zip(range(self.batch)[shard.rank :: shard.world], batch[2], strict=True):
            rng = generator("start", seed, step, k)
            close = float(torch.rand((), generator=rng)) < self.near
            start = near_flow(flow, self.near_error, rng)
            starts.append(start if close else torch.zeros_like(start))
        return *batch, torch.stack(starts)

    @cached_property
    def _judges(self) -> dict[str, Sequence[Pair] | FlowSet]:
        pairs = [draw_pair("test", k, self.crop, self.motion) for k in range(self.eval_pairs)]
        found: dict[str, Sequence[Pair] | FlowSet] = {"warps": pairs}
        return found | {"motorcycle": [motorcycle(half=True)]} if self.stereo else found

    def judges(self) -> dict[str, Sequence[Pair] | FlowSet]:
        return self._judges


@dataclass(frozen=True)
class StageTask(FlowTask):
    """A stage of the published training, on data from disk.

    Args: see `FlowTask`, and
        stage: which mixture of sets, and their augmentation.
        validate: sets to judge by, the one to choose by first: chairs, things_clean, things_final,
            sintel_clean, sintel_final, kitti, middlebury.
    """

    stage: Stage = "chairs"
    validate: tuple[str, ...] = ("chairs",)

    def __post_init__(self) -> None:
        super().__post_init__()
        for name in self.validate:
            if name not in JUDGES:
                raise ValueError(f"unknown set {name!r} to validate on{suggest(name, JUDGES)}")
        if not self.validate:
            raise ValueError(f"validate needs a set to judge by: any of {', '.join(JUDGES)}")

    @cached_property
    def train_set(self) -> Mixture:
        """All pairs of the stage."""
        data = training_data(self.stage, self.data_dir, self.crop)
        if len(data) < self.batch:
            raise ZooError(f"a batch of {self.batch} needs as many pairs, there are {len(data)}")
        return data

    @cached_property
    def _judges(self) -> dict[str, Sequence[Pair] | FlowSet]:
        return {name: held_out(name, self.data_dir) for name in self.validate}

    def judges(self) -> dict[str, Sequence[Pair] | FlowSet]:
        return self._judges

    @property
    def steps_per_epoch(self) -> int:
        assert self.judges()  # what is missing is told before training
        return steps_in_epoch(len(self.train_set), self.batch, drop_last=True)

    def draw(self, step: int, rows: Sequence[int], seed: int) -> list[Pair]:
        data = self.train_set
        chosen = batch_indices(len(data), self.batch, step, seed, drop_last=True).tolist()
        return [data.draw(chosen[k], generator("augment", seed, step, k)) for k in rows]


def _kind(pairs: Sequence[Pair] | FlowSet) -> tuple[bool, bool]:
    """Whether pairs are sparse, and whether their masked error is told."""
    return (pairs.sparse, pairs.masked) if isinstance(pairs, FlowSet) else (False, False)


def collate(pairs: Sequence[Pair]) -> Batch:
    """Pairs of one size as a batch."""
    image1, image2, flow, valid = (torch.stack(each) for each in zip(*pairs, strict=True))
    return image1, image2, flow, valid
