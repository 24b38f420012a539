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


def compressed(model: Representation, precision: str) -> tuple[Representation, int]:
    """A copy whose weights went through fewer bits, and how many those are in all.

    int8 rounds square matrices, row by row to 255 levels of the row's largest entry; frequencies,
    biases and everything small stay float16, since a field's frequencies need their digits.
    """
    if precision not in PRECISIONS:
        raise ValueError(f"precision is one of {', '.join(PRECISIONS)}, got {precision!r}")
    copy, bits = deepcopy(model), 0
    for p in copy.field.parameters():
        if precision == "float32":
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
    model: Representation, render: Callable[[Representation], Tensor], signal: Signal | None
) -> Iterator[str]:
    """A line for each precision: bits per sample, and PSNR at the signal's own size.

    Args:
        model: what was trained.
        render: gives values at that size.
        signal: the original; without it PSNR is beside the model in float32.
    """
    try:
        samples = prod(model.shape)
    except ZooError:
        return
    unit = {"image": "pixel", "video": "pixel", "audio": "sample"}[model.kind]
    whole = render(model)
    for precision in PRECISIONS:
        copy, bits = compressed(model, precision)
        if signal is not None:
            rows = torch.arange(samples)
            values = whole if precision == "float32" else render(copy)
            error = signal.squared_errors(values.flatten(0, -2), rows)
            told = f"PSNR {signal.psnr(error):.2f} dB"
        elif precision == "float32":
            told = "the original is not at hand"
        else:
            a, b = (t if model.kind == "audio" else shown(t) for t in (whole, render(copy)))
            told = f"PSNR {psnr(a, b):.2f} dB from float32"
        yield f"{precision}: {bits // 8:,} bytes, {bits / samples:.3g} bits per {unit}, {told}"
