"""How far is `lm-reference` from an explicit transformer, and from programs that compress text?

Both models have the same blocks (the attractor has a few gates more), and train on the same text
for the same processor time, with the learning rate of the preset: of three rates it was the best
for both designs in `lm_designs`. The compressors read nothing first, or the first 90 % of Python's
topics, or the training text of the models, from which copies of held-out passages are removed; not
bzip2, whose blocks of 900 kB cannot refer to so long a text. `compare` trains, `compress` runs xz
and bzip2. The unit is bits per byte of held-out text.
"""

from __future__ import annotations

import argparse
import bz2
import lzma
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from benchmarks.lm_contest import with_rate
from benchmarks.lm_rivals import EXPLICIT, RivalTask
from benchmarks.lm_training import evaluate, train, trained
from benchmarks.rows import Job, Row, make_rows
from benchmarks.storing import results_file
from deq_zoo.lm import data as corpora
from deq_zoo.lm.presets import lm_reference
from deq_zoo.lm.reference import reference_splits
from deq_zoo.lm.task import LanguageTask
from deq_zoo.preset import Preset
from deq_zoo.task import Split

NAME = "lm_reference"
SPLITS: tuple[Split, ...] = ("val", "test")


@dataclass(frozen=True)
class Size:
    """The size of the benchmark; the names of its files begin with `prefix`."""

    prefix: str = "reference-"
    seconds: float = 1200.0


SMALL = Size(prefix="small-reference-", seconds=3.0)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", choices=tuple(PARTS), help="one of the parts")
    parser.add_argument("--processes", type=int, default=2, help="runs at a time")
    parser.add_argument("--small", action="store_true", help="a minute, to try it out")
    args = parser.parse_args()
    size = SMALL if args.small else Size()
    file = results_file(NAME, args.small)
    for part in [args.only] if args.only else list(PARTS):
        seeds = range(1) if part == "compare" else ()  # a compressor draws no random numbers
        make_rows(file, part, PARTS[part](size), seeds, args.processes)


def models() -> dict[str, Preset]:
    """Return the preset of `lm-reference`, and that of the explicit transformer, `Plain`.

    Both always have a memory in training, as in the score; the preset forgets at times, to learn
    how a text begins.
    """
    preset = lm_reference()
    task = replace(RivalTask(**vars(preset.task)), forget=0.0)
    return {
        "attractor": replace(preset, task=task),
        "explicit": replace(preset, task=replace(task, **EXPLICIT)),
    }


def compare(size: Size) -> Iterator[Job]:
    """Yield a long run of each model."""
    for name, preset in models().items():
        changed = replace(preset, optim=with_rate(preset.optim, preset.optim.lr))
        yield Job(name, train_and_score, (f"{size.prefix}{name}", changed, size))


def train_and_score(run: str, preset: Preset, size: Size) -> Row:
    """Train, and score the pages that are held out."""
    row = train(run, preset, 0, size.seconds)
    task = preset.task
    assert isinstance(task, LanguageTask)
    model = trained(run, task)
    found = {split: evaluate(task, model, split)["bits_per_byte"] for split in SPLITS}
    return row | {"rate": preset.optim.lr, "bits_per_byte": found}


def compress(size: Size) -> Iterator[Job]:
    """Yield the bits of compressors for a byte of the held-out pages."""
    for name in _COMPRESSORS:
        yield Job(name, compressed, (name,))


def compressed(name: str) -> Row:
    """Return bits per byte of one compressor, alone and after texts that it may refer to."""
    squeeze, texts = _COMPRESSORS[name], reference_splits()
    before = {
        "alone": "",
        "after the topics": corpora.split_text(corpora.topics())["train"],
    }
    if name != "bzip2":
        before["after the training text"] = texts["train"]
    held_out = {split: texts[split].encode() for split in SPLITS}
    row: Row = {"bytes": {split: len(text) for split, text in held_out.items()}}
    for how, known in before.items():
        own = squeeze(known.encode()) if known else 0
        row[how] = {
            split: 8 * (squeeze(known.encode() + text) - own) / len(text)
            for split, text in held_out.items()
        }
    return row


def _xz(text: bytes) -> int:
    return len(lzma.compress(text, preset=9 | lzma.PRESET_EXTREME))


def _bzip2(text: bytes) -> int:
    return len(bz2.compress(text, 9))


_COMPRESSORS: dict[str, Callable[[bytes], int]] = {"xz": _xz, "bzip2": _bzip2}

PARTS: dict[str, Callable[[Size], Iterator[Job]]] = {
    "compare": compare,
    "compress": compress,
}

if __name__ == "__main__":
    main()
