"""Pairs of frames with their flows, for the report."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.flow.colours import flow_to_colour
from deq_zoo.flow.formats import plausible
from deq_zoo.flow.metrics import endpoint_error
from deq_zoo.flow.model import DEQFlow
from deq_zoo.flow.scoring import Sets, kind_of
from deq_zoo.task import Picture, generator

_FIRST, _OTHER = 3, 1  # pairs of the first set and of each other set
_COLUMNS = 5


class Example(NamedTuple):
    """A pair with its true and its predicted flow.

    Args:
        name: the set.
        image1: (3, H, W) bytes.
        image2: the next frame.
        flow: (2, H, W) as predicted, in pixels.
        truth: the true flow.
        valid: (H, W) where the true flow is valid.
    """

    name: str
    image1: Tensor
    image2: Tensor
    flow: Tensor
    truth: Tensor
    valid: Tensor


def draw_examples(model: DEQFlow, sets: Sets) -> list[Example]:
    """Return random pairs of every set with the model's flow, the same ones every time."""
    examples: list[Example] = []
    for name, pairs in sets.items():
        order = torch.randperm(len(pairs), generator=generator("pictures", name)).tolist()
        for k in order[: _OTHER if examples else _FIRST]:
            pair = pairs[k]
            image1, image2 = (image[None].to(model.device) for image in pair[:2])
            out = model((image1, image2), pad=kind_of(pairs).pad)
            flow = out.prediction[0].float().cpu()
            # Extreme flows would leave no contrast to all others.
            valid = pair.valid & plausible(pair.flow)
            examples.append(Example(name, pair.image1, pair.image2, flow, pair.flow, valid))
    return examples


def gallery(examples: Sequence[Example]) -> Picture:
    """Draw both frames, true flow, predicted flow and error, a row for each pair."""
    shape = torch.tensor([tuple(e.valid.shape) for e in examples], dtype=torch.float64)
    tallest = float((shape[:, 0] / shape[:, 1]).max()) if len(examples) else 1.0
    height = (2.3 * tallest + 0.4) * len(examples)
    figure = Figure(figsize=(12.0, max(1.0, height)), layout="constrained")
    for row, example in enumerate(examples):
        _draw_row(figure, example, len(examples), row)
    counts = ", ".join(f"{n} of {name}" for name, n in Counter(e.name for e in examples).items())
    caption = (
        f"Test pairs drawn at random ({counts}). Hue is the direction of a flow and saturation its "
        "length; the colours of a row have one scale, with full saturation at the longest true "
        "flow. The true flow is invalid where it is black; the error is the distance to it."
    )
    return Picture("flows", caption, to_png(figure))


def _draw_row(figure: Figure, example: Example, rows: int, row: int) -> None:
    valid, truth = example.valid, torch.where(example.valid, example.truth, torch.nan)
    longest = max(1.0, _largest(example.truth.square().sum(0).sqrt()[valid], 1.0))
    error = torch.where(valid, endpoint_error(example.flow, example.truth), torch.nan)
    mean = float(error[valid].mean()) if valid.any() else float("nan")
    for column, (title, shown) in enumerate(
        (
            (f"{example.name}: first frame", example.image1),
            ("next frame", example.image2),
            (f"true flow, up to {longest:.1f} px", flow_to_colour(truth, longest)),
            ("predicted flow", flow_to_colour(example.flow, longest)),
        )
    ):
        axes = _add_axes(figure, rows, row, column, title)
        axes.imshow(shown.permute(1, 2, 0).numpy())
    axes = _add_axes(figure, rows, row, _COLUMNS - 1, f"error, mean {mean:.2f} px")
    image = axes.imshow(error.numpy(), cmap="magma", vmin=0, vmax=max(1.0, longest / 2))
    figure.colorbar(image, ax=axes, shrink=0.8, label="px", extend="max")


def _largest(values: Tensor, default: float) -> float:
    return float(values.max()) if values.numel() else default


def _add_axes(figure: Figure, rows: int, row: int, column: int, title: str) -> Any:
    axes = figure.add_subplot(rows, _COLUMNS, _COLUMNS * row + column + 1)
    axes.set_title(title, fontsize=8)
    axes.set_axis_off()
    return axes
