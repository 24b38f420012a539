"""Motion between two photographs, by a model that comes trained."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

import deq_zoo
from deq_zoo.flow import DEQFlow
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.metrics import endpoint_error
from deq_zoo.flow.warps import motorcycle
from deq_zoo.task import Picture
from examples.demo.animation import animated_images

MODEL = "flow-nano"
_SHOWN = (1, 2, 3, 4, 6, 9)  # evaluations


class Shown(NamedTuple):
    """The pictures of a pair, and how well its motion was found.

    Args:
        pictures: the frames in turn, the flow as it converges, the true flow.
        error: mean distance to the true flow, in pixels.
        at_rest: that of no motion at all.
    """

    pictures: list[Picture]
    error: float
    at_rest: float


@torch.no_grad()
def show() -> Shown:
    """Return the stereo pair of scikit-image, which no training saw, with its flow."""
    model = deq_zoo.load(MODEL)
    assert isinstance(model, DEQFlow)
    pair = motorcycle(half=True)
    frames = pair.image1[None], pair.image2[None]
    flows = [model(frames, f_max_iter=n).prediction[0] for n in _SHOWN]
    longest = float(pair.flow.square().sum(0).sqrt()[pair.valid].max())
    truth = torch.where(pair.valid, pair.flow, torch.nan)
    colours = [flow_to_colour(each, longest) for each in (*flows, truth)]
    pictures = [
        Picture("frames", "Two photographs of a stereo pair, in turn.", _blink(*pair[:2])),
        Picture(
            "flow",
            f"The motion that {MODEL} finds, after {', '.join(map(str, _SHOWN))} evaluations of f: "
            "hue is the direction, saturation the length.",
            animated_images(colours[:-1], [0.6] * (len(_SHOWN) - 1) + [2.5]),
        ),
        Picture("truth", "The true motion, black where it is not known.", _still(colours[-1])),
    ]
    error, rest = (_error(each, pair.flow, pair.valid) for each in (flows[-1], 0 * flows[-1]))
    return Shown(pictures, error, rest)


def _error(flow: Tensor, truth: Tensor, valid: Tensor) -> float:
    return float(endpoint_error(flow, truth)[valid].mean())


def _blink(*frames: Tensor) -> bytes:
    return animated_images(frames, [0.7] * len(frames))


def _still(image: Tensor) -> bytes:
    return animated_images([image], [1.0])
