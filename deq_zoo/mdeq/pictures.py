"""Images with the classes that a network gives them."""

from __future__ import annotations

from collections.abc import Sequence

from matplotlib.figure import Figure
from torch import Tensor

from deq_zoo.drawing import to_png
from deq_zoo.task import Picture

_COLUMNS = 8


def gallery(images: Tensor, chance: Tensor, labels: Tensor, classes: Sequence[str]) -> Picture:
    """Draw a grid of images with the predicted class of each.

    Args:
        images: (n, C, H, W) bytes.
        chance: (n, classes) probabilities.
        labels: (n,) the right classes.
        classes: their names.
    """
    rows = -(-len(images) // _COLUMNS)
    figure = Figure(figsize=(_COLUMNS * 1.35, rows * 1.6), layout="constrained")
    for k, (image, p, label) in enumerate(zip(images, chance, labels, strict=True)):
        axes = figure.add_subplot(rows, _COLUMNS, k + 1)
        axes.imshow(image.permute(1, 2, 0).numpy(), cmap="gray", interpolation="nearest")
        axes.set_axis_off()
        said, true = int(p.argmax()), int(label)
        text = f"{classes[said]} {100 * float(p[said]):.0f} %"
        if said != true:
            text += f"\nis {classes[true]}"
        axes.set_title(text, fontsize=8, color="black" if said == true else "crimson")
    right = int((chance.argmax(1) == labels).sum())
    caption = (
        f"{len(images)} test images drawn at random, {right} of them right: the predicted class "
        "with its probability; mistakes are red, with the true class below."
    )
    return Picture("predictions", caption, to_png(figure))
