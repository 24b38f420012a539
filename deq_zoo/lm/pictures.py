"""What a language model looks like: a page that it wrote, and what its iterations are worth."""

from __future__ import annotations

import textwrap

from matplotlib.figure import Figure

from deq_zoo.lm.reading import StepsCurve
from deq_zoo.report import to_png
from deq_zoo.task import Picture

_COLUMNS, _LINES = 88, 24
_LAST = "\u0530"  # what comes after Latin, Greek and Cyrillic is not in every font


def page(prompt: str, text: str) -> Picture:
    """A text that begins with the prompt."""
    clean = "".join(c if c == "\n" or (c.isprintable() and c < _LAST) else "·" for c in text)
    lines = [part for line in clean.split("\n") for part in textwrap.wrap(line, _COLUMNS) or [""]]
    shown = "\n".join(lines[:_LINES])
    figure = Figure(figsize=(8.6, 0.19 * min(len(lines), _LINES) + 0.3))
    figure.text(0.02, 0.97, shown, family="monospace", fontsize=8.5, va="top", parse_math=False)
    told = prompt if len(prompt) < 60 else prompt[:57] + "..."
    caption = f"Written by the model after “{' '.join(told.split())}”."
    return Picture("page", caption, to_png(figure))


def loss_by_steps(curve: StepsCurve) -> Picture:
    """Loss and residual against evaluations of f."""
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(curve.steps, curve.loss, marker=".", linewidth=1.6)
    left.set(xlabel="evaluations of f", ylabel="loss, nats per token", xscale="log")
    right.plot(curve.steps, curve.residual, marker=".", linewidth=1.6, color="tab:orange")
    right.set(xlabel="evaluations of f", ylabel="relative residual", xscale="log", yscale="log")
    for axes in (left, right):
        axes.grid(alpha=0.3)
        axes.set_xticks(curve.steps, [str(k) for k in curve.steps])
        axes.set_xticks([], minor=True)
    caption = "The loss on held-out text, and how far the state is from a fixed point, by steps."
    return Picture("steps", caption, to_png(figure))
