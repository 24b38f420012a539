"""A field as a compressed signal: bits per sample, and what fewer bits cost."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from math import prod

import torch
from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import Signal, psnr, shown

PRECISIONS = ("float32", "float16", "int8")
_MEASURED = 65_536  # samples by which PSNR is told


def compressed(model: Representation, precision: str) -> tuple[Representation, int]:
    """A copy whose weights went through fewer bits, and how many those are in all.

    int8 rounds square matrices, row by row to 255 levels of the row's largest entry; biases and
    everything small stay float16. Frequencies stay float32: times a coordinate they make a phase of
    many turns, of which half precision would leave nothing.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")
    copy, bits = deepcopy(model), 0
    for name, p in copy.field.named_parameters():
        if precision == "float32" or name.startswith("injection.x_map."):
            bits += 32 * p.numel()
        elif precision == "int8" and p.dim() == 2 and p.shape[0] == p.shape[1]:
            step = p.detach().abs().amax(1, keepdim=True).clamp_min(1e-12) / 127
            step = step.half().to(p.dtype).clamp_min(1e-7)
            p.data = (p.detach() / step).round().clamp(-127, 127) * step
            bits += 8 * p.numel() + 16 * len(p)
        else:
            p.data = p.detach().half().to(p.dtype)
            bits += 16 * p.numel()
    return copy, bits


def sizes(
    model: Representation,
    at: Callable[[Representation, Tensor], Tensor],
    signal: Signal | None,
    known: Tensor | None = None,
) -> Iterator[str]:
    """A line for each precision: bits per sample, and PSNR at some of the signal's samples.

    Args:
        model: what was trained.
        at: gives values (N, c) of a model at samples of the signal's grid.
        signal: the original; without it PSNR is beside the model in float32.
        known: values of the model at all samples, if they have been computed.
    """
    try:
        samples, rows = prod(model.shape), measured(model.shape)
    except ZooError:
        return
    unit = {"image": "pixel", "video": "pixel", "audio": "sample"}[model.kind]
    if len(rows) < samples:
        yield f"PSNR is measured at {len(rows):,} of {samples:,} {unit}s, evenly spread"
    before = at(model, rows) if known is None else known[rows]
    for precision in PRECISIONS:
        copy, bits = compressed(model, precision)
        values = before if precision == "float32" else at(copy, rows)
        if signal is not None:
            told = f"PSNR {signal.psnr(signal.squared_errors(values, rows)):.2f} dB"
        elif precision == "float32":
            told = "the original is not at hand"
        else:
            a, b = (t if model.kind == "audio" else shown(t) for t in (before, values))
            told = f"PSNR {psnr(a, b):.2f} dB from float32"
        yield f"{precision}: {bits // 8:,} bytes, {bits / samples:.3g} bits per {unit}, {told}"


def measured(shape: tuple[int, ...], most: int = _MEASURED) -> Tensor:
    """Samples of a grid, evenly spread and at most so many; of a video whole frames, at least one.

    Args:
        shape: of the grid.
        most: samples.
    """
    size = prod(shape[1:]) if len(shape) == 3 else 1
    n = prod(shape) // size
    count = min(n, max(1, most // size))
    first = torch.arange(count) * n // count
    return (first[:, None] * size + torch.arange(size)).flatten()
