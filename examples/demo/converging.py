"""An equilibrium as it converges: features, answer and residual after every evaluation of f."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.images.labelled import Images
from deq_zoo.images.mnist import mnist_digits
from deq_zoo.mdeq import MDEQClassifier
from deq_zoo.mdeq.augment import normalise
from deq_zoo.task import Picture, generator
from examples.demo.animation import animated
from torchdeq import Anderson, StopRule, reset_norm, solve

_EVALUATIONS = 14
_DIGITS = 250  # test digits that are followed
_MAPS = 12  # features that are shown
_BLUE, _GREY = "#3b6fb6", "#c9c9c9"


class Course(NamedTuple):
    """A batch on its way to the equilibrium, after each of K evaluations.

    Args:
        features: (K, B, C, H, W), the finest of the pyramid.
        chance: (K, B, classes), what the head would answer there.
        residuals: (K, B), relative.
    """

    features: Tensor
    chance: Tensor
    residuals: Tensor


@torch.no_grad()
def follow(model: MDEQClassifier, images: Tensor) -> Course:
    """Return the course of the solve for normalised images (B, C, H, W)."""
    u = model.inject(images)
    reset_norm(model.full_stage)
    pyramids: list[Any] = []

    def f(*z_and_u: Tensor) -> Any:
        out = model.full_stage(*z_and_u)
        pyramids.append(out)
        return out

    stop = StopRule(max_iter=_EVALUATIONS, tol=0.0)
    stats = solve(f, model.start(u), Anderson(), stop, args=(u,), on_failure="ignore").stats
    chance = torch.stack([model.classify(z).softmax(1) for z in pyramids])
    return Course(torch.stack([z[0] for z in pyramids]), chance, stats["rel_trace"].T)


def follow_digits(model: MDEQClassifier) -> tuple[Course, Images]:
    """Return the courses of random test digits, always the same ones, and the digits."""
    digits = mnist_digits("test")
    digits = digits.subset(torch.randperm(len(digits), generator=generator("pictures"))[:_DIGITS])
    return follow(model, normalise(digits.pixels, digits.channels)), digits


def most_surprising(course: Course, labels: Tensor) -> int:
    """Return the image that is right in the end and was wrong longest."""
    right = course.chance.argmax(2) == labels
    return int(torch.where(right[-1], (~right).sum(0), -1).argmax())


def draw(course: Course, image: Tensor, row: int) -> Picture:
    """Draw the course of one image as an animation.

    Args:
        course: of a batch.
        image: (1, H, W) bytes.
        row: of the image in the batch.
    """
    features, chance, residuals = (each[:, row] for each in course)
    shown = features[-1].flatten(1).var(1).topk(_MAPS).indices.sort().values
    caption = (
        "A test digit, twelve feature maps of the state, and what the classifier would answer "
        f"after each of {_EVALUATIONS} evaluations of f, by Anderson acceleration from zero. Of "
        f"{course.chance.shape[1]} test digits it is the one that is right in the end and was "
        "wrong longest."
    )
    frames = _frames(image, _mosaics(features[:, shown]), chance, residuals)
    return Picture("converging", caption, animated(frames, [0.45] * (len(chance) - 1) + [2.5]))


def _mosaics(maps: Tensor) -> Tensor:
    """Return maps (K, 12, H, W) as K pictures of three rows, each map with its own scale."""
    low, high = (pick(maps, (0, 2, 3), keepdim=True) for pick in (torch.amin, torch.amax))
    scaled = torch.nn.functional.pad((maps - low) / (high - low), (1, 1, 1, 1), value=torch.nan)
    rows: Tensor = scaled.unflatten(1, (3, _MAPS // 3))
    return rows.permute(0, 1, 3, 2, 4).flatten(1, 2).flatten(2, 3)


def _frames(image: Tensor, mosaics: Tensor, chance: Tensor, residuals: Tensor) -> Iterator[Figure]:
    """Yield one figure again and again, as it is after each evaluation."""
    figure = Figure(figsize=(9.6, 2.7))
    places = ((0.01, 0.17), (0.21, 0.27), (0.52, 0.2), (0.79, 0.2))  # left edges and widths
    digit, state, answer, residual = (figure.add_axes((x, 0.14, w, 0.7)) for x, w in places)
    digit.imshow(image[0].numpy(), cmap="gray", interpolation="nearest")
    maps = state.imshow(mosaics[0].numpy(), cmap="magma", vmin=0, vmax=1, aspect="auto")
    state.set_title("the state", fontsize=10)
    classes = range(chance.shape[1])
    bars = answer.bar(classes, chance[0].tolist(), color=_GREY)
    answer.set(ylim=(0, 1), xticks=classes, yticks=[])
    (curve,) = residual.semilogy([], [], "o-", color=_BLUE, markersize=3)
    residual.set(xlim=(0.5, _EVALUATIONS + 0.5), ylim=(1e-6, 3))
    residual.set_title("relative residual", fontsize=10)
    for axes in (digit, state):
        axes.set_axis_off()
    for axes in (answer, residual):
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelsize=8)
    for k in range(len(chance)):
        best = int(chance[k].argmax())
        for said, (bar, p) in enumerate(zip(bars, chance[k].tolist(), strict=True)):
            bar.set(height=p, color=_BLUE if said == best else _GREY)
        maps.set_data(mosaics[k].numpy())
        curve.set_data(range(1, k + 2), residuals[: k + 1].tolist())
        digit.set_title(f"evaluation {k + 1}", fontsize=11)
        answer.set_title(f"the answer: {best}", fontsize=10)
        yield figure
