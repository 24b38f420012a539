"""Pictures of a language model: a page that it wrote, and its loss by evaluations of f."""

from __future__ import annotations

import textwrap
from functools import cache
from unicodedata import combining

from matplotlib.figure import Figure
from matplotlib.font_manager import findfont, get_font

from deq_zoo.drawing import to_png
from deq_zoo.lm.reading import StepsCurve
from deq_zoo.task import Picture

_COLUMNS, _LINES = 88, 24


def page(prompt: str, text: str, seed: int) -> Picture:
    """Draw a text that begins with the prompt.

    Args:
        prompt: words of the validation text.
        text: by the model, the prompt included.
        seed: of the random choices.
    """
    drawable = _drawable_characters() | {"\n"}
    clean = "".join(c if c in drawable else "·" for c in text)
    lines = [part for line in clean.split("\n") for part in textwrap.wrap(line, _COLUMNS) or [""]]
    shown = "\n".join(lines[:_LINES])
    figure = Figure(figsize=(8.6, 0.19 * min(len(lines), _LINES) + 0.3))
    figure.text(0.02, 0.97, shown, family="monospace", fontsize=8.5, va="top", parse_math=False)
    words = " ".join(prompt.split())
    caption = (
        f"Text by the model after “{textwrap.shorten(words, 60, placeholder='...')}”, words of "
        f"the validation text; drawn once, with seed {seed}, and not selected."
    )
    return Picture("page", caption, to_png(figure))


@cache
def _drawable_characters() -> frozenset[str]:
    """Return the characters that the font of a page has, without combining ones."""
    font = get_font(findfont("monospace"))
    characters = map(chr, font.get_charmap())
    return frozenset(c for c in characters if c.isprintable() and not combining(c))


def first_words(text: str) -> str:
    """Return the beginning of a text without its last word, which may be cut.

    A text may be cut at its beginning, too: if there is a second paragraph, its first line is
    returned.
    """
    _, blank, rest = text.partition("\n\n")
    line, end, _ = rest.strip().partition("\n")
    if blank and end:
        return line
    text = text.strip()
    return text[: text.rfind(" ")] if " " in text else text


def loss_by_steps(curve: StepsCurve, tolerance: float, budget: int) -> Picture:
    """Draw loss and residual against evaluations of f.

    Args:
        curve: the values.
        tolerance: relative residual at which the solver stops; 0 if it has none.
        budget: evaluations of f that the model is evaluated with.
    """
    figure = Figure(figsize=(8.6, 3.2), layout="constrained")
    left, right = figure.subplots(1, 2)
    left.plot(curve.steps, curve.loss, marker=".", linewidth=1.6)
    left.set(xlabel="evaluations of f", ylabel="loss, nats per token", xscale="log")
    right.plot(curve.steps, curve.residual, marker=".", linewidth=1.6, color="tab:orange")
    right.set(xlabel="evaluations of f", ylabel="relative residual", xscale="log", yscale="log")
    if tolerance:
        right.axhline(tolerance, color="grey", linestyle="--", linewidth=1, label="tolerance")
    for axes in (left, right):
        axes.axvline(budget, color="grey", linestyle=":", linewidth=1, label="budget of evaluation")
        axes.grid(alpha=0.3)
        axes.set_xticks(curve.steps, [str(k) for k in curve.steps])
        axes.set_xticks([], minor=True)
    right.legend(frameon=False, fontsize=8)
    stops = ", or fewer if the tolerance is met" if tolerance else ""
    caption = (
        "Loss (left) and mean relative residual |f(z) - z| / |f(z)| (right) after so many "
        f"evaluations of f{stops}, on the first {curve.tokens:,} tokens of the validation text in "
        "the order of evaluation."
    )
    return Picture("steps", caption, to_png(figure))
