"""The denoiser: a UNet of diffusers with a running average of its weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from deq_zoo.checks import check_fields
from deq_zoo.diffusion.package import diffusers


@dataclass(frozen=True)
class UNetConfig:
    """The shape of a denoiser.

    Args:
        size: side of the images.
        channels: of the images.
        widths: features at each resolution, every one half of that before.
        blocks: residual blocks at each.
        attention: sides at which there is attention.
        dropout: in training.
        groups: of group normalisation; must divide every width.
    """

    size: int = 32
    channels: int = 3
    widths: tuple[int, ...] = (128, 256, 256, 256)
    blocks: int = 2
    attention: tuple[int, ...] = (16,)
    dropout: float = 0.1
    groups: int = 32

    def __post_init__(self) -> None:
        check_fields(self, 1, "size", "channels", "blocks", "groups")
        if not 0 <= self.dropout < 1:
            raise ValueError(f"dropout must lie in [0, 1), got {self.dropout}")
        if not self.widths or any(width < 1 or width % self.groups for width in self.widths):
            raise ValueError(f"widths must be multiples of groups={self.groups}, got {self.widths}")
        if self.size % 2 ** (len(self.widths) - 1):
            raise ValueError(
                f"size must halve {len(self.widths) - 1} times, as there are {len(self.widths)} "
                f"widths: got {self.size}"
            )


CIFAR10 = UNetConfig()
CELEBA = UNetConfig(size=64, widths=(128, 256, 256, 256, 512))
LSUN = UNetConfig(size=256, widths=(128, 128, 256, 256, 512, 512), dropout=0.0)
DIGITS = UNetConfig(
    size=14, channels=1, widths=(16, 32), blocks=1, attention=(), dropout=0.0, groups=8
)


def make_unet(config: UNetConfig) -> nn.Module:
    """The `UNet2DModel` that is the network of the DDPM release, layer by layer."""
    sides = [config.size // 2**i for i in range(len(config.widths))]
    attends = [side in config.attention for side in sides]
    down = ["AttnDownBlock2D" if here else "DownBlock2D" for here in attends]
    up = ["AttnUpBlock2D" if here else "UpBlock2D" for here in reversed(attends)]
    unet: nn.Module = diffusers().UNet2DModel(
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
    return unet


class Denoiser(nn.Module):
    r"""A network that tells the noise in an image, and the average of its weights over training.

    $$\bar\theta \leftarrow d_n \bar\theta + (1 - d_n)\, \theta, \qquad
    d_n = \min(\mathrm{decay}, (1 + n) / (10 + n))$$

    after update n: early weights are forgotten soon. In training mode the network itself answers,
    in evaluation mode the average.

    Args:
        config: the shape of the network.
        decay: of the average.
    """

    def __init__(self, config: UNetConfig, decay: float = 0.9999) -> None:
        super().__init__()
        if not 0 <= decay < 1:
            raise ValueError(f"decay must lie in [0, 1), got {decay}")
        self.unet = make_unet(config)
        self.average = AveragedModel(self.unet, multi_avg_fn=_Decay(decay), use_buffers=True)
        _hold(self.average.module)

    def forward(self, x: Tensor, t: Tensor) -> Tensor:
        out: Any = (self.unet if self.training else self.average)(x, t)
        noise: Tensor = out.sample
        return noise

    def update_average(self) -> None:
        """Take the network's present weights into the average."""
        self.average.update_parameters(self.unet)


def _hold(module: nn.Module) -> None:
    """Turn parameters into buffers of the same names, so that they are not counted or trained."""
    for part in module.modules():
        for name, weight in list(part.named_parameters(recurse=False)):
            delattr(part, name)
            part.register_buffer(name, weight.detach())


@dataclass(frozen=True)
class _Decay:
    """One step of the average, for all tensors at once."""

    decay: float

    def __call__(self, average: Any, current: Any, n: Any) -> None:
        decay = min(self.decay, (1 + float(n)) / (10 + float(n)))
        get_ema_multi_avg_fn(decay)(average, current, n)
