"""Denoisers: trained to tell noise from image, then sampled from and inverted as equilibria."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar, Literal

import torch
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.data_dir import data_folder
from deq_zoo.diffusion import data as sets
from deq_zoo.diffusion.chain import ParallelChain
from deq_zoo.diffusion.chain_task import ChainTask
from deq_zoo.diffusion.convert import from_ddpm
from deq_zoo.diffusion.model import CIFAR10, Denoiser, UNetConfig
from deq_zoo.diffusion.options import ChainConfig, InversionConfig
from deq_zoo.errors import DataError, ZooError
from deq_zoo.record import SolverRecord
from deq_zoo.task import (
    Evaluation,
    Loss,
    Picture,
    Score,
    Shard,
    batch_indices,
    generator,
    steps_in_epoch,
)
from torchdeq import DEQConfig

_SHAPES = {"digits": (14, 1), "cifar10": (32, 3)}  # sides and channels of what is not resized
_SHOWN_IMAGES, _SHOWN_STEPS, _SHOWN_CHAIN = 8, 20, 50  # what a picture may take at most


@dataclass(frozen=True)
class Denoise(ChainTask):
    """Predict the noise in an image; judged on held-out images, sampled and inverted in parallel.

    Args:
        net: the shape of the network.
        deq: options of the equilibrium, for sampling and inversion.
        chain: the chain that is solved.
        inversion: how images are inverted.
        data: digits (embedded), blobs (for tests), cifar10, celeba or folder (from `data_dir`).
        data_dir: folder with the data set's files.
        batch: images per step.
        flip: whether training images are mirrored at random.
        decay: of the weights' running average.
        noise_levels: timesteps of training.
        prediction: what the network tells: the noise, or noise and image turned by the noise level,
            which small networks learn sooner.
        eval_images: held-out images to judge by; 0 takes all.
        previews: images sampled when the model is judged.
        limit: use only so many training images; 0 uses all.
    """

    score: ClassVar[Score] = Score("val_loss", higher_is_better=False)

    net: UNetConfig = CIFAR10
    deq: DEQConfig = field(default_factory=DEQConfig)
    chain: ChainConfig = field(default_factory=ChainConfig)
    inversion: InversionConfig = field(default_factory=InversionConfig)
    data: Literal["digits", "blobs", "cifar10", "celeba", "folder"] = "cifar10"
    data_dir: str | None = None
    batch: int = 128
    flip: bool = False
    decay: float = 0.9999
    noise_levels: int = 1000
    prediction: Literal["epsilon", "v_prediction"] = "epsilon"
    eval_images: int = 500
    previews: int = 4
    limit: int = 0

    def __post_init__(self) -> None:
        check_fields(self, 1, "batch", "noise_levels")
        check_fields(self, 0, "limit", "eval_images", "previews")
        if self.chain.steps > self.noise_levels:
            raise ValueError(
                f"a chain has at most noise_levels={self.noise_levels} steps, got "
                f"{self.chain.steps}"
            )

    @cached_property
    def train_set(self) -> sets.Images:
        return self._open("train")

    @cached_property
    def held_out(self) -> sets.Images:
        return self._open("val")

    def _open(self, split: str) -> sets.Images:
        size, channels = self.net.size, self.net.channels
        fixed = _SHAPES.get(self.data, (size, channels))
        if fixed != (size, channels):
            raise DataError(
                f"images of {self.data} need net.size={fixed[0]} and net.channels={fixed[1]}, got "
                f"{size} and {channels}: set both"
            )
        if self.data == "blobs":
            return sets.blobs(split, size, channels)
        if self.data == "digits":
            return sets.digits(split)
        root = data_folder(self.data_dir, self.data)
        if self.data == "cifar10":
            return sets.cifar10(root, split)
        box = sets.CELEBA_BOX if self.data == "celeba" else None
        return sets.folder(root, split, size, channels, box)

    def build(self) -> nn.Module:
        return Denoiser(self.net, self.decay)

    @cached_property
    def _train_size(self) -> int:
        n = len(self.train_set)
        return min(n, self.limit) if self.limit else n

    @property
    def steps_per_epoch(self) -> int:
        return steps_in_epoch(self._train_size, self.batch, drop_last=True)

    def train_batch(self, step: int, seed: int, shard: Shard) -> tuple[Tensor, Tensor, Tensor]:
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
        """Timesteps in pairs from both ends, and noise."""
        half = torch.randint(self.noise_levels, (-(-n // 2),), generator=rng)
        t = torch.cat((half, self.noise_levels - 1 - half))[:n]
        shape = (n, self.net.channels, self.net.size, self.net.size)
        return t, torch.randn(shape, generator=rng)

    def loss(self, model: nn.Module, batch: tuple[Tensor, Tensor, Tensor], carry: Any) -> Loss:
        return Loss(self._errors(model, *batch).mean())

    def _errors(self, model: nn.Module, x: Tensor, t: Tensor, noise: Tensor) -> Tensor:
        """(n,) mean squared error of what the network tells of each noisy image."""
        told = model(self.scheduler.add_noise(x, noise, t), t)
        velocity = self.prediction == "v_prediction"
        target = self.scheduler.get_velocity(x, noise, t) if velocity else noise
        errors: Tensor = (told - target).square().mean(dim=(1, 2, 3))
        return errors

    def after_step(self, model: nn.Module) -> None:
        model.update_average()  # type: ignore[operator]

    def evaluate(self, model: nn.Module, device: torch.device, thorough: bool) -> Evaluation:
        record, n = SolverRecord(), len(self.held_out)
        rows = torch.arange(min(n, self.eval_images or n))
        t, noise = self._noise(len(rows), generator("judge"))
        errors = [
            self._errors(
                model,
                self.held_out.take(rows[part]).to(device),
                t[part].to(device),
                noise[part].to(device),
            )
            for part in torch.arange(len(rows)).split(self.batch)
        ]
        metrics = {"val_loss": float(torch.cat(errors).mean())}
        if self.previews:
            metrics |= self._judge_chain(model, device, record)
        if thorough and self.inversion.images:
            how = self.inversion
            judged = replace(self, inversion=replace(how, steps=min(how.steps, how.judged_steps)))
            found = judged.invert(model, self._targets(how.images).to(device))
            metrics |= {
                "inversion_sse": float(found.sse.mean()),
                "inversion_psnr": float(found.psnr.mean()),
            }
        return Evaluation(metrics, record)

    def _judge_chain(
        self, model: nn.Module, device: torch.device, record: SolverRecord
    ) -> dict[str, float]:
        """How far the parallel chain is from the sequential one."""
        chain = self.make_chain(model, self.chain)
        z0, noise = self.initial(chain, self.previews, 0, device)
        images, stats, _ = self.solved(chain, z0, noise)
        record.add(stats)
        exact = chain.sequential(z0, noise)
        return {"chain_error": float((images - exact).norm() / exact.norm())}

    def _targets(self, n: int) -> Tensor:
        return self.held_out.take(torch.arange(min(n, len(self.held_out))))

    def pictures(self, model: nn.Module, device: torch.device) -> list[Picture]:
        from deq_zoo.diffusion.pictures import chains, inversions, progress

        shown = self._shown()
        chain = shown.make_chain(model, shown.chain)
        z0, noise = shown.initial(chain, min(16, 4 * max(1, self.previews)), 1, device)
        with torch.no_grad():
            images, _, work = shown.solved(chain, z0, noise)
            exact = chain.sequential(z0, noise)
        made = [
            chains(exact.cpu(), images.cpu(), len(chain), work),
            progress(*self._rounds(chain, z0[:4], noise if noise is None else noise[:4])),
        ]
        if shown.inversion.images:
            targets = self._targets(shown.inversion.images)
            made.append(inversions(targets, shown.invert(model, targets.to(device))))
        return made

    def _shown(self) -> Denoise:
        """The task with no more work than a look is worth: reports are made on the CPU."""
        how, steps = self.inversion, min(self.chain.steps, _SHOWN_CHAIN)
        images, adam = min(how.images, _SHOWN_IMAGES), min(how.steps, _SHOWN_STEPS)
        return replace(
            self,
            chain=replace(self.chain, steps=steps),
            inversion=replace(how, images=images, steps=adam),
        )

    def _rounds(
        self, chain: ParallelChain, z0: Tensor, noise: Tensor | None
    ) -> tuple[list[int], Tensor]:
        """What the last state looks like after some rounds."""
        seen: list[Tensor] = []
        with torch.no_grad():
            Z = z0[:, None].expand(-1, len(chain), -1, -1, -1)
            rounds = [1, 2, 4, 6, 8, 12, 16]
            for k in range(1, rounds[-1] + 1):
                Z = chain(Z, z0, noise)
                if k in rounds:
                    seen.append(Z[:, -1].cpu())
        return rounds, torch.stack(seen)

    def convert(self, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """A UNet of the old DDPM format or of diffusers, as network and as average."""
        made = from_ddpm(state)
        own = self.build().state_dict()
        held = {name: value for name, value in own.items() if name.endswith("n_averaged")}
        for prefix in ("unet.", "average.module."):
            held |= {prefix + name: value for name, value in made.items()}
        return held

    def predict(
        self, model: nn.Module, files: Sequence[Path], out: Path | None, device: torch.device
    ) -> list[str]:
        """Invert images; beside `out` or the files: the reconstruction and the noise."""
        from deq_zoo.diffusion.pictures import write_image

        places = [(out or file.parent) / file.stem for file in files]
        repeated = next((place for k, place in enumerate(places) if place in places[:k]), None)
        if repeated is not None:
            raise ZooError(
                f"several files would be written to {repeated}-noise.pt: give files of different "
                "names, or one after the other with an --out each"
            )
        box = sets.CELEBA_BOX if self.data == "celeba" else None
        images = [sets.read_image(f, self.net.size, self.net.channels, box) for f in files]
        found = self.invert(model, torch.stack(images).to(device))
        lines = []
        for k, (file, place) in enumerate(zip(files, places, strict=True)):
            place.parent.mkdir(parents=True, exist_ok=True)
            write_image(place.with_name(f"{file.stem}-reconstruction.png"), found.images[k])
            torch.save(found.noise[k].cpu(), place.with_name(f"{file.stem}-noise.pt"))
            lines.append(
                f"{file}: summed squared error {float(found.sse[k]):.3g}, "
                f"PSNR {float(found.psnr[k]):.1f} dB"
            )
        lines.append(
            f"{found.seconds:.1f} s, {found.work.rounds} rounds, "
            f"{found.work.evaluations} evaluations"
        )
        return lines
