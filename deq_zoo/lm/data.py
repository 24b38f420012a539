"""Corpora in three splits, and the order in which a model with a memory reads them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from deq_zoo.task import WHOLE, Shard, generator

_HELD_OUT = 20  # one part in so many of a single text is for validation, and as much for the test
#: The splits of a task, and their names in the files of WikiText.
SPLITS = {"train": "train", "val": "valid", "test": "test"}


class Corpus(NamedTuple):
    """The token ids (N,) of training and validation data, and their tokenizer."""

    train: Tensor
    val: Tensor
    tokenizer: Tokenizer


def wikitext(folder: str | Path | None) -> Corpus:
    """Read WikiText from its published files, word by word."""
    tokenizer = Words.of(_lines(_find(folder, "train")))
    train, val = (wikitext_split(folder, split, tokenizer) for split in ("train", "val"))
    return Corpus(train, val, tokenizer)


def wikitext_split(folder: str | Path | None, split: str, tokenizer: Tokenizer) -> Tensor:
    """Return the ids (N,) of a split of WikiText in the vocabulary of a model."""
    return tokenizer.encode_lines(_lines(_find(folder, split)))


def read_text(path: str | Path | None) -> str:
    """Return the text of a file."""
    if path is None:
        raise DataError("name the text to learn from by --set task.file=FILE")
    try:
        with Path(path).open(encoding="utf-8", newline="") as file:  # bytes as they are
            return file.read()
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it, e.g. with "
            "iconv -f LATIN1 -t UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def topics() -> str:
    """Return the reference of the Python language that Python includes, half a megabyte."""
    return join_pages(topic_pages())


def topic_pages() -> list[str]:
    """Return the pages of that reference, in the order of their names."""
    from pydoc_data.topics import topics as pages  # type: ignore[import-not-found,unused-ignore]

    return [re.sub(r"\n{3,}", "\n\n", pages[name]) for name in sorted(pages)]


def join_pages(pages: Sequence[str]) -> str:
    """Return pages as one text, with an empty line between two of them."""
    return re.sub(r"\n{3,}", "\n\n", "\n\n".join(pages))


def counting() -> str:
    """Return numbers in rising order, a text for tests."""
    start = int(torch.randint(100, (), generator=generator("counting")))
    return " ".join(str(k) for k in range(start, start + 1500))


def split_text(text: str) -> dict[str, str]:
    """Return the three splits of a text, one after the other: 90 %, 5 % and 5 %."""
    part = len(text) // _HELD_OUT
    if part < 2:
        raise DataError(f"a text of {len(text)} characters is too short to learn from")
    cut = len(text) - 2 * part
    return {"train": text[:cut], "val": text[cut : cut + part], "test": text[cut + part :]}


def tokenised(parts: Mapping[str, str], pieces: int) -> Corpus:
    """Return the splits of a text as bytes, or in `pieces` that the training split teaches."""
    tokenizer = Pieces.of(parts["train"], pieces) if pieces else Bytes()
    return Corpus(tokenizer.encode(parts["train"]), tokenizer.encode(parts["val"]), tokenizer)


class Streams(NamedTuple):
    """A text cut into streams, which a model reads side by side, a segment at a time.

    Args:
        ids: (S, n), each row a part of the text; the rest that does not fill a column is left out.
        length: tokens of a segment; the last segment may be shorter.
    """

    ids: Tensor
    length: int

    @classmethod
    def of(cls, ids: Tensor, streams: int, length: int) -> Streams:
        """Return a text of ids (N,) cut into streams."""
        n = len(ids) // streams
        if n < 2:
            raise DataError(
                f"a text of {len(ids)} tokens is too short for {streams} streams of at least 2: "
                "lower batch if it is training data, eval_batch if it is validation or test data"
            )
        return cls(ids[: n * streams].view(streams, n), length)

    def __len__(self) -> int:
        return -(-(self.ids.shape[1] - 1) // self.length)

    def segment(self, k: int, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
        """Return segment `k`, (S / world, L) tokens and the tokens after them, of one process."""
        streams = len(self.ids)
        if streams % shard.world:
            raise DataError(f"{streams} streams cannot be divided among {shard.world} processes")
        own = streams // shard.world
        rows = self.ids[shard.rank * own : (shard.rank + 1) * own]
        first = k * self.length
        last = min(first + self.length, rows.shape[1] - 1)
        return rows[:, first:last], rows[:, first + 1 : last + 1]

    def segments(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield all segments, in order."""
        return (self.segment(k) for k in range(len(self)))


class Segment(NamedTuple):
    """A batch of training.

    Args:
        ids: (S, L) tokens.
        target: (S, L) the tokens after them.
        first: whether the segment is read without memory, as the beginning of a text.
        jac_weight: weight of the Jacobian's regularisation at this step.
        ahead: evaluations of f before those with a gradient; None leaves them to the DEQ.
        explicit: take one evaluation of f in place of a solve.
    """

    ids: Tensor
    target: Tensor
    first: bool
    jac_weight: float
    ahead: int | None
    explicit: bool


def _find(folder: str | Path | None, split: str) -> Path:
    """Return the file of a split, or raise `DataError` if there is none."""
    files = "train.txt, valid.txt and test.txt (or wiki.train.tokens, ...)"
    root = data_folder(folder, "WikiText", files)
    names = (f"{SPLITS[split]}.txt", f"wiki.{SPLITS[split]}.tokens")
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"{folder} should hold {names[0]} or {names[1]} of WikiText")


def _lines(file: Path) -> Iterator[str]:
    """Yield the lines of a file."""
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
