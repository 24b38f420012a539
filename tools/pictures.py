"""Draw the pictures of the README and of the families: `python -m tools.pictures [FAMILY...]`.

Each is a picture that the report of a pretrained model has, or of a run that the command line
names, as `inr=RUN`; they go to `docs/figures/families`. `front` and `maze` are the animations of
the README.
"""

from __future__ import annotations

import argparse
import io
from collections.abc import Callable
from pathlib import Path

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
WIDTH = 900  # pixels
#: The model of each family, and which of its pictures says most.
SHOWN = {
    "mdeq": ("mdeq-digits", "predictions"),
    "flow": ("flow-nano", "flows"),
    "diffusion": ("diffusion-digits", "samples"),
    "inr": ("runs/inr-quick", "fit"),
    "ignn": ("ignn-chains", "chains"),
    "lm": ("lm-reference", "page"),
    "reason": ("reason-6x6", "steps"),
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
    return image.quantize(128, dither=Image.Dither.NONE)  # half the bytes, and no visible change


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
        source, name = SHOWN[family]
        FOLDER.mkdir(parents=True, exist_ok=True)
        draw(run or source, name).save(FOLDER / f"{family}.png", optimize=True)
        print(f"{family}.png: {name} of {run or source}")


if __name__ == "__main__":
    main()
