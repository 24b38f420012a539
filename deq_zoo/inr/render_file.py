"""A field at any resolution, of any part of its signal: as a tensor, or as a file."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.inr.compression import Size, measure_sizes
from deq_zoo.inr.evaluation import evaluate_blocks
from deq_zoo.inr.rendering import Rendering, choose_rate, choose_shape
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import NAMES, Signal
from deq_zoo.inr.writers import SUFFIXES, encode_signal
from deq_zoo.output import unsettled
from deq_zoo.predictions import OutFolder, Prediction


def render(model: Representation, options: Rendering | None = None, **changes: Any) -> Tensor:
    """Return the values (..., c) of a signal on a grid, from -1 to 1, on the CPU.

    Args:
        model: the signal.
        options: resolution and region.
        **changes: options of `Rendering` as keywords instead, e.g. `render(model, scale=4)`.
    """
    if options is not None and changes:
        raise TypeError(f"give a Rendering or keywords, not both: got {', '.join(changes)} too")
    return model.predict(Rendering(**changes) if options is None else options).prediction


def write_rendering(
    model: Representation, options: Rendering, out: OutFolder, signal: Signal | None
) -> Iterator[Prediction]:
    """Render into a file and yield it; then yield the size of the model in each precision.

    Args:
        model: the signal as a field.
        options: resolution, region and format.
        out: the folder.
        signal: the original, if its data is there, for the PSNR.
    """
    suffixes = SUFFIXES[model.kind]
    suffix = f".{options.format.lower().lstrip('.')}" if options.format else suffixes[0]
    if suffix not in suffixes:
        raise ZooError(
            f"{NAMES[model.kind]} is written as {' or '.join(suffixes)}, not as {suffix}"
        )
    name, rate = f"{model.kind}{suffix}", choose_rate(model, options)
    shape = choose_shape(model, options)
    out.check([name])
    result = model.predict(options)
    try:
        content = encode_signal(name, result.prediction, rate)
    except ValueError as error:
        raise ZooError(str(error)) from None
    path = out.write(name, content)
    doubt = unsettled(result.stats)
    notes = f" ({doubt}; statistics of evenly spread points)" if doubt else ""
    text = f"{path}: {' x '.join(map(str, shape))} samples{notes}"
    yield Prediction(name, text, {"shape": list(shape), "rate": rate, "warning": doubt}, (path,))
    if model.grid is None:
        return
    whole = shape == model.shape and not options.region
    values = result.prediction.flatten(0, -2) if whole else None
    same_grid = signal is not None and signal.shape == model.shape
    for size in measure_sizes(model, _evaluate, signal if same_grid else None, values):
        yield Prediction(size.precision, _describe(size, model), size._asdict())


@torch.no_grad()
def _evaluate(model: Representation, rows: Tensor) -> Tensor:
    """Return the values (N, c) at samples of the model's own grid, on the CPU."""
    outputs = evaluate_blocks(model.field.eval(), model.shape, rows, model.block)
    return torch.cat([out.prediction.float().cpu() for out in outputs])


def _describe(size: Size, model: Representation) -> str:
    unit = {"image": "pixel", "video": "pixel", "audio": "sample"}[model.kind]
    if size.psnr is None:
        quality = "no PSNR, for the data of the original is not there"
    else:
        quality = f"PSNR {size.psnr:.2f} dB"
        quality += " against float32" if size.reference == "float32" else ""
        quality += f" at {size.samples:,} {unit}s"
    return (
        f"{size.precision}: {size.bytes:,} bytes, {size.bits_per_sample:.3g} bits per {unit}, "
        f"{quality}"
    )
