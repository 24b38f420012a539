"""Denoisers: trained to predict noise, then sampled from and inverted as equilibria."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor

from deq_zoo.checks import check_fields
from deq_zoo.data_dir import data_folder
from deq_zoo.diffusion import splits
from deq_zoo.diffusion.convert import averaged, from_authors, pick_state, to_authors
from deq_zoo.diffusion.data import CELEBA_BOX, Images
from deq_zoo.diffusion.exporting import make_export
from deq_zoo.diffusion.model import CIFAR10, Denoiser, UNetConfig
from deq_zoo.diffusion.options import ChainConfig, InversionConfig, Sampling
from deq_zoo.diffusion.plan import ChainPlan, Kind, draw_noise, step_noise
from deq_zoo.diffusion.prediction import predict_files
from deq_zoo.diffusion.samples import sample_images
from deq_zoo.errors import DataError, ZooError
from deq_zoo.exportable import Exportable, NoOptions
from deq_zoo.predictions import Failure, OutFolder, Prediction
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
from torchdeq import DEQConfig

# Sides, of which the first is the usual one, and channels of data that is not resized freely.
_SHAPES = {"digits": ((14, 28), 1), "cifar10": ((32,), 3)}
_EVAL_CHAIN = 50  # steps of the chain that every evaluation solves, at most
_NO_LIMIT = 10**9


@dataclass(frozen=True)
class Denoise(Task):
    """Predict the noise in an image; the chain of the denoiser is sampled and inverted in parallel.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium, for sampling and inversion.
        chain: the chain of sampling steps.
        inversion: the inversion of images.
        data: digits (embedded), blobs (for tests), cifar10, celeba or folder (from `data_dir`).
        data_dir: folder with the data set's files.
        val_images: training images held out to choose the best checkpoint by; validation images of
            the data set itself are preferred. 0 uses none, and the last checkpoint counts. None
            uses the two sets of earlier versions, without validation.
        batch: images per step.
        flip: whether training images are mirrored at random.
        decay: of the running average of the weights.
        noise_levels: timesteps of training.
        prediction: the output of the network: the noise, or v, a mixture of noise and image by the
            noise level, which small networks learn sooner.
        eval_images: images of a split on which an evaluation computes the loss; 0 takes all.
        previews: images that every evaluation samples, by a chain of at most 50 steps.
        limit: use only so many training images; 0 uses all.
    """

    score: ClassVar[Score] = Score("loss", higher_is_better=False)
    shardwise: ClassVar[bool] = True  # the average is updated entry by entry

    net: UNetConfig = CIFAR10
    deq: DEQConfig = field(default_factory=DEQConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    inversion: InversionConfig = field(default_factory=InversionConfig)
    data: Literal["digits", "blobs", "cifar10", "celeba", "folder"] = "cifar10"
    data_dir: str | None = None
    val_images: int | None = None
    batch: int = 128
    flip: bool = False
    decay: float = 0.9999
    noise_levels: int = 1000
    prediction: Kind = "epsilon"
    eval_images: int = 500
    previews: int = 4
    limit: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 1, "batch", "noise_levels")
        check_fields(self, 0, "limit", "eval_images", "previews")
        if self.val_images is not None:
            check_fields(self, 0, "val_images")
        _ = self.plan  # checks how its options fit together
        super().__post_init__()

    @cached_property
    def plan(self) -> ChainPlan:
        """Return the options for using the denoiser."""
        return ChainPlan(self.deq, self.chain, self.inversion, self.noise_levels, self.prediction)

    @property
    def uses(self) -> frozenset[str]:
        return self.plan.uses

    @property
    def reads_data_dir(self) -> bool:
        return self.data not in ("blobs", "digits")

    @property
    def costly_batches(self) -> bool:
        return self.data in ("celeba", "folder")

    @cached_property
    def _splits(self) -> splits.Splits:
        size, channels, n = self.net.size, self.net.channels, self.val_images
        sides, planes = _SHAPES.get(self.data, ((size,), channels))
        if size not in sides or channels != planes:
            raise DataError(
                f"images of {self.data} need net.size={' or '.join(map(str, sides))} and "
                f"net.channels={planes}, got {size} and {channels}: set both"
            )
        if self.data == "blobs":
            return splits.blobs(size, channels, n)
        if self.data == "digits":
            return splits.digits(n, size)
        root = data_folder(self.data_dir, self.data)
        if self.data == "cifar10":
            return splits.cifar10(root, n)
        return splits.folder(root, size, channels, self._box, n)

    @property
    def _box(self) -> tuple[int, ...] | None:
        return CELEBA_BOX if self.data == "celeba" else None

    @property
    def train_set(self) -> Images:
        return self._splits.train

    @property
    def val_set(self) -> Images | None:
        return self._splits.val

    @property
    def test_set(self) -> Images:
        return self._splits.test

    def facts(self) -> dict[str, Any]:
        if self.data == "digits":
            return {"ground": "dark"}
        return {} if self._box is None else {"box": list(self._box)}

    def build(self, facts: Mapping[str, Any] | None = None) -> Denoiser:
        return Denoiser(self.net, self.decay, self.plan)

    @cached_property
    def _train_size(self) -> int:
        n = len(self.train_set)
        return min(n, self.limit) if self.limit else n

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(self._train_size, self.batch, drop_last=True)

    def train_batch(
        self, step: int, seed: int, shard: Shard = WHOLE
    ) -> tuple[Tensor, Tensor, Tensor]:
        rows = batch_indices(self._train_size, self.batch, step, seed, drop_last=True)
        if len(rows) < shard.world:
            raise ZooError(
                f"a batch of {len(rows)} is too small for {shard.world} processes: raise batch, or "
                "use fewer"
            )
        rng = generator("noise", seed, step)
        mine = slice(shard.rank, None, shard.world)
        x = self.train_set.take(rows[mine])
        flipped = torch.rand(len(rows), generator=rng)[mine] < 0.5
        if self.flip:
            x = torch.where(flipped[:, None, None, None], x.flip(-1), x)
        t, noise = self._noise(len(rows), rng)
        return x, t[mine], noise[mine]

    def _noise(self, n: int, rng: torch.Generator) -> tuple[Tensor, Tensor]:
        """Return timesteps in pairs that add up to the last one, and noise."""
        half = torch.randint(self.noise_levels, (-(-n // 2),), generator=rng)
        t = torch.cat((half, self.noise_levels - 1 - half))[:n]
        shape = (n, self.net.channels, self.net.size, self.net.size)
        return t, torch.randn(shape, generator=rng)

    def loss(self, model: Any, batch: tuple[Tensor, Tensor, Tensor], carry: Any) -> Loss:
        return Loss(self._errors(model, *batch).mean())

    def _errors(self, model: Any, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """Return (n,) mean squared errors of the predictions for noisy images."""
        scheduler = self.plan.scheduler
        predicted = model(scheduler.add_noise(x, noise, t), t).prediction
        velocity = self.prediction == "v_prediction"
        target = scheduler.get_velocity(x, noise, t) if velocity else noise
        errors: Tensor = (predicted - target).square().mean(dim=(1, 2, 3))
        return errors

    def after_step(self, model: Any) -> None:
        model.update_average()

    def evaluate(self, model: Any, split: Split, thorough: bool = False) -> Evaluation:
        record, images = SolverRecord(), self.test_set if split == "test" else self.val_set
        assert images is not None, "the training loop asks for no score without validation data"
        metrics = {"loss": self._mean_loss(model, images)}
        if self.previews:
            metrics["chain_error"] = self._chain_error(model, record)
        if thorough and self.inversion.images:
            metrics |= self._inversion_errors(model, images)
        return Evaluation(metrics, record)

    def _mean_loss(self, model: Any, images: Images) -> float:
        rows = torch.arange(min(len(images), self.eval_images or len(images)))
        # Another key would draw other noise, and losses of earlier runs could not be compared.
        t, noise = self._noise(len(rows), generator("judge"))
        errors = [
            self._errors(
                model,
                model.place(images.take(rows[part])),
                t[part].to(model.device),
                model.place(noise[part]),
            )
            for part in torch.arange(len(rows)).split(self.batch)
        ]
        return float(torch.cat(errors).mean())

    def _chain_error(self, model: Any, record: SolverRecord) -> float:
        """Return the relative distance of the parallel samples from the sequential ones."""
        plan = self.plan.limited(_EVAL_CHAIN, _NO_LIMIT)
        chain = plan.make_chain(model)
        shape = (self.previews, self.net.channels, self.net.size, self.net.size)
        x, noise = draw_noise(chain, shape, 0, model)
        trajectory = plan.solve(chain, x, noise)
        record.add(trajectory.stats)
        exact = chain.sequential(x, noise)
        return float((trajectory.image - exact).norm() / exact.norm())

    def _inversion_errors(self, model: Any, images: Images) -> dict[str, float]:
        plan = self.plan.limited(_NO_LIMIT, self.inversion.eval_steps)
        chain = plan.make_chain(model)
        rows = torch.arange(min(self.inversion.images, len(images)))
        targets = model.place(images.take(rows))
        inversion = plan.invert(chain, targets, step_noise(chain, targets))
        return {
            "inversion_sse": float(inversion.sse.mean()),
            "inversion_psnr": float(inversion.psnr.mean()),
        }

    def pictures(self, model: Any) -> list[Picture]:
        from deq_zoo.diffusion.pictures import draw_pictures

        return draw_pictures(model, self.plan, self.test_set)

    def pick_state(self, content: Any) -> Weights | None:
        """Return the weights in the authors' training checkpoint; see `convert.pick_state`."""
        return pick_state(content)

    def from_authors(self, state: Weights) -> Converted:
        """Return a denoiser of the authors, or of diffusers, as network and as average."""
        self._refuse_patches()
        weights = from_authors(state)
        own = self.build().state_dict()
        made = {name: value for name, value in own.items() if name.endswith("n_averaged")}
        for prefix in ("unet.", "average.module."):
            made |= {prefix + name: value for name, value in weights.items()}
        return Converted(made, self.facts())

    def to_authors(self, state: Weights) -> dict[str, Tensor]:
        """Return the average of the weights in the authors' format: their releases are averages."""
        self._refuse_patches()
        return to_authors(averaged(state))

    def _refuse_patches(self) -> None:
        if self.net.patch > 1:
            raise ZooError(
                f"the authors' networks have no patches, this one has net.patch={self.net.patch}"
            )

    def predict(
        self, model: Any, paths: Sequence[Path], out: OutFolder
    ) -> Iterator[Prediction | Failure]:
        return predict_files(model, paths, out)

    def export(self, model: Any, options: NoOptions) -> Exportable:
        facts = {"noise_levels": self.noise_levels, "prediction": self.prediction}
        return make_export(model, {**model.facts, **facts})

    def sampling(self) -> Sampling:
        return Sampling(eta=self.chain.eta, steps=self.chain.steps, window=self.chain.window)

    def sample(self, model: Any, options: Sampling, out: OutFolder) -> Iterator[Prediction]:
        yield sample_images(model, options, out)
