"""The denoiser: a UNet of diffusers with a running average of its weights."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deq_zoo.checks import check_fields
from deq_zoo.diffusion.package import diffusers
from deq_zoo.diffusion.plan import ChainPlan, step_noise
from deq_zoo.diffusion.prediction import InvertedImage, prepare
from deq_zoo.images.inputs import ImageLike, as_image
from deq_zoo.model import Model
from deq_zoo.output import Output


@dataclass(frozen=True)
class UNetConfig:
    """The shape of a denoiser.

    Args:
        size: side of the images.
        channels: of the images.
        widths: features at each resolution; every resolution is half of the one before.
        blocks: residual blocks at each resolution.
        attention: sides of the resolutions that have attention.
        dropout: in training.
        groups: of group normalisation; must divide every width.
        patch: side of the squares whose pixels the network takes as channels of one; a large one
            saves work at the finest resolution.
    """

    size: int = 32
    channels: int = 3
    widths: tuple[int, ...] = (128, 256, 256, 256)
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    dropout: float = 0.1
    groups: int = 32
    patch: int = 1

    def __post_init__(self) -> None:
        check_fields(self, 1, "size", "channels", "blocks", "groups", "patch")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if not self.widths or any(width < 1 or width % self.groups for width in self.widths):
            raise ValueError(f"widths must be multiples of groups={self.groups}, got {self.widths}")
        if self.size % self.patch:
            raise ValueError(f"size must be a multiple of patch={self.patch}, got {self.size}")
        if self.size // self.patch % 2 ** (len(self.widths) - 1):
            per_patch = "" if self.patch == 1 else f", counted in patches of {self.patch}"
            raise ValueError(
                f"size must be divisible by 2 {len(self.widths) - 1} times, as there are "
                f"{len(self.widths)} widths: got {self.size}{per_patch}"
            )

    @property
    def sides(self) -> tuple[int, ...]:
        """Return the side of the features at each resolution."""
        return tuple(self.size // self.patch // 2**i for i in range(len(self.widths)))


CIFAR10 = UNetConfig()
CELEBA = UNetConfig(size=64, widths=(128, 256, 256, 256, 512))
LSUN = UNetConfig(size=256, widths=(128, 128, 256, 256, 512, 512), dropout=0.0)
DIGITS = UNetConfig(
    size=14, channels=1, widths=(16, 32), blocks=1, attention=(), dropout=0.0, groups=8
)
WHOLE_DIGITS = UNetConfig(
    size=28, channels=1, widths=(32, 64), blocks=1, attention=(), dropout=0.0, groups=8, patch=2
)


def make_unet(config: UNetConfig) -> nn.Module:
    """Return the `UNet2DModel` that equals the network of the DDPM release, layer by layer.

    With patches its first and last convolution are between the channels of patches; the release
    has none.
    """
    attends = [side in config.attention for side in config.sides]
    down = ["AttnDownBlock2D" if here else "DownBlock2D" for here in attends]
    up = ["AttnUpBlock2D" if here else "UpBlock2D" for here in reversed(attends)]
    unet: Any = diffusers().UNet2DModel(
        sample_size=config.size,
        in_channels=config.channels,
        out_channels=config.channels,
        block_out_channels=config.widths,
        layers_per_block=config.blocks,
        down_block_types=tuple(down),
        up_block_types=tuple(up),
        downsample_padding=0,
        flip_sin_to_cos=False,
        freq_shift=1,
        norm_eps=1e-6,
        norm_num_groups=config.groups,
        attention_head_dim=None,
        dropout=config.dropout,
    )
    if config.patch > 1:
        _use_patches(unet, config)
    return unet  # type: ignore[no-any-return]


def _use_patches(unet: Any, config: UNetConfig) -> None:
    """Replace the first and last convolution of a network by ones between patches."""
    channels, width = config.channels * config.patch**2, config.widths[0]
    unet.conv_in = nn.Sequential(
        nn.PixelUnshuffle(config.patch), nn.Conv2d(channels, width, 3, padding=1)
    )
    unet.conv_out = nn.Sequential(
        nn.Conv2d(width, channels, 3, padding=1), nn.PixelShuffle(config.patch)
    )


@dataclass(frozen=True)
class Denoised(Output[Tensor, None]):
    """The output of a denoiser: a prediction (B, C, H, W), without state and statistics."""

    @property
    def sample(self) -> Tensor:
        """Return the prediction under the name that diffusers has for it."""
        return self.prediction


class Denoiser(Model):
    r"""A network that predicts the noise in an image, with the average of its weights.

    $$\bar\theta \leftarrow d_n \bar\theta + (1 - d_n)\, \theta, \qquad
    d_n = \min(\mathrm{decay}, (1 + n) / (10 + n))$$

    after update n: early weights soon lose their influence. `forward` uses the weights $\theta$ in
    training mode, the average in evaluation mode.

    One call of the network is no equilibrium, so `forward(x, t)` takes timesteps instead of a start
    and its output has no state. The equilibrium is the chain of all sampling steps: `predict`
    inverts an image by it, and `plan.make_chain(model)` returns it for other uses.

    Args:
        config: the shape of the network.
        decay: of the average.
        plan: the chain of `predict`, with its solver and its inversion.
    """

    def __init__(
        self, config: UNetConfig, decay: float = 0.9999, plan: ChainPlan | None = None
    ) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self.config, self.plan = config, ChainPlan() if plan is None else plan
        self.unet = make_unet(config)
        self.average = AveragedModel(self.unet, multi_avg_fn=_Decay(decay), use_buffers=True)
        _make_buffers(self.average.module)

    def forward(self, x: Tensor, t: Tensor) -> Denoised:
        """Return the prediction for noisy images.

        Args:
            x: (B, C, H, W), noisy images.
            t: (B,), the timestep of each.
        """
        out: Any = (self.unet if self.training else self.average)(x, t)
        return Denoised([out.sample], None)

    def shard_units(self) -> Iterator[nn.Module]:
        """Yield the blocks of the network, which has no solve inside."""
        unet: Any = self.unet
        yield from (*unet.down_blocks, unet.mid_block, *unet.up_blocks)

    def copied_weights(self) -> dict[str, str]:
        """Return the names of the average."""
        names = [name for name, _ in self.unet.named_parameters()]
        return {f"average.module.{name}": f"unet.{name}" for name in names}

    def update_average(self) -> None:
        """Add the present weights of the network to the average."""
        self.average.update_parameters(self.unet)

    def predict(
        self, x: ImageLike, z0: Tensor | None = None, **call: Any
    ) -> Output[InvertedImage, Tensor]:
        """Return the noise from which the chain generates one image.

        Args:
            x: the image: a path, a Pillow image, an array or a tensor. It is brought into the form
                of the training images.
            z0: the trajectory to start from, (1, T + 1, C, H, W): `state` of an earlier output,
                initial noise first. By default the search starts from the encoded image.
            **call: options of the DEQ for this call, e.g. `f_max_iter=30`; `steps` sets the steps
                of Adam.

        Returns:
            An output whose prediction has the noise, the reconstruction and its errors. `state` is
            the trajectory, `stats` are those of the solve that leads from the noise to the
            reconstruction.
        """
        return super().predict(x, z0, **call)

    def _predict(
        self, x: ImageLike, z0: Tensor | None, steps: int | None = None, **call: Any
    ) -> Output[InvertedImage, Tensor]:
        plan = self.plan.with_options(steps, **call)
        chain = plan.make_chain(self)
        image = prepare(as_image(x), self.config.size, self.config.channels, self.facts)
        target = image.pixels.to(next(self.parameters()))
        self._check_start(z0, len(chain))
        first, states = (None, None) if z0 is None else (z0[:, 0], z0[:, 1:])
        noise = step_noise(chain, target)
        inversion = plan.invert(chain, target, noise, first, states)
        trajectory = plan.solve(chain, inversion.noise, noise)
        prediction = InvertedImage.of(target, inversion, trajectory, noise, image.negative)
        state = torch.cat((inversion.noise[:, None], trajectory.states), dim=1)
        return Output([prediction], state, trajectory.stats)

    def _check_start(self, z0: Tensor | None, steps: int) -> None:
        side = self.config.size
        want = (1, steps + 1, self.config.channels, side, side)
        if z0 is not None and z0.shape != want:
            raise ValueError(
                f"z0 must be a trajectory with its initial noise, (1, T + 1, C, H, W) = {want}, "
                f"got {tuple(z0.shape)}"
            )


def _make_buffers(module: nn.Module) -> None:
    """Turn parameters into buffers of the same names, so that no optimiser trains them."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, weight.detach())


@dataclass(frozen=True)
class _Decay:
    """One update of the average, for all tensors at once."""

    decay: float

    def __call__(self, average: Any, current: Any, n: Any) -> None:
        decay = min(self.decay, (1 + float(n)) / (10 + float(n)))
        get_ema_multi_avg_fn(decay)(average, current, n)
