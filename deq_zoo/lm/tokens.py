"""Text to ids and back: words of a corpus, bytes, or byte-pair encoding."""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

from deq_zoo.errors import DataError, ZooError
from deq_zoo.packages import optional

EOS, UNKNOWN = "<eos>", "<unk>"


class Tokenizer(ABC):
    """A vocabulary, which can be kept as bytes."""

    kind: ClassVar[str]
    size: int

    @abstractmethod
    def encode(self, text: str) -> Tensor:
        """(N,) ids."""

    def encode_lines(self, lines: Iterable[str]) -> Tensor:
        """(N,) ids of a text that comes line by line."""
        return self.encode("".join(lines))

    @abstractmethod
    def decode(self, ids: Sequence[int]) -> str:
        """The text of ids."""

    @abstractmethod
    def to_bytes(self) -> bytes:
        """Everything needed to have it again."""

    @classmethod
    @abstractmethod
    def from_bytes(cls, held: bytes) -> Tokenizer:
        """The tokenizer that `to_bytes` wrote."""


class Words(Tokenizer):
    """Words between white space, and the end of each line.

    Args:
        words: by id; the first is the end of a line.
    """

    kind = "words"

    def __init__(self, words: Sequence[str]) -> None:
        self.words = list(words)
        self.size = len(self.words)
        self._ids = {word: k for k, word in enumerate(self.words)}

    @classmethod
    def of(cls, lines: Iterable[str]) -> Words:
        """The words of a text: the end of a line, then by falling count, as they first appear."""
        counts: Counter[str] = Counter()
        for line in lines:
            counts.update(line.split())
        counts.pop(EOS, None)
        return cls([EOS, *(word for word, _ in counts.most_common())])

    def encode(self, text: str) -> Tensor:
        return self.encode_lines(text.split("\n"), closed=False)

    def encode_lines(self, lines: Iterable[str], closed: bool = True) -> Tensor:
        """The ids of lines; the last one's end counts if `closed`."""
        ids: list[int] = []
        known = self._ids
        try:
            for line in lines:
                ids.extend([known[word] for word in line.split()])
                ids.append(0)
        except KeyError as error:
            way_out = f"put {UNKNOWN} in its place" if UNKNOWN in known else "use those alone"
            raise DataError(
                f"the word {error} is not among the {self.size} of the training text: {way_out}"
            ) from None
        return torch.tensor(ids if closed else ids[:-1], dtype=torch.long)

    def with_unknown(self, text: str) -> str:
        """A text with `<unk>` for every word that is not in the vocabulary."""
        if UNKNOWN not in self._ids:
            return text
        return re.sub(r"\S+", lambda m: m[0] if m[0] in self._ids else UNKNOWN, text)

    def count_unknown(self, text: str) -> int:
        """How many words are not in the vocabulary."""
        return sum(word not in self._ids for word in text.split())

    def decode(self, ids: Sequence[int]) -> str:
        text = " ".join("\n" if k == 0 else self.words[k] for k in ids)
        return re.sub(r" ?\n ?", "\n", text)

    def to_bytes(self) -> bytes:
        return "\n".join(self.words).encode()

    @classmethod
    def from_bytes(cls, held: bytes) -> Words:
        return cls(held.decode().split("\n"))


class Bytes(Tokenizer):
    """The bytes of UTF-8."""

    kind = "bytes"
    size = 256

    def encode(self, text: str) -> Tensor:
        return torch.tensor(list(text.encode()), dtype=torch.long)

    def decode(self, ids: Sequence[int]) -> str:
        return bytes(ids).decode(errors="replace")

    def to_bytes(self) -> bytes:
        return b""

    @classmethod
    def from_bytes(cls, held: bytes) -> Bytes:
        return cls()


class Pieces(Tokenizer):
    """Byte-pair encoding of the package `tokenizers`.

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
                f"byte-pair encoding begins with the 256 bytes, so pieces={size} are too few: take "
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
        # Lines of their own: how one is cut must not depend on what follows.
        parts = self._coder.encode_batch(text.splitlines(keepends=True))
        return torch.tensor([k for part in parts for k in part.ids], dtype=torch.long)

    def decode(self, ids: Sequence[int]) -> str:
        return str(self._coder.decode(list(ids)))

    def to_bytes(self) -> bytes:
        return str(self._coder.to_str()).encode()

    @classmethod
    def from_bytes(cls, held: bytes) -> Pieces:
        return cls(_tokenizers().Tokenizer.from_str(held.decode()))


def _tokenizers() -> Any:
    return optional("tokenizers", "lm", "byte pairs")


_KINDS: dict[str, type[Tokenizer]] = {kind.kind: kind for kind in (Words, Bytes, Pieces)}


class Lexicon(nn.Module):
    """The tokenizer a model was trained with, kept in its `state_dict`: a checkpoint can write.

    It has no parameters, and is empty until something is put into it.
    """

    tokenizer: Tokenizer | None = None

    def get_extra_state(self) -> Tensor:
        held = b""
        if self.tokenizer is not None:
            held = self.tokenizer.kind.encode() + b"\n" + self.tokenizer.to_bytes()
        return torch.frombuffer(bytearray(held), dtype=torch.uint8) if held else _NOTHING.clone()

    def set_extra_state(self, state: Tensor) -> None:
        kind, _, held = bytes(state.tolist()).partition(b"\n")
        self.tokenizer = _KINDS[kind.decode()].from_bytes(held) if kind else None

    def adopt(self, tokenizer: Tokenizer) -> None:
        """Keep a tokenizer; one that is there already must be the same."""
        held = self.tokenizer
        if held is tokenizer:
            return
        if held is not None and (
            held.kind != tokenizer.kind or held.to_bytes() != tokenizer.to_bytes()
        ):
            raise ZooError(
                "the training text has another vocabulary than these weights were trained with: "
                "it has changed since, or is not the one"
            )
        self.tokenizer = tokenizer

    def require(self) -> Tokenizer:
        """The tokenizer, or an error."""
        if self.tokenizer is None:
            raise ZooError(
                "these weights came without their vocabulary: say where the text is that they "
                "were trained with (--data-dir), or set model.lexicon.tokenizer"
            )
        return self.tokenizer


_NOTHING = torch.empty(0, dtype=torch.uint8)
