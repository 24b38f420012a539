r"""Pairs with an exact flow from photographs that come with scikit-image and scikit-learn.

`warped_pair` draws a smooth flow F and reads both frames off a photograph P through a similarity A:

$$I_2(y) = P(A y), \qquad I_1(x) = P(A (x + F(x)))$$

so that $I_2(x + F(x)) = I_1(x)$ at every pixel: no occlusion, no blending of the truth.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from math import ceil, cos, log2, pi, sin
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.flow.augment import Pair
from deq_zoo.flow.config import STRIDE
from deq_zoo.flow.layers import pixel_grid
from deq_zoo.images import photographs
from deq_zoo.packages import optional
from deq_zoo.task import generator

#: The photographs of each split; no photograph belongs to two. Those of validation are the three on
#: which Lucas-Kanade errs least: periodic bricks and black sky do not show how they move.
PHOTOGRAPHS = {
    "train": (
        *("astronaut", "rocket", "immunohistochemistry"),
        *("china", "camera", "gravel", "coins"),
    ),
    "val": ("clock", "moon", "cell"),
    "test": ("coffee", "chelsea", "flower"),
}


@cache
def photograph(name: str) -> Tensor:
    """Return the pixels (3, H, W) of a photograph, as bytes; some photographs are grey."""
    return photographs.photograph(name).permute(2, 0, 1).contiguous().expand(3, -1, -1)


@dataclass(frozen=True)
class Motion:
    """A distribution of smooth flows, in pixels of the frame.

    Args:
        shift: standard deviation of the mean flow, along each axis.
        turn: standard deviation of the rotation, in radians.
        zoom: standard deviation of the scale's logarithm to base 2.
        wave: standard deviation of smooth fields, at three scales together.
    """

    shift: float = 5.0
    turn: float = 0.05
    zoom: float = 0.05
    wave: float = 2.0

    def draw(self, height: int, width: int, rng: torch.Generator) -> Tensor:
        """Return a random flow (2, height, width)."""
        grid = pixel_grid(torch.empty(height, width))[0]
        centre = torch.tensor([width - 1, height - 1])[:, None, None] / 2
        a, b, u, v = torch.randn(4, generator=rng).tolist()
        scale, angle = 2 ** (self.zoom * a), self.turn * b
        turned = _turned(grid - centre, scale, angle)
        flow = turned + centre - grid + self.shift * torch.tensor([u, v])[:, None, None]
        for cells in (2, 4, 8):
            noise = torch.randn(1, 2, cells + 3, cells + 3, generator=rng)
            smooth = F.interpolate(noise, size=(2 * height, 2 * width), mode="bicubic")
            top, left = height // 2, width // 2
            part = smooth[0, :, top : top + height, left : left + width]
            flow = flow + self.wave / 3**0.5 * 2 / cells**0.5 * part
        return flow


def warped_pair(photo: Tensor, size: tuple[int, int], motion: Motion, rng: torch.Generator) -> Pair:
    """Return a random pair of frames of `size` from a photograph (3, H, W) of bytes."""
    height, width = size
    flow = motion.draw(height, width, rng)
    grid = pixel_grid(flow)[0]
    a, b, c, d = torch.rand(4, generator=rng).tolist()
    # Photo pixels per pixel of the frame: mostly many, since a close look shows no texture.
    reach = 0.8 * min(photo.shape[1] / height, photo.shape[2] / width)
    scale, angle = max(0.5, reach) ** (0.4 + 0.6 * a), (b - 0.5) * pi / 3
    halvings = max(0, ceil(log2(scale)))  # before sampling, which blends four pixels only
    photo, scale = F.avg_pool2d(photo.float(), 2**halvings), scale / 2**halvings
    H, W = photo.shape[1:]
    centre = torch.tensor([width - 1, height - 1])[:, None, None] / 2
    margin = 0.5 * max(height, width) * scale
    at = torch.tensor([_between(c, W, margin), _between(d, H, margin)])[:, None, None]

    def view(p: Tensor) -> Tensor:
        return sample(photo, _turned(p - centre, scale, angle) + at)

    image1, image2 = view(grid + flow), view(grid)
    return Pair(_bytes(image1), _bytes(image2), flow, unfolded(flow))


def unfolded(flow: Tensor) -> Tensor:
    """Return (H, W): where a flow (2, H, W) stays in the frame and does not fold it over."""
    height, width = flow.shape[1:]
    x, y = pixel_grid(flow)[0] + flow
    inside = (x >= 0) & (x <= width - 1) & (y >= 0) & (y <= height - 1)
    (u_y, u_x), (v_y, v_x) = (torch.gradient(each) for each in flow)
    stays: Tensor = inside & ((1 + u_x) * (1 + v_y) - u_y * v_x > 0.2)
    return stays


def sample(image: Tensor, at: Tensor) -> Tensor:
    """Return an image (C, H, W) at pixels (2, h, w), bilinear, mirrored outside."""
    H, W = image.shape[1:]
    size = torch.tensor([W, H])[:, None, None]
    where = ((2 * at + 1) / size - 1).permute(1, 2, 0)[None]
    return F.grid_sample(
        image[None].float(), where, padding_mode="reflection", align_corners=False
    )[0]


def near_flow(flow: Tensor, error: float, rng: torch.Generator) -> Tensor:
    """Return a flow (2, H, W) with a random error, on the grid of the model (2, H / 8, W / 8).

    Args:
        flow: in pixels.
        error: standard deviation of its constant part, in pixels; a smooth part has half of it.
        rng: draws the error.
    """
    true = F.avg_pool2d(flow, STRIDE)
    noise = torch.randn(1, 2, 3, 4, generator=rng)
    bend = F.interpolate(noise, size=true.shape[1:], mode="bilinear")[0]
    return (true + error * (torch.randn(2, 1, 1, generator=rng) + 0.5 * bend)) / STRIDE


@dataclass(frozen=True)
class Warps:
    """Warped photographs without end.

    Args:
        split: `train`, `val` or `test`; each has photographs of its own.
        size: height and width of the frames.
        motion: the distribution of the flows.
    """

    split: str
    size: tuple[int, int]
    motion: Motion

    def draw(self, index: int, seed: int = 0) -> Pair:
        """Return pair number `index` of a seed, always the same."""
        names = PHOTOGRAPHS[self.split]
        rng = generator("warp", self.split, seed, index)
        return warped_pair(photograph(names[index % len(names)]), self.size, self.motion, rng)

    def first(self, count: int) -> list[Pair]:
        """Return the first pairs of seed 0."""
        return [self.draw(k) for k in range(count)]


def motorcycle(half: bool = False) -> Pair:
    """Return the stereo pair of scikit-image, with its true disparity as a flow to the left.

    Args:
        half: return it at half the size, where the largest flow is 30 pixels.
    """
    left, right, disparity = optional("skimage.data", "flow", "stereo pairs").stereo_motorcycle()
    valid = torch.tensor(disparity).isfinite()
    d = torch.where(valid, torch.tensor(disparity), 0).float()
    flow = torch.stack((-d, torch.zeros_like(d)))
    image1, image2 = (torch.tensor(each).permute(2, 0, 1) for each in (left, right))
    pair = Pair(image1.contiguous(), image2.contiguous(), flow, valid)
    if not half:
        return pair
    rows, columns = (2 * (n // 2) for n in valid.shape)
    image1, image2 = (
        F.avg_pool2d(each[None, :, :rows, :columns].float(), 2)[0] for each in pair[:2]
    )
    flow = pair.flow[:, :rows:2, :columns:2] / 2
    return Pair(_bytes(image1), _bytes(image2), flow, valid[:rows:2, :columns:2])


def synthetic_video(
    frames: int,
    size: tuple[int, int],
    name: str = "coffee",
    speed: float = 1.5,
    reach: float = 20.0,
    seed: int = 0,
) -> tuple[list[Tensor], list[Tensor]]:
    """Return frames of a camera that moves over a photograph, and the flows between them.

    Frame k is $P(A_k x)$ with affine $A_k$, so the flow is
    $A_{k+1}^{-1} A_k x - x$, exactly.

    Args:
        frames: their number.
        size: height and width of a frame.
        name: the photograph.
        speed: most pixels of the photograph that the camera moves per frame along an axis.
        reach: distance from the middle where the camera turns back; the larger, the steadier.
        seed: draws the path.
    """
    if frames < 2:
        raise ZooError(f"a video needs two frames, got {frames}")
    photo, rng = photograph(name), generator("video", name, seed)
    path = _Path(2 * pi * torch.rand(4, generator=rng), speed, reach)
    height, width = size
    grid = pixel_grid(torch.empty(height, width))[0]
    centre = torch.tensor([width - 1, height - 1])[:, None, None] / 2
    middle = torch.tensor([photo.shape[2] - 1, photo.shape[1] - 1])[:, None, None] / 2

    def view(k: int) -> Tensor:
        scale, angle, drift = path.pose(k)
        return _bytes(sample(photo, _turned(grid - centre, scale, angle) + middle + drift))

    flows = []
    for k in range(frames - 1):
        (s1, a1, d1), (s2, a2, d2) = path.pose(k), path.pose(k + 1)
        there = _turned(_turned(grid - centre, s1, a1) + d1 - d2, 1 / s2, -a2)
        flows.append(there + centre - grid)
    return [view(k) for k in range(frames)], flows


class _Path(NamedTuple):
    """The path of a camera: sines of four phases; for `speed` and `reach` see `synthetic_video`."""

    phase: Tensor
    speed: float
    reach: float

    def pose(self, k: int) -> tuple[float, float, Tensor]:
        """Return scale, angle and place (2, 1, 1) at frame k."""
        t, (a, b, c, d) = k * self.speed / self.reach, self.phase.tolist()
        scale = 0.8 * 2 ** (0.15 * sin(t + a))
        angle = 0.15 * sin(0.7 * t + b)
        drift = self.reach * torch.tensor([sin(t + c), cos(0.8 * t + d)])
        return scale, angle, drift[:, None, None]


def _turned(p: Tensor, scale: float, angle: float) -> Tensor:
    x, y = p
    a, b = scale * cos(angle), scale * sin(angle)
    return torch.stack((a * x - b * y, b * x + a * y))


def _between(share: float, size: int, margin: float) -> float:
    """Return a place that keeps a margin, or the middle if there is no room for a margin."""
    room = size - 1 - 2 * margin
    return margin + share * room if room > 0 else (size - 1) / 2


def _bytes(image: Tensor) -> Tensor:
    return image.round().clamp(0, 255).byte()
