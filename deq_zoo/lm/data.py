"""Corpora, and the ordered walk through them that a memory needs."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.lm.tokens import Bytes, Pieces, Tokenizer, Words
from deq_zoo.task import WHOLE, Shard, generator

_HELD_OUT = 20  # a text in one file gives one part in so many to validation, and as much to test


class Corpus(NamedTuple):
    """Ids (N,) of each split, and what they stand for."""

    train: Tensor
    valid: Tensor
    test: Tensor | None
    tokenizer: Tokenizer


def wikitext(folder: str | Path | None) -> Corpus:
    """WikiText from its published files, word by word."""
    files = {split: _find(folder, split) for split in ("train", "valid", "test")}
    tokenizer = Words.of(_lines(files["train"]))
    ids = {
        split: tokenizer.encode_lines(_lines(file))
        for split, file in files.items()
        if file is not None
    }
    return Corpus(ids["train"], ids["valid"], ids.get("test"), tokenizer)


def text_file(path: str | Path | None, pieces: int) -> Corpus:
    """Any text, as bytes or in so many pieces; the last tenth is held out."""
    if path is None:
        raise DataError("say which text to learn with --set task.file=FILE")
    try:
        text = Path(path).read_text(encoding="utf-8", errors="replace")
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    return split_text(text, pieces)


def topics(pieces: int) -> Corpus:
    """The reference of the Python language that comes with it, half a megabyte."""
    from pydoc_data.topics import topics as pages  # type: ignore[import-not-found,unused-ignore]

    text = "\n\n".join(pages[name] for name in sorted(pages))
    return split_text(re.sub(r"\n{3,}", "\n\n", text), pieces)


def counting(pieces: int) -> Corpus:
    """Numbers in order, for tests."""
    start = int(torch.randint(100, (), generator=generator("counting")))
    return split_text(" ".join(str(k) for k in range(start, start + 1500)), pieces)


def split_text(text: str, pieces: int) -> Corpus:
    """A text in three parts, one after the other; pieces are learnt from the first."""
    part = len(text) // _HELD_OUT
    if part < 2:
        raise DataError(f"a text of {len(text)} characters is too short to learn from")
    cut = len(text) - 2 * part
    train = text[:cut]
    tokenizer = Pieces.of(train, pieces) if pieces else Bytes()
    valid, test = (tokenizer.encode(text[cut + k * part :][:part]) for k in range(2))
    return Corpus(tokenizer.encode(train), valid, test, tokenizer)


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
                f"a text of {len(ids)} tokens is too short for {streams} streams: lower batch"
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


def _find(folder: str | Path | None, split: str) -> Path | None:
    names = (f"{split}.txt", f"wiki.{split}.tokens")
    if folder is None:
        raise DataError(
            "WikiText is read from disk: say where train.txt and valid.txt (or "
            "wiki.train.tokens, wiki.valid.tokens) are with --data-dir FOLDER"
        )
    for name in names:
        if (Path(folder) / name).is_file():
            return Path(folder) / name
    if split == "test":
        return None
    raise DataError(f"{folder} should hold {names[0]} or {names[1]} of WikiText")


def _lines(file: Path | None) -> Iterator[str]:
    assert file is not None
    try:
        with file.open(encoding="utf-8", newline="\n") as lines:
            yield from lines
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{file} cannot be read: {error}") from None
