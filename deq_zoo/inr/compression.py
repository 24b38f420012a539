"""A field as a compressed signal: bits per sample, and the PSNR that fewer bits leave."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from copy import deepcopy
from math import prod
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.inr.representation import Representation
from deq_zoo.inr.signal import Signal, psnr, to_brightness

PRECISIONS = ("float32", "float16", "int8")
_MEASURED = 65_536  # samples for a PSNR


class Size(NamedTuple):
    """The size of a model with weights of some precision.

    Args:
        precision: of the weights.
        bytes: of all weights.
        bits_per_sample: of the signal.
        psnr: in dB; None for the model in float32 without the original.
        reference: the PSNR is measured against the `signal`, or against the model in `float32`.
        samples: of the signal at which the PSNR was measured.
    """

    precision: str
    bytes: int
    bits_per_sample: float
    psnr: float | None
    reference: str
    samples: int


def compress(model: Representation, precision: str) -> tuple[Representation, int]:
    """Return a copy whose weights are rounded to a precision, and the bits of all weights.

    int8 rounds square matrices, row by row to 255 levels of the row's largest entry; biases and
    other small weights become float16. Frequencies stay float32: half precision cannot represent
    phases of many turns.
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


def measure_sizes(
    model: Representation,
    evaluate: Callable[[Representation, Tensor], Tensor],
    signal: Signal | None,
    values: Tensor | None = None,
) -> Iterator[Size]:
    """Yield the size of a model in each precision.

    Args:
        model: with a grid.
        evaluate: returns the values (N, c) of a model at samples of its grid.
        signal: the original; without it, PSNR is measured against the model in float32.
        values: of the model at all samples, if they are computed already.
    """
    samples, rows = prod(model.shape), spread_samples(model.shape)
    before = evaluate(model, rows) if values is None else values[rows]
    for precision in PRECISIONS:
        copy, bits = compress(model, precision)
        after = before if precision == "float32" else evaluate(copy, rows)
        quality: float | None = None
        if signal is not None:
            quality = signal.psnr(signal.squared_errors(after, rows))
        elif precision != "float32":
            a, b = (t if model.kind == "audio" else to_brightness(t) for t in (before, after))
            quality = psnr(a, b)
        reference = "float32" if signal is None else "signal"
        yield Size(precision, bits // 8, bits / samples, quality, reference, len(rows))


def spread_samples(shape: tuple[int, ...], most: int = _MEASURED) -> Tensor:
    """Return numbers of at most so many samples of a grid, evenly spread.

    Those of a video are whole frames, at least one.
    """
    size = prod(shape[1:]) if len(shape) == 3 else 1
    n = prod(shape) // size
    count = min(n, max(1, most // size))
    first = torch.arange(count) * n // count
    return (first[:, None] * size + torch.arange(size)).flatten()
