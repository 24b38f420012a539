"""The parts of MDEQ: the map f whose fixed point is a pyramid of features, and its heads' blocks.

Attribute names are those of the published checkpoints.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Pyramid = list[Tensor]  # one (B, C_i, H_i, W_i) per branch, finest first, each half the last


def half(size: int) -> int:
    """Return the side of an image after a convolution of stride 2: odd sides round up."""
    return (size + 1) // 2


def conv3x3(c_in: int, c_out: int, stride: int = 1, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel_size=3, stride=stride, padding=1, bias=bias)


def conv1x1(c_in: int, c_out: int, bias: bool = False) -> nn.Conv2d:
    return nn.Conv2d(c_in, c_out, kernel_size=1, bias=bias)


def normed(conv: nn.Conv2d) -> list[nn.Module]:
    """Return a convolution outside f, its batch norm and its ReLU."""
    return [conv, nn.BatchNorm2d(conv.out_channels), nn.ReLU(inplace=True)]


class ResidualBlock(nn.Module):
    r"""Two convolutions at one resolution; the injection joins before the second norm.

    $$p = \mathrm{ReLU}(\mathrm{GN}(W_1 z)), \quad q = \mathrm{GN}(W_2 p + u), \quad
    r = \mathrm{GN}(\mathrm{ReLU}(q + z))$$
    """

    def __init__(self, channels: int, expansion: int, groups: int) -> None:
        super().__init__()
        wide = expansion * channels
        self.conv1 = conv3x3(channels, wide)
        self.gn1 = nn.GroupNorm(groups, wide)
        self.conv2 = conv3x3(wide, channels)
        self.gn2 = nn.GroupNorm(groups, channels)
        self.gn3 = nn.GroupNorm(groups, channels)

    def forward(self, z: Tensor, u: Tensor | None = None) -> Tensor:
        p = self.gn1(self.conv1(z)).relu_()
        q = self.conv2(p)
        q = self.gn2(q if u is None else q + u)
        r: Tensor = self.gn3((q + z).relu_())
        return r


class Branch(nn.Module):
    """The residual blocks of one resolution; the first of them takes the injection."""

    def __init__(self, channels: int, blocks: int, expansion: int, groups: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            ResidualBlock(channels, expansion, groups) for _ in range(blocks)
        )

    def forward(self, z: Tensor, u: Tensor | None = None) -> Tensor:
        for k, block in enumerate(self.blocks):
            z = block(z, u if k == 0 else None)
        return z


class Upsample(nn.Module):
    """From a coarse branch to a finer one: 1x1 convolution, norm, then every pixel repeated."""

    def __init__(self, c_in: int, c_out: int, levels: int, groups: int) -> None:
        super().__init__()
        self.factor = 2**levels
        conv, gnorm = conv1x1(c_in, c_out), nn.GroupNorm(groups, c_out)
        self.net = nn.Sequential(OrderedDict(conv=conv, gnorm=gnorm))

    def forward(self, r: Tensor, size: torch.Size) -> Tensor:
        up = F.interpolate(self.net(r), scale_factor=self.factor, mode="nearest")
        height, width = size
        # Sides round up on the way down, so too many pixels may come back.
        return up if up.shape[2:] == size else up[..., :height, :width]


class Downsample(nn.Module):
    """From a fine branch to a coarser one: a strided convolution and a norm for each level."""

    def __init__(self, c_in: int, c_out: int, levels: int, groups: int) -> None:
        super().__init__()
        steps: list[nn.Module] = []
        for k in range(levels):
            last = k == levels - 1
            channels = c_out if last else c_in
            parts: OrderedDict[str, nn.Module] = OrderedDict(
                conv=conv3x3(c_in, channels, stride=2), gnorm=nn.GroupNorm(groups, channels)
            )
            if not last:
                parts["relu"] = nn.ReLU(inplace=True)
            steps.append(nn.Sequential(parts))
        self.net = nn.Sequential(*steps)

    def forward(self, r: Tensor, size: torch.Size) -> Tensor:
        down: Tensor = self.net(r)  # of this size already
        return down


class MultiscaleMap(nn.Module):
    r"""The map f of an MDEQ: each branch on its own, then every branch to every other.

    $$r_i = \mathrm{Branch}_i(z_i, [i = 0]\, u), \qquad
    f(z, u)_i = \mathrm{GN}(W_i \, \mathrm{ReLU}(r_i + \sum_{j \ne i} R_{ji} \, r_j))$$

    with $R_{ji}$ the resizing from branch j to branch i. A single branch has nothing to fuse:
    $f(z, u)_0 = r_0$.

    Called with the tensors of the state and, after them, the injection: `f(*z, u)`.
    """

    def __init__(
        self, channels: Sequence[int], blocks: Sequence[int], expansion: int, groups: int
    ) -> None:
        super().__init__()
        n = len(channels)
        self.branches = nn.ModuleList(
            Branch(c, b, expansion, groups) for c, b in zip(channels, blocks, strict=True)
        )
        self.fuse_layers = nn.ModuleList(
            nn.ModuleList(_resize(channels, j, i, groups) for j in range(n)) for i in range(n)
        )
        self.post_fuse_layers = nn.ModuleList(
            nn.Sequential(
                OrderedDict(
                    relu=nn.ReLU(inplace=True),  # of a sum that nothing else reads
                    conv=conv1x1(c, c),
                    gnorm=nn.GroupNorm(groups // 2, c),
                )
            )
            for c in channels
        )

    def forward(self, *state: Tensor) -> Pyramid:
        *z, u = state
        branches = enumerate(zip(self.branches, z, strict=True))
        r = [branch(z_i, None if i else u) for i, (branch, z_i) in branches]
        if len(r) == 1:
            return r
        layers = enumerate(zip(self.fuse_layers, self.post_fuse_layers, strict=True))
        return [post(_fuse(row.children(), r, i)) for i, (row, post) in layers]


def _fuse(resizes: Iterable[nn.Module], r: Pyramid, i: int) -> Tensor:
    """Branch i plus every other one at its size."""
    y, size = r[i], r[i].shape[2:]
    for j, resize in enumerate(resizes):
        if j != i:
            y = y + resize(r[j], size)
    return y


def _resize(channels: Sequence[int], j: int, i: int, groups: int) -> nn.Module:
    """Return the map from branch j to branch i; the identity from a branch to itself."""
    if j == i:
        return nn.Identity()
    kind = Upsample if j > i else Downsample
    return kind(channels[j], channels[i], abs(i - j), groups)


class Bottleneck(nn.Module):
    r"""A head's block on one branch, from C to 4h channels.

    $$\mathrm{ReLU}(\mathrm{BN}(W_3 \, \mathrm{ReLU}(\mathrm{BN}(W_2 \,
    \mathrm{ReLU}(\mathrm{BN}(W_1 z)))))  + \mathrm{BN}(W_s z))$$

    The norms inside have no parameters; the shortcut is the identity if `C = 4h`.
    """

    def __init__(self, channels: int, width: int) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv1x1(channels, width), nn.BatchNorm2d(width, affine=False)
        self.conv2, self.bn2 = conv3x3(width, width), nn.BatchNorm2d(width, affine=False)
        self.conv3, self.bn3 = conv1x1(width, 4 * width), nn.BatchNorm2d(4 * width, affine=False)
        self.downsample: nn.Module = nn.Identity()
        if channels != 4 * width:
            shortcut = conv1x1(channels, 4 * width)
            self.downsample = nn.Sequential(shortcut, nn.BatchNorm2d(4 * width))

    def forward(self, z: Tensor) -> Tensor:
        t = self.bn1(self.conv1(z)).relu_()
        t = self.bn2(self.conv2(t)).relu_()
        t = self.bn3(self.conv3(t))
        out: Tensor = (t + self.downsample(z)).relu_()
        return out
