"""From an image as users have it to classes by name."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from torch import Tensor

from deq_zoo.errors import ZooError
from deq_zoo.images.labelled import Channels
from deq_zoo.images.polarity import ground_of
from deq_zoo.mdeq.augment import center_crop, normalise, resize, resize_shorter


@dataclass(frozen=True)
class Classes:
    """The classes of an image.

    Args:
        label: the likeliest.
        probability: of `label`.
        probabilities: of all classes by name, the likeliest first.
        inverted: whether light and dark were exchanged before the model saw the image.
        drawn: False if a model of drawings was shown an image without ink on an even ground.
    """

    label: str
    probability: float
    probabilities: Mapping[str, float]
    inverted: bool = False
    drawn: bool = True

    @classmethod
    def of(
        cls,
        chance: Tensor,
        names: Sequence[str] | None,
        inverted: bool = False,
        drawn: bool = True,
    ) -> Classes:
        """Return the classes of probabilities (classes,); without names they are numbers."""
        order = chance.argsort(descending=True).tolist()
        found = {str(k) if names is None else names[k]: float(chance[k]) for k in order}
        label = next(iter(found))
        return cls(label, found[label], found, inverted, drawn)


class Prepared(NamedTuple):
    """An image as a network takes it.

    Args:
        pixels: (1, C, H, W).
        inverted: whether light and dark were exchanged.
        drawn: False if the network expects drawings and the image shows none on an even ground.
    """

    pixels: Tensor
    inverted: bool
    drawn: bool


def crop_middle(image: Tensor, side: int) -> Tensor:
    """Return the middle of an image (C, H, W) as ImageNet is evaluated: a square of `side`."""
    return center_crop(resize_shorter(image, side * 256 // 224), side)


def prepare(image: Tensor, facts: Mapping[str, Any]) -> Prepared:
    """Return an image in the form of the training images.

    Args:
        image: (3, H, W) bytes.
        facts: `side`, `mean` and `std` of the training images; `crop`, whether their middle is
            taken; `ground` of drawings, dark or light.
    """
    if "side" not in facts:
        raise ZooError(
            "the model does not know the form of its images: call it with a normalised batch, or "
            "load it from a checkpoint by deq_zoo.load(checkpoint, data_dir=FOLDER)"
        )
    side, channels = facts["side"], Channels(tuple(facts["mean"]), tuple(facts["std"]))
    image = crop_middle(image, side) if facts.get("crop") else resize(image, side, side)
    if len(channels.mean) == 1:
        image = image.float().mean(0, keepdim=True).round().byte()
    expected = facts.get("ground")
    ground = ground_of(image) if expected else None
    inverted = ground not in (None, expected)
    pixels = normalise(255 - image if inverted else image, channels)[None]
    return Prepared(pixels, inverted, not expected or ground is not None)
