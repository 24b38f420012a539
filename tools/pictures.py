"""Draw the pictures of the README and of the families: `python -m tools.pictures [FAMILY...]`.

Each is a picture that the report of a pretrained model has, or of a run that the command line
names, as `inr=RUN`; they go to `docs/figures/families`, and the part of each that the README shows
to `small` in it. `front` and `maze` are the animations of the README.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from PIL import Image

import deq_zoo
from deq_zoo.loading import open_model
from deq_zoo.mdeq import MDEQClassifier
from examples.demo.converging import draw as draw_course
from examples.demo.converging import follow_digits, most_surprising
from examples.demo.maze import show as show_maze
from tools.site_pages import DOCS

FOLDER = DOCS / "figures" / "families"
SMALL = FOLDER / "small"
WIDTH = 900  # pixels
_SMALL_WIDTH = 440  # twice as many as in the README, for screens of high resolution


class Shown(NamedTuple):
    """What a family shows.

    Args:
        source: a model or a run of the family.
        picture: the one of its report that says most.
        part: left, top, right and bottom of what the README shows of it, as shares.
    """

    source: str
    picture: str
    part: tuple[float, float, float, float] = (0, 0, 1, 1)


SHOWN = {
    "mdeq": Shown("mdeq-digits", "predictions", (0, 0, 0.5, 0.66)),
    "flow": Shown("flow-nano", "flows", (0, 0.25, 0.74, 0.75)),
    "diffusion": Shown("diffusion-digits", "samples", (0.2, 0, 1, 1)),
    "inr": Shown("runs/inr-quick", "fit", (0, 0, 1, 0.5)),
    "ignn": Shown("ignn-chains", "chains"),
    "lm": Shown("lm-reference", "page"),
    "reason": Shown("reason-6x6", "steps", (0, 0, 0.43, 1)),
}


def draw(source: str, name: str) -> Image.Image:
    """Return a picture of the report of a model, no wider than `WIDTH`.

    Args:
        source: a pretrained model or a run.
        name: of the picture.
    """
    model, preset = open_model(Path(source))
    with torch.random.fork_rng(devices=[]):
        pictures = {each.name: each.png for each in preset.task.pictures(model)}
    if name not in pictures:
        raise SystemExit(f"{source} has the pictures {', '.join(pictures)}, not {name}")
    image = Image.open(io.BytesIO(pictures[name])).convert("RGB")
    image.thumbnail((WIDTH, WIDTH))
    return _fewer_colours(image)


def shrink(image: Image.Image, part: tuple[float, float, float, float]) -> Image.Image:
    """Return a part of a picture, see `Shown`, as small as the README shows it."""
    (left, top, right, bottom), (width, height) = part, image.size
    box = round(left * width), round(top * height), round(right * width), round(bottom * height)
    small = image.convert("RGB").crop(box)
    small.thumbnail((_SMALL_WIDTH, _SMALL_WIDTH))
    return _fewer_colours(small)


def _fewer_colours(image: Image.Image) -> Image.Image:
    """Return a picture of half the bytes without a visible change."""
    return image.quantize(128, dither=Image.Dither.NONE)


def animate_digit() -> bytes:
    """Return a digit on its way to the equilibrium of a pretrained classifier, as an animation."""
    classifier = deq_zoo.load("mdeq-digits")
    assert isinstance(classifier, MDEQClassifier)
    course, digits = follow_digits(classifier)
    row = most_surprising(course, digits.labels)
    return draw_course(course, digits.pixels[row], row).png


#: The animations of the README.
ANIMATED: dict[str, Callable[[], bytes]] = {
    "front": animate_digit,
    "maze": lambda: show_maze().picture.png,
}


def main() -> None:
    """Draw all pictures, or some."""
    parser = argparse.ArgumentParser(description=__doc__)
    names = [*ANIMATED, *SHOWN]
    parser.add_argument("families", nargs="*", metavar="FAMILY[=RUN]", default=names)
    for each in parser.parse_args().families:
        family, _, run = each.partition("=")
        if family in ANIMATED:
            if run:
                raise SystemExit(f"{family} shows a pretrained model, not {run}")
            (DOCS / "figures" / f"{family}.png").write_bytes(ANIMATED[family]())
            continue
        if family not in SHOWN:
            raise SystemExit(f"there is no family {family}: {', '.join(names)}")
        shown = SHOWN[family]
        source = run or shown.source
        SMALL.mkdir(parents=True, exist_ok=True)
        picture = draw(source, shown.picture)
        picture.save(FOLDER / f"{family}.png", optimize=True)
        shrink(picture, shown.part).save(SMALL / f"{family}.png", optimize=True)
        print(f"{family}.png: {shown.picture} of {source}")


if __name__ == "__main__":
    main()
