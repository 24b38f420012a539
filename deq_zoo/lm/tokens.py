"""Tokenizers, from text to ids and back: words of a corpus, bytes, or byte-pair encoding."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from deq_zoo.errors import DataError
from deq_zoo.packages import optional

EOS, UNKNOWN = "<eos>", "<unk>"


class Tokenizer(ABC):
    """A vocabulary, with ids from 0 to below `size`."""

    kind: ClassVar[str]
    size: int

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """Return the ids (N,) of a text."""

    def encode_lines(self, lines: Iterable[str]) -> Tensor:
        """Return the ids (N,) of a text that comes line by line."""
        return self.encode("".join(lines))

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """Return the text of ids."""

    def beginning_with(self, token: int) -> list[int]:
        """Return the tokens whose text begins with that of a token, itself among them."""
        return [token]

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Return the tokenizer as bytes, for `from_bytes`."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, content: bytes) -> Tokenizer:
        """Return the tokenizer that `to_bytes` wrote."""


class Words(Tokenizer):
    """The words of a text, between white space, and the end of each line.

    Args:
        words: all words by id; the first is the end of a line.
    """

    kind = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.size = len(self.words)
        self._ids = {word: k for k, word in enumerate(self.words)}

    @classmethod
    def of(cls, lines: Iterable[str]) -> Words:
        """Return the vocabulary of a text: the end of a line, then words by falling count.

        Words of equal count are in the order of their first appearance.
        """
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
        counts.pop(EOS, None)
        return cls([EOS, *(word for word, _ in counts.most_common())])

    def encode(self, text: str) -> Tensor:
        return self.encode_lines(text.split("\n"), closed=False)

    def encode_lines(self, lines: Iterable[str], closed: bool = True) -> Tensor:
        """Return the ids (N,) of lines.

        Args:
            lines: with or without line breaks.
            closed: whether the last line has an end, too.
        """
        ids: list[int] = []
        by_word = self._ids
        try:
            for line in lines:
                ids.extend([by_word[word] for word in line.split()])
                ids.append(0)
        except KeyError as error:
            advice = f"put {UNKNOWN} in its place" if UNKNOWN in by_word else "use only those words"
            raise DataError(
                f"the word {error} is not among the {self.size} of the training text: {advice}"
            ) from None
        return torch.tensor(ids if closed else ids[:-1], dtype=torch.long)

    def with_unknown(self, text: str) -> str:
        """Return a text with `<unk>` for every unknown word, if the vocabulary has `<unk>`."""
        if UNKNOWN not in self._ids:
            return text
        return re.sub(r"\S+", lambda m: m[0] if m[0] in self._ids else UNKNOWN, text)

    def count_unknown(self, text: str) -> int:
        """Return how many words of a text are not in the vocabulary."""
        return sum(word not in self._ids for word in text.split())

    def decode(self, ids: Sequence[int]) -> str:
        text = " ".join("\n" if k == 0 else self.words[k] for k in ids)
        return re.sub(r" ?\n ?", "\n", text)

    def to_bytes(self) -> bytes:
        return "\n".join(self.words).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Words:
        return cls(content.decode().split("\n"))


class Bytes(Tokenizer):
    """The 256 bytes of UTF-8."""

    kind = "bytes"
    size = 256

    def encode(self, text: str) -> Tensor:
        return torch.tensor(list(as_utf8(text)), dtype=torch.long)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def to_bytes(self) -> bytes:
        return b""

    @classmethod
    def from_bytes(cls, content: bytes) -> Bytes:
        return cls()


class Pieces(Tokenizer):
    """Byte-pair encoding by the package `tokenizers`.

    Args:
        coder: a `tokenizers.Tokenizer`.
    """

    kind = "pieces"

    def __init__(self, coder: Any) -> None:
        self._coder = coder
        self.size = int(coder.get_vocab_size())

    @classmethod
    def of(cls, text: str, size: int) -> Pieces:
        """Learn at most `size` pieces from a text, the 256 bytes among them."""
        if size < 256:
            raise DataError(
                f"byte-pair encoding begins with the 256 bytes, so pieces={size} is too few: set "
                "more, or 0 for bytes"
            )
        package = _tokenizers()
        coder = package.Tokenizer(package.models.BPE())
        coder.pre_tokenizer = package.pre_tokenizers.ByteLevel(add_prefix_space=False)
        coder.decoder = package.decoders.ByteLevel()
        alphabet = package.pre_tokenizers.ByteLevel.alphabet()
        trainer = package.trainers.BpeTrainer(
            vocab_size=size, initial_alphabet=alphabet, show_progress=False
        )
        coder.train_from_iterator(text.splitlines(keepends=True), trainer)
        return cls(coder)

    def encode(self, text: str) -> Tensor:
        as_utf8(text)
        # Line by line: how a line is cut must not depend on the lines after it.
        parts = self._coder.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([k for part in parts for k in part.ids], dtype=torch.long)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._coder.decode(list(ids)))

    def beginning_with(self, token: int) -> list[int]:
        beginning = self._coder.id_to_token(token)
        pieces = self._coder.get_vocab()
        return sorted(k for piece, k in pieces.items() if piece.startswith(beginning))

    def to_bytes(self) -> bytes:
        return str(self._coder.to_str()).encode()

    @classmethod
    def from_bytes(cls, content: bytes) -> Pieces:
        return cls(_tokenizers().Tokenizer.from_str(content.decode()))


def as_utf8(text: str) -> bytes:
    """Return a text as bytes; raise `DataError` if it has halves of characters."""
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"the text has {text[error.start]!r} at position {error.start}, which is no character: "
            "it was not UTF-8 where it came from"
        ) from None


def _tokenizers() -> Any:
    return optional("tokenizers", "lm", "byte pairs")


#: Tokenizers by the name under which checkpoints keep them.
KINDS: dict[str, type[Tokenizer]] = {kind.kind: kind for kind in (Words, Bytes, Pieces)}
