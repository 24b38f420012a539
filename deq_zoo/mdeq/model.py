"""MDEQ: images to a pyramid of features in equilibrium, and heads to classify and to segment."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.checks import check_fields
from deq_zoo.mdeq.layers import Bottleneck, MultiscaleMap, Pyramid, conv1x1, conv3x3, half, normed
from torchdeq import DEQConfig, SolverStat, apply_norm, get_deq, reset_norm
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
        """The number of residual blocks, for each branch."""
        return (self.blocks,) * len(self.channels) if isinstance(self.blocks, int) else self.blocks

    @property
    def has_stage0(self) -> bool:
        """Whether a 1x1 convolution follows the stem: not in small nets at full resolution."""
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


class _Equilibrium(nn.Module):
    """What backbone, classifier and segmenter share: stem, f and the DEQ."""

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__()
        self.config = config
        options = DEQConfig(deq)
        c, times = config.channels[0], config.downsample_times
        self.downsample = nn.Sequential(
            *normed(conv3x3(config.in_channels, c, stride=2 if times >= 1 else 1)),
            *normed(conv3x3(c, c, stride=2 if times >= 2 else 1)),
        )
        self.stage0 = nn.Sequential(*normed(conv1x1(c, c))) if config.has_stage0 else nn.Identity()
        self.full_stage = MultiscaleMap(
            config.channels, config.blocks_by_branch, config.expansion, config.groups
        )
        self.deq = get_deq(options, coupled=options.get("coupled", False))
        for scope in config.norm_scope:
            if scope != "fuse_layers" or len(config.channels) > 1:  # one branch has none
                apply_norm(getattr(self.full_stage, scope), args=options)

    def inject(self, x: Tensor) -> Tensor:
        """The injection u, (B, C_0, H, W), of images (B, C, ...)."""
        if x.dim() != 4 or x.shape[1] != self.config.in_channels:
            raise ValueError(
                f"images must be (batch, {self.config.in_channels}, height, width), got "
                f"{tuple(x.shape)}"
            )
        if not x.is_floating_point():
            raise TypeError(f"images must be floating point, got {x.dtype}: normalise them first")
        u: Tensor = self.stage0(self.downsample(x))
        return u

    def start(self, u: Tensor) -> Pyramid:
        """A pyramid of zeros for this injection, in its memory format and the model's dtype."""
        dtype = next(self.parameters()).dtype  # u's own may be autocast's
        batch, _, height, width = u.shape
        pyramid = []
        for channels in self.config.channels:
            z = u.new_zeros((batch, channels, height, width), dtype=dtype)
            pyramid.append(z.contiguous(memory_format=_memory_format(u)))
            height, width = half(height), half(width)
        return pyramid

    def solve(
        self, u: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> tuple[list[Pyramid], SolverStat]:
        """The pyramids in equilibrium with an injection.

        Args:
            u: the injection.
            z0: where to start, e.g. the last frame's pyramid; zeros by default.
            **call: options of this call of the DEQ, e.g. `f_max_iter=30`, `compact=True`.
        """
        reset_norm(self.full_stage)
        states, stats = self.deq(
            self.full_stage, self.start(u) if z0 is None else z0, args=(u,), **call
        )
        return states, stats

    def _initialise(self) -> None:
        """Draw the convolutions outside f by the config's rule; called when the head is there."""
        if self.config.init == "default":
            return
        inside = set(self.full_stage.modules())
        for module in self.modules():
            if isinstance(module, nn.Conv2d) and module not in inside:
                for parameter in module.parameters():
                    nn.init.normal_(parameter, std=0.01)


class MDEQ(_Equilibrium):
    r"""The backbone: images to the equilibrium pyramid of a multiscale map.

    $$z^\star = f(z^\star, u), \qquad u = \mathrm{stem}(x)$$

    Shapes: `x` is `(B, in_channels, H, W)`, of any size; branch i of a pyramid is
    `(B, C_i, H_i, W_i)` with sides halved `downsample_times + i` times, rounded up.

    Args:
        config: the shape of the network.
        deq: options of the DEQ and of the norm in f: a `DEQConfig`, dict or Namespace.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        self._initialise()

    def forward(
        self, x: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> tuple[list[Pyramid], SolverStat]:
        """The pyramids that training samples, or the one of evaluation; see `solve`."""
        return self.solve(self.inject(x), z0, **call)


class MDEQClassifier(_Equilibrium):
    r"""An MDEQ that classifies images.

    $$t_0 = B_0(z_0), \quad t_{i+1} = B_{i+1}(z_{i+1}) +
    \mathrm{ReLU}(\mathrm{BN}(D_i \, t_i)), \quad
    y = W \, \mathrm{mean}(\mathrm{ReLU}(\mathrm{BN}(V t_{n-1})))$$

    with a bottleneck $B_i$ on each branch and strided convolutions $D_i$.

    Args: see `MDEQ`; the config must have `head_channels` and `final_channels`.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        widths, final = config.head_channels, config.final_channels
        if len(widths) != len(config.channels) or final < 1 or min(widths) < 1:
            raise ValueError(
                f"a classifier of {len(config.channels)} branches needs as many head_channels and "
                f"final_channels >= 1, got {widths} and {final}"
            )
        self.incre_modules = nn.ModuleList(
            nn.Sequential(Bottleneck(c, h)) for c, h in zip(config.channels, widths, strict=True)
        )
        self.downsamp_modules = nn.ModuleList(
            nn.Sequential(*normed(conv3x3(4 * a, 4 * b, stride=2, bias=True)))
            for a, b in pairwise(widths)
        )
        self.final_layer = nn.Sequential(*normed(conv1x1(4 * widths[-1], final, bias=True)))
        self.classifier = nn.Linear(final, config.classes)
        self._initialise()

    def forward(
        self, x: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> tuple[list[Tensor], SolverStat]:
        """The logits (B, classes) of every pyramid: several may come in training, else one."""
        pyramids, stats = self.solve(self.inject(x), z0, **call)
        return [self.classify(z) for z in pyramids], stats

    def classify(self, z: Pyramid) -> Tensor:
        """The logits (B, classes) of a pyramid."""
        t = self.incre_modules[0](z[0])
        for i, down in enumerate(self.downsamp_modules, start=1):
            t = self.incre_modules[i](z[i]) + down(t)
        logits: Tensor = self.classifier(self.final_layer(t).mean(dim=(2, 3)))
        return logits


class MDEQSegmenter(_Equilibrium):
    """An MDEQ that labels every pixel: all branches at the finest one's size, two convolutions.

    Logits have the size of branch 0; resize them to the labels' for a loss.

    Args: see `MDEQ`.
    """

    def __init__(self, config: MDEQConfig, deq: Any = None) -> None:
        super().__init__(config, deq)
        width = sum(config.channels)
        self.last_layer = nn.Sequential(
            conv1x1(width, width, bias=True),
            nn.BatchNorm2d(width, momentum=0.01),
            nn.ReLU(inplace=True),
            conv1x1(width, config.classes, bias=True),
        )
        self._initialise()

    def forward(
        self, x: Tensor, z0: Pyramid | None = None, **call: Any
    ) -> tuple[list[Tensor], SolverStat]:
        """The logits (B, classes, H_0, W_0) of every pyramid."""
        pyramids, stats = self.solve(self.inject(x), z0, **call)
        return [self.segment(z) for z in pyramids], stats

    def segment(self, z: Pyramid) -> Tensor:
        """The logits (B, classes, H_0, W_0) of a pyramid."""
        size = z[0].shape[2:]
        coarse = (
            F.interpolate(z_i, size=size, mode="bilinear", align_corners=True) for z_i in z[1:]
        )
        logits: Tensor = self.last_layer(torch.cat((z[0], *coarse), dim=1))
        return logits


def _memory_format(t: Tensor) -> torch.memory_format:
    last = t.is_contiguous(memory_format=torch.channels_last) and not t.is_contiguous()
    return torch.channels_last if last else torch.contiguous_format
