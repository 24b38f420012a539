"""The shape of an MDEQ, and the networks of the paper."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from deq_zoo.checks import check_fields
from torchdeq.registry import suggest

NORM_SCOPES = ("branches", "fuse_layers", "post_fuse_layers")  # the three kinds of layers in f
INIT_RULES = ("cifar", "default")


def _tuple(name: str, value: Any) -> tuple[Any, ...]:
    if isinstance(value, (str, bytes)) or not isinstance(value, Sequence):
        raise TypeError(f"{name} must be a tuple, one entry per item, got {value!r}")
    return tuple(value)


@dataclass(frozen=True, kw_only=True)
class MDEQConfig:
    """The shape of an MDEQ.

    Args:
        channels: of each branch, finest first; each branch has half the resolution of the last.
        blocks: residual blocks of each branch, or one number for all.
        expansion: the first convolution of a block widens by this.
        groups: of the group norms; even, and a divisor of every branch's channels.
        downsample_times: halvings of the image before branch 0: 0, 1 or 2.
        in_channels: of the image.
        head_channels: width of the classifier's bottleneck on each branch.
        final_channels: features that are averaged over the image and classified.
        classes: outputs.
        norm_scope: which layers of f are normalised, in the way that the DEQ's options say: any of
            `branches`, `fuse_layers`, `post_fuse_layers`.
        init: `cifar` draws every convolution outside f from N(0, 0.01²), biases too; `default`
            leaves PyTorch's uniform rule. f keeps PyTorch's rule in both.
    """

    channels: tuple[int, ...]
    blocks: int | tuple[int, ...] = 1
    expansion: int = 5
    groups: int = 8
    downsample_times: int = 0
    in_channels: int = 3
    head_channels: tuple[int, ...] = ()
    final_channels: int = 0
    classes: int = 10
    norm_scope: tuple[str, ...] = NORM_SCOPES
    init: str = "cifar"

    def __post_init__(self) -> None:
        for name in ("channels", "head_channels", "norm_scope"):
            object.__setattr__(self, name, _tuple(name, getattr(self, name)))
        if not isinstance(self.blocks, int):
            object.__setattr__(self, "blocks", _tuple("blocks", self.blocks))
        if not self.channels:
            raise ValueError("channels must name at least one branch, e.g. (24, 24)")
        if self.groups < 2 or self.groups % 2:
            raise ValueError(f"groups must be even and at least 2, got {self.groups}")
        uneven = [c for c in self.channels if c < 1 or c % self.groups]
        if uneven:
            raise ValueError(
                f"every branch's channels must be a multiple of groups={self.groups}, got {uneven}"
            )
        if len(self.blocks_by_branch) != len(self.channels) or min(self.blocks_by_branch) < 1:
            raise ValueError(
                f"blocks must be one number >= 1 for each of the {len(self.channels)} branches, or "
                f"one for all, got {self.blocks}"
            )
        if self.downsample_times not in (0, 1, 2):
            raise ValueError(f"downsample_times must be 0, 1 or 2, got {self.downsample_times}")
        check_fields(self, 1, "expansion", "in_channels", "classes")
        for scope in self.norm_scope:
            if scope not in NORM_SCOPES:
                raise ValueError(f"unknown norm_scope {scope!r}{suggest(scope, NORM_SCOPES)}")
        if self.init not in INIT_RULES:
            raise ValueError(f"unknown init {self.init!r}{suggest(self.init, INIT_RULES)}")

    @property
    def blocks_by_branch(self) -> tuple[int, ...]:
        """Return the number of residual blocks of each branch."""
        return (self.blocks,) * len(self.channels) if isinstance(self.blocks, int) else self.blocks

    @property
    def has_stage0(self) -> bool:
        """Return whether a 1x1 convolution follows the stem; small nets at full size have none."""
        return self.downsample_times > 0 or len(self.channels) > 2


#: The nets of the paper; parameters 159,034, 11,099,998 and 16,808,456.
TINY = MDEQConfig(channels=(24, 24), head_channels=(8, 16), final_channels=200)
LARGE = MDEQConfig(
    channels=(32, 64, 128, 256), head_channels=(14, 28, 56, 112), final_channels=1680
)
IMAGENET_SMALL = MDEQConfig(
    channels=(32, 64, 128, 256),
    downsample_times=2,
    head_channels=(24, 48, 96, 192),
    final_channels=2048,
    classes=1000,
    norm_scope=("branches",),
    init="default",
)
#: Grey images of 28 x 28 in a minute on a CPU: 40,122 parameters, a state of 16 x (7 x 7 + 4 x 4).
DIGITS = MDEQConfig(
    channels=(16, 16),
    expansion=2,
    groups=4,
    downsample_times=2,
    in_channels=1,
    head_channels=(8, 8),
    final_channels=64,
)
#: The same images in many forms, in some minutes on a CPU: 91,042 parameters.
HANDWRITING = MDEQConfig(
    channels=(24, 24),
    expansion=2,
    groups=4,
    downsample_times=2,
    in_channels=1,
    head_channels=(8, 16),
    final_channels=128,
)
