"""Pairs of frames with their flows, for the report."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.metrics import endpoint_error
from deq_zoo.task import Picture


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
