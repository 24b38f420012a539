"""Corpora, and the ordered walk through them that a memory needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.data_dir import data_folder
from deq_zoo.errors import DataError
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from deq_zoo.task import WHOLE, Shard, generator

_HELD_OUT = 20  # a text in one file gives one part in so many to validation, and as much to test


class Corpus(NamedTuple):
    """Ids (N,) to learn from and to choose by, and what they stand for."""

    train: Tensor
    valid: Tensor
    tokenizer: Tokenizer


def wikitext(folder: str | Path | None) -> Corpus:
    """WikiText from its published files, word by word."""
    tokenizer = Words.of(_lines(_find(folder, "train")))
    train, valid = (wikitext_split(folder, split, tokenizer) for split in ("train", "valid"))
    return Corpus(train, valid, tokenizer)


def wikitext_split(folder: str | Path | None, split: str, tokenizer: Tokenizer) -> Tensor:
    """(N,) a part of WikiText in the vocabulary of a model."""
    return tokenizer.encode_lines(_lines(_find(folder, split)))


def read_text(path: str | Path | None) -> str:
    """The text of a file."""
    if path is None:
        raise DataError("say which text to learn with --set task.file=FILE")
    try:
        return Path(path).read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8: {error.reason} at byte {error.start}; convert it, e.g. with "
            "iconv -f LATIN1 -t UTF-8"
        ) from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None


def topics() -> str:
    """The reference of the Python language that comes with it, half a megabyte."""
    from pydoc_data.topics import topics as pages  # type: ignore[import-not-found,unused-ignore]

    text = "\n\n".join(pages[name] for name in sorted(pages))
    return re.sub(r"\n{3,}", "\n\n", text)


def counting() -> str:
    """Numbers in order, for tests."""
    start = int(torch.randint(100, (), generator=generator("counting")))
    return " ".join(str(k) for k in range(start, start + 1500))


def split_text(text: str) -> dict[str, str]:
    """A text in three parts, one after the other; the last tenth is held out."""
    part = len(text) // _HELD_OUT
    if part < 2:
        raise DataError(f"a text of {len(text)} characters is too short to learn from")
    cut = len(text) - 2 * part
    return {"train": text[:cut], "valid": text[cut : cut + part], "test": text[cut + part :]}


def tokenised(text: str, pieces: int) -> Corpus:
    """A text as bytes, or in pieces that are learnt from its first part."""
    parts = split_text(text)
    tokenizer = Pieces.of(parts["train"], pieces) if pieces else Bytes()
    train, valid = (tokenizer.encode(parts[split]) for split in ("train", "valid"))
    return Corpus(train, valid, tokenizer)


class Streams(NamedTuple):
    """A text cut into streams that are read side by side, a segment at a time.

    Args:
        ids: (S, n) each row a stretch of the text; what does not fill a column is left out.
        length: tokens of a segment; the last one may be shorter.
    """

    ids: Tensor
    length: int

    @classmethod
    def of(cls, ids: Tensor, streams: int, length: int) -> Streams:
        """Cut a text."""
        n = len(ids) // streams
        if n < 2:
            raise DataError(
                f"a text of {len(ids)} tokens is too short for {streams} streams of at least 2: "
                "lower batch if it is to learn from, eval_batch if to evaluate"
            )
        return cls(ids[: n * streams].view(streams, n), length)

    def __len__(self) -> int:
        return -(-(self.ids.shape[1] - 1) // self.length)

    def segment(self, k: int, shard: Shard = WHOLE) -> tuple[Tensor, Tensor]:
        """(S / world, L) inputs and the tokens after them, for one process's streams."""
        streams = len(self.ids)
        if streams % shard.world:
            raise DataError(f"{streams} streams cannot be shared by {shard.world} processes")
        own = streams // shard.world
        rows = self.ids[shard.rank * own : (shard.rank + 1) * own]
        first = k * self.length
        last = min(first + self.length, rows.shape[1] - 1)
        return rows[:, first:last], rows[:, first + 1 : last + 1]

    def segments(self) -> Iterator[tuple[Tensor, Tensor]]:
        """All of them, in order."""
        return (self.segment(k) for k in range(len(self)))


def _find(folder: str | Path | None, split: str) -> Path:
    root = data_folder(
        folder, "WikiText", "train.txt and valid.txt (or wiki.train.tokens and wiki.valid.tokens)"
    )
    names = (f"{split}.txt", f"wiki.{split}.tokens")
    for name in names:
        if (root / name).is_file():
            return root / name
    raise DataError(f"{folder} should hold {names[0]} or {names[1]} of WikiText")


def _lines(file: Path) -> Iterator[str]:
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
