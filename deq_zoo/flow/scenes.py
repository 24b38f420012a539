r"""Pairs of frames with layers that move, cover each other, and an exact flow.

Every layer k has a texture $P_k$, a similarity $A_k$ from the frame to the texture, a shape $m_k$
and a smooth flow $F_k$. The second frame shows the layer in its place; the first frame looks the
layer up where the flow leads:

$$I_2(y) = P_k(A_k y) \text{ where } m_k(y), \qquad
I_1(x) = P_k(A_k (x + F_k(x))) \text{ where } m_k(x + F_k(x))$$

The upper layer covers the lower, and the flow of a pixel is that of the uppermost layer there. So
the flow is exact at every pixel, and so is occlusion: x is hidden in the second frame where a layer
above k has its shape at $x + F_k(x)$.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from math import ceil, cos, log2, pi, sin
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.flow.augment import Pair
from deq_zoo.flow.layers import pixel_grid
from deq_zoo.flow.leaves import LEAVES, dead_leaves
from deq_zoo.flow.warps import PHOTOGRAPHS, photograph, sample
from deq_zoo.task import generator

#: The photographs of each split: those of warps, one more for training, one more for validation.
SCENE_PHOTOGRAPHS = {
    **PHOTOGRAPHS,
    "train": (*PHOTOGRAPHS["train"], "grass"),
    "val": (*PHOTOGRAPHS["val"], "grace_hopper"),
}
_LONGEST, _SHARE = 40.0, 0.25  # of a shift: in pixels, and of the frame's smaller side
_CLOSEST, _FARTHEST = 0.5, 3.0  # pixels of a texture per pixel of the frame


class Shape(NamedTuple):
    """A blob in the second frame: a superellipse whose outline two sines bend."""

    centre: tuple[float, float]
    radii: tuple[float, float]
    angle: float
    power: float
    bend: tuple[float, float, float]  # amplitude and two phases

    def alpha(self, p: Tensor) -> Tensor:
        """Return the cover (h, w), from 0 to 1, at points (2, h, w); its edge is a pixel wide."""
        q = turned(p - _point(*self.centre), 1.0, self.angle) / _point(*self.radii)
        amplitude, a, b = self.bend
        q = q + amplitude * torch.sin(3 * q.flip(0) + _point(a, b))
        inside = 1 - q.square().pow(self.power / 2).sum(0)
        return (0.5 + inside * min(self.radii) / self.power).clamp(0, 1)


class Layer(NamedTuple):
    """A texture (3, H, W), the similarity that places it, its flow, its shape and its colours."""

    texture: Tensor
    scale: float
    angle: float
    at: tuple[float, float]
    flow: Tensor  # (2, h, w)
    shape: Shape | None  # None covers the frame
    colours: Tensor  # (3, 4): a matrix and a constant

    def look(self, p: Tensor) -> Tensor:
        """Return the colours (3, h, w) at points (2, h, w) of the second frame."""
        image = sample(self.texture, turned(p, self.scale, self.angle) + _point(*self.at))
        mixed = torch.einsum("ij,jhw->ihw", self.colours[:, :3], image)
        return (mixed + self.colours[:, 3, None, None]).clamp(0, 255)


def compose(layers: Sequence[Layer]) -> Pair:
    """Return both frames of layers; each covers those before it, the first fills the frame."""
    flow = layers[0].flow
    grid = pixel_grid(flow)[0]
    image1, image2 = layers[0].look(grid + flow), layers[0].look(grid)
    for layer in layers[1:]:
        assert layer.shape is not None
        there = grid + layer.flow
        cover = layer.shape.alpha(there)
        _paint(image1, layer, there, cover)
        _paint(image2, layer, grid, layer.shape.alpha(grid))
        flow = torch.where(cover > 0.5, layer.flow, flow)
    return Pair(image1, image2, flow, torch.ones(flow.shape[1:], dtype=torch.bool))


def _paint(image: Tensor, layer: Layer, points: Tensor, cover: Tensor) -> None:
    """Paint a layer over an image, in place, and look at the texture only where it covers."""
    rows, columns = cover.any(1).nonzero(), cover.any(0).nonzero()
    if not len(rows):
        return
    box = (slice(int(rows[0]), int(rows[-1]) + 1), slice(int(columns[0]), int(columns[-1]) + 1))
    part = image[:, *box]
    image[:, *box] = torch.lerp(part, layer.look(points[:, *box]), cover[box])


def hidden(layers: Sequence[Layer]) -> Tensor:
    """Return which pixels (H, W) of the first frame a layer of the second frame covers."""
    flow = layers[0].flow
    grid = pixel_grid(flow)[0]
    top = torch.zeros(flow.shape[1:], dtype=torch.long)
    for k, layer in enumerate(layers[1:], 1):
        assert layer.shape is not None
        here = layer.shape.alpha(grid + layer.flow) > 0.5
        top[here], flow = k, torch.where(here, layer.flow, flow)
    covered = torch.zeros_like(top, dtype=torch.bool)
    for k, layer in enumerate(layers[1:], 1):
        assert layer.shape is not None
        covered |= (top < k) & (layer.shape.alpha(grid + flow) > 0.5)
    return covered


class Dice:
    """Random numbers of one generator, in short calls."""

    def __init__(self, rng: torch.Generator) -> None:
        self.rng = rng

    def uniform(self, low: float = 0.0, high: float = 1.0) -> float:
        return low + (high - low) * float(torch.rand((), generator=self.rng))

    def normal(self, scale: float = 1.0) -> float:
        return scale * float(torch.randn((), generator=self.rng))

    def below(self, count: int) -> int:
        return int(torch.randint(count, (), generator=self.rng))

    def vector(self, longest: float) -> tuple[float, float]:
        """Return a vector of any direction; short ones are more likely than long ones."""
        length, angle = longest * self.uniform() ** 2, self.uniform(0, 2 * pi)
        return length * cos(angle), length * sin(angle)


def draw_layers(split: str, size: tuple[int, int], dice: Dice) -> list[Layer]:
    """Return the layers of a random scene: at rest, in one shift, or each in its own motion."""
    kind = dice.uniform()
    rest, together = kind < 0.08, kind < 0.2
    longest = min(_LONGEST, _SHARE * min(size))
    shift = (0.0, 0.0) if rest else dice.vector(longest)
    zeros = torch.zeros(2, *size)
    first = zeros + _point(*shift)
    layers = [_layer(split, size, first if together else first + _bent(size, dice), None, dice)]
    for _ in range(dice.below(5)):
        shape = _shape(size, dice)
        flow = first
        if not together:
            base = layers[0].flow if dice.uniform() < 0.6 else zeros
            flow = base + _point(*dice.vector(0.6 * longest)) + _tilted(size, shape.centre, dice)
        layers.append(_layer(split, size, flow, shape, dice))
    return layers


def photographed(pair: Pair, dice: Dice) -> Pair:
    """Return a pair as cameras give it: light that changes, blur, noise, bytes."""
    image1, image2 = pair.image1, pair.image2
    if dice.uniform() < 0.3:  # light
        gain, offset = 1 + 0.15 * torch.randn(3, 1, 1, generator=dice.rng), dice.normal(12.0)
        image2 = gain * image2 + offset
    if dice.uniform() < 0.15:  # blur
        image1, image2 = (_blurred(image) for image in (image1, image2))
    if dice.uniform() < 0.5:
        sigma = 8 * dice.uniform() ** 2
        image1, image2 = (
            image + sigma * torch.randn(image.shape, generator=dice.rng)
            for image in (image1, image2)
        )
    return pair._replace(image1=_bytes(image1), image2=_bytes(image2))


@dataclass(frozen=True)
class Scenes:
    """Scenes without end.

    Args:
        split: `train`, `val` or `test`; each has photographs of its own.
    """

    split: str

    def draw(self, index: int, size: tuple[int, int], seed: int = 0) -> Pair:
        """Return pair number `index` of a seed, always the same."""
        dice = Dice(generator("scene", self.split, seed, index))
        return photographed(compose(draw_layers(self.split, size, dice)), dice)

    def first(self, count: int, size: tuple[int, int]) -> list[Pair]:
        """Return the first pairs of seed 0."""
        return [self.draw(k, size) for k in range(count)]


@cache
def _texture(split: str, number: int, halvings: int) -> Tensor:
    """Return a texture (3, H, W) at its size over 2^halvings."""
    if halvings:
        return F.avg_pool2d(_texture(split, number, halvings - 1), 2)
    names = SCENE_PHOTOGRAPHS[split]
    if number < len(names):
        return photograph(names[number]).float()
    return dead_leaves(split, number - len(names))


def _layer(
    split: str, size: tuple[int, int], flow: Tensor, shape: Shape | None, dice: Dice
) -> Layer:
    photos = len(SCENE_PHOTOGRAPHS[split])
    number = dice.below(photos) if dice.uniform() < 0.6 else photos + dice.below(LEAVES)
    scale = 2 ** dice.uniform(log2(_CLOSEST), log2(_FARTHEST))
    halvings = max(0, ceil(log2(scale)))  # before sampling, which blends four pixels only
    texture, scale = _texture(split, number, halvings), scale / 2**halvings
    at = dice.uniform(0, texture.shape[2]), dice.uniform(0, texture.shape[1])
    return Layer(texture, scale, dice.uniform(-pi, pi), at, flow, shape, _colours(dice))


def _colours(dice: Dice) -> Tensor:
    """Return a matrix and a constant: channels in another order, a little mixed, maybe inverted."""
    matrix = torch.eye(3)[torch.randperm(3, generator=dice.rng)]
    matrix = 0.8 * matrix + 0.2 * torch.rand(3, 3, generator=dice.rng) / 1.5
    gain, middle = dice.uniform(0.6, 1.3), 127 + dice.normal(20.0)
    if dice.uniform() < 0.2:
        gain = -gain
    matrix = gain * matrix
    return torch.cat((matrix, (middle - 118 * matrix.sum(1))[:, None]), dim=1)


def _shape(size: tuple[int, int], dice: Dice) -> Shape:
    height, width = size
    side = min(size)
    radius = side * 2 ** dice.uniform(-4.0, -1.2)
    ratio = 2 ** dice.uniform(-0.7, 0.7)
    return Shape(
        (dice.uniform(0, width), dice.uniform(0, height)),
        (radius * ratio, radius / ratio),
        dice.uniform(-pi, pi),
        (1.0, 2.0, 2.0, 6.0)[dice.below(4)],
        (dice.uniform(0, 0.35), dice.uniform(0, 2 * pi), dice.uniform(0, 2 * pi)),
    )


def _bent(size: tuple[int, int], dice: Dice) -> Tensor:
    """Return a turn and a zoom about the middle of the frame, and often a smooth wave."""
    height, width = size
    flow = _tilted(size, ((width - 1) / 2, (height - 1) / 2), dice)
    if dice.uniform() < 0.5:
        noise = torch.randn(1, 2, 4, 5, generator=dice.rng)
        strength = 0.03 * min(size) * dice.uniform() ** 2
        flow = flow + strength * F.interpolate(noise, size=size, mode="bicubic")[0]
    return flow


def _tilted(size: tuple[int, int], centre: tuple[float, float], dice: Dice) -> Tensor:
    """Return a random turn and zoom about a point, as a flow."""
    away = pixel_grid(torch.empty(size))[0] - _point(*centre)
    strength = dice.uniform() ** 2
    return turned(away, 2 ** dice.normal(0.15 * strength), dice.normal(0.12 * strength)) - away


def turned(p: Tensor, scale: float, angle: float) -> Tensor:
    """Return points (2, ...) scaled and turned about the origin."""
    x, y = p
    a, b = scale * cos(angle), scale * sin(angle)
    return torch.stack((a * x - b * y, b * x + a * y))


def _point(x: float, y: float) -> Tensor:
    return torch.tensor([x, y])[:, None, None]


def _blurred(image: Tensor) -> Tensor:
    return F.avg_pool2d(F.pad(image[None], (1, 1, 1, 1), mode="replicate"), 3, stride=1)[0]


def _bytes(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).byte()
