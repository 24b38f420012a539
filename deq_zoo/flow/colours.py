"""Flow in colour, by the wheel of the Middlebury benchmark, and pictures for the report."""

from __future__ import annotations

from collections.abc import Sequence
from math import pi
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.flow.formats import known_flow
from deq_zoo.report import to_png
from deq_zoo.task import Picture

# Entries of each sixth of the wheel, and which channel (red, green, blue) rises or falls in it.
_SEGMENTS = ((15, 1, True), (6, 0, False), (4, 2, True), (11, 1, False), (13, 0, True))
_LAST = (6, 2, False)


def colour_wheel() -> Tensor:
    """(55, 3): red, yellow, green, cyan, blue, magenta and back, from 0 to 255."""
    colour = torch.tensor([255.0, 0.0, 0.0])
    entries = []
    for count, channel, rises in (*_SEGMENTS, _LAST):
        for k in range(count):
            ramp = (255 * k) // count
            colour[channel] = ramp if rises else 255 - ramp
            entries.append(colour.clone())
        colour[channel] = 255 if rises else 0
    return torch.stack(entries)


def flow_to_colour(flow: Tensor, largest: float | None = None) -> Tensor:
    """A flow (2, H, W) as an image (3, H, W) of bytes: hue is direction, saturation is length.

    Args:
        flow: NaN, infinities and Middlebury's mark of an unknown flow are black.
        largest: length that gets full saturation; longer flows are dark. By default the longest.
    """
    if flow.dim() != 3 or flow.shape[0] != 2:
        raise ValueError(f"a flow is (2, height, width), got {tuple(flow.shape)}")
    known = known_flow(flow)
    u, v = torch.where(known, flow, 0).double().cpu()
    length = (u.square() + v.square()).sqrt()
    most = float(length.max()) if largest is None and length.numel() else largest or 0.0
    radius = length / (most + 1e-5)
    wheel = colour_wheel().double() / 255
    place = (torch.atan2(-v, -u) / pi + 1) / 2 * (len(wheel) - 1)
    low = place.floor().long()
    high = (low + 1) % len(wheel)
    colour = torch.lerp(wheel[low], wheel[high], (place - low)[..., None])  # (H, W, 3)
    inside = 1 - radius[..., None] * (1 - colour)
    colour = torch.where(radius[..., None] <= 1, inside, 0.75 * colour)
    colour = torch.where(known.cpu()[..., None], colour, 0)
    return (255 * colour).floor().byte().permute(2, 0, 1)


class Example(NamedTuple):
    """A pair with what was found; images are bytes (3, H, W), flows (2, H, W)."""

    name: str
    image1: Tensor
    image2: Tensor
    flow: Tensor
    truth: Tensor
    valid: Tensor


def gallery(examples: Sequence[Example]) -> Picture:
    """Both frames, the true flow, the one that was found, and its error, a row for each pair."""
    from deq_zoo.flow.metrics import endpoint_error

    shape = torch.tensor([tuple(e.valid.shape) for e in examples], dtype=torch.float64)
    tallest = float((shape[:, 0] / shape[:, 1]).max()) if len(examples) else 1.0
    height = (2.3 * tallest + 0.4) * len(examples)
    figure = Figure(figsize=(12.0, max(1.0, height)), layout="constrained")
    for row, e in enumerate(examples):
        truth = torch.where(e.valid, e.truth, torch.nan)
        known = e.truth[:, e.valid]
        largest = float(known.square().sum(0).sqrt().max()) if known.numel() else 1.0
        error = torch.where(e.valid, endpoint_error(e.flow, e.truth), torch.nan)
        mean = float(error[e.valid].mean()) if known.numel() else float("nan")
        for column, (title, shown) in enumerate(
            (
                (e.name, e.image1),
                ("next frame", e.image2),
                ("true flow", flow_to_colour(truth, largest)),
                ("found", flow_to_colour(e.flow, largest)),
            )
        ):
            axes = figure.add_subplot(len(examples), 5, 5 * row + column + 1)
            axes.imshow(shown.permute(1, 2, 0).numpy())
            axes.set_title(title, fontsize=9)
            axes.set_axis_off()
        axes = figure.add_subplot(len(examples), 5, 5 * row + 5)
        image = axes.imshow(error.numpy(), cmap="magma", vmin=0, vmax=max(1.0, largest / 2))
        axes.set_title(f"error {mean:.2f} px", fontsize=9)
        axes.set_axis_off()
        figure.colorbar(image, ax=axes, shrink=0.8)
    caption = "Held-out pairs: hue is the direction of the flow, saturation its length."
    return Picture("flows", caption, to_png(figure))
