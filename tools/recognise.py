"""Does a classifier recognise what the denoiser draws? `python -m tools.recognise [--out FOLDER]`

`mdeq-digits` reads samples of `diffusion-digits`, reconstructions of inverted test digits, and
digits on the way between two of them. The results go into the card of `diffusion-digits`.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

import deq_zoo
from deq_zoo.diffusion.data import scaled, to_bytes
from deq_zoo.diffusion.grid import as_png, montage
from deq_zoo.diffusion.inversion import interpolate, invert
from deq_zoo.diffusion.plan import draw_noise
from deq_zoo.images.labelled import Images
from deq_zoo.images.mnist import mnist_digits
from deq_zoo.pretrained import pretrained_card
from deq_zoo.task import generator
from tools.pretrain import write_card

COMMAND = "python -m tools.recognise"
DENOISER, CLASSIFIER = "diffusion-digits", "mdeq-digits"
SAMPLES = 256
SURE = 0.9  # probability of a digit that counts as recognised
INVERTED = 1  # test digits of each class
#: Chains that draw samples: the model's own, and the noisy one that its card recommends.
CHAINS: tuple[dict[str, Any], ...] = ({}, {"eta": 1.0, "steps": 250})


class Read(NamedTuple):
    """What a classifier reads in pictures: (n,) digits and their probabilities."""

    digits: Tensor
    chance: Tensor

    @property
    def sure(self) -> Tensor:
        """Return whether each picture is recognised."""
        return self.chance > SURE


def read(classifier: Any, pictures: Tensor) -> Read:
    """Return the likeliest digits in pictures (n, 1, 28, 28) in [-1, 1]."""
    found = [classifier.predict(each).prediction for each in to_bytes(pictures)]
    digits = torch.tensor([int(each.label) for each in found])
    return Read(digits, torch.tensor([each.probability for each in found]))


@torch.no_grad()
def sample(denoiser: Any, n: int, chain: Mapping[str, Any], seed: int = 0) -> Tensor:
    """Return the samples of `deq-zoo sample`, computed step by step: (n, 1, 28, 28)."""
    plan, size = denoiser.plan, denoiser.config.size
    steps = replace(plan, chain=replace(plan.chain, **chain)).make_chain(denoiser)
    x, noise = draw_noise(steps, (n, denoiser.config.channels, size, size), seed, denoiser)
    images: Tensor = steps.sequential(x, noise)
    return images


def some_of_each(digits: Images, n: int) -> Images:
    """Return the first images of every class."""
    rows = [torch.nonzero(digits.labels == digit).flatten()[:n] for digit in range(10)]
    return digits.subset(torch.cat(rows))


def measure_samples(
    denoiser: Any, classifier: Any, chain: Mapping[str, Any]
) -> tuple[dict[str, Any], Tensor]:
    """Return how many samples are recognised, and the samples."""
    images = sample(denoiser, SAMPLES, chain)
    return {"samples": SAMPLES, **recognised(read(classifier, images))}, images


def recognised(found: Read) -> dict[str, Any]:
    """Return how many pictures are recognised, and as which digits."""
    counts = torch.bincount(found.digits[found.sure], minlength=10).tolist()
    return {
        f"called one digit with probability above {SURE}, %": 100
        * float(found.sure.float().mean()),
        "different digits among these": sum(count > 0 for count in counts),
        "of each digit, 0 to 9": ", ".join(map(str, counts)),
    }


def measure_digits(classifier: Any) -> dict[str, Any]:
    """Return how many test digits are recognised: what samples can hope for."""
    digits = mnist_digits("test")
    rows = torch.randperm(len(digits), generator=generator("recognise"))[:SAMPLES]
    return {"digits": SAMPLES, **recognised(read(classifier, scaled(digits.pixels[rows])))}


def measure_editing(denoiser: Any, classifier: Any) -> tuple[dict[str, Any], Tensor]:
    """Return how well test digits are inverted and mixed, and rows of pictures of both."""
    plan, data = denoiser.plan, some_of_each(mnist_digits("test"), INVERTED)
    chain, images = plan.make_chain(denoiser), scaled(data.pixels)
    # On one thread the chain step by step is the fastest; evaluations invert by the equilibrium.
    how = plan.inversion
    inversion = invert(chain, images, method="sequential", steps=how.steps, lr=how.lr)
    again = read(classifier, inversion.images)
    other = inversion.noise.roll(INVERTED, 0)  # the next digit
    with torch.no_grad():
        mixed = chain.sequential(interpolate(inversion.noise, other, 3)[1])
    between = read(classifier, mixed)
    return {
        "inverted test digits": len(images),
        "mean PSNR of their reconstructions, dB": float(inversion.psnr.mean()),
        "reconstructions read as the digit, %": 100
        * float((again.digits == data.labels).float().mean()),
        "digits half-way to the next one, recognised, %": 100 * float(between.sure.float().mean()),
    }, torch.cat((images, inversion.images, mixed))


def main() -> None:
    """Measure, write the card again and, with `--out`, pictures."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="folder for pictures")
    args = parser.parse_args()
    denoiser, classifier = deq_zoo.load(DENOISER), deq_zoo.load(CLASSIFIER)
    measured, drawn = dict[str, dict[str, Any]](), dict[str, Tensor]()
    for chain in CHAINS:
        options = "".join(f" --{name} {value:g}" for name, value in chain.items())
        options += " --solver sequential" if chain else ""  # for noisy chains the fastest
        title = f"`deq-zoo sample {DENOISER}{options}`, read by `{CLASSIFIER}`"
        measured[title], drawn[title] = measure_samples(denoiser, classifier, chain)
    measured[f"Test digits, read by `{CLASSIFIER}`"] = measure_digits(classifier)
    measured["Inversion and mixing"], rows = measure_editing(denoiser, classifier)
    card = pretrained_card(DENOISER)
    commands = tuple(dict.fromkeys((*card.commands, COMMAND)))  # once, however often it runs
    write_card(replace(card, measured=measured, commands=commands))
    for title, values in measured.items():
        print(title, values)
    if args.out is not None:
        args.out.mkdir(parents=True, exist_ok=True)
        for k, images in enumerate(drawn.values()):
            (args.out / f"samples-{k}.png").write_bytes(as_png(montage(images[:128], 16)))
        (args.out / "edited.png").write_bytes(as_png(montage(rows, len(rows) // 3)))


if __name__ == "__main__":
    main()
