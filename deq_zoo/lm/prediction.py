"""From a text as users have it to token ids, and how likely a model finds it."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import exp, inf, isfinite
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from deq_zoo.checks import check_at_least
from deq_zoo.errors import DataError, ZooError
from deq_zoo.lm.data import read_text
from deq_zoo.lm.lexicon import Lexicon
from deq_zoo.lm.tokens import Words

#: A text, the path of a text file, or token ids.
TextLike = str | os.PathLike[str] | Sequence[int] | Tensor


@dataclass(frozen=True)
class TextScore:
    """How likely a model finds a text.

    Args:
        ids: (N,) the tokens of the text.
        log_probs: (N - 1,) the log-probability, in nats, of every token after the first, given the
            tokens before it.
        unknown_words: how many words the vocabulary lacks; the model read `<unk>` instead.
    """

    ids: Tensor
    log_probs: Tensor
    unknown_words: int = 0

    @property
    def loss(self) -> float:
        """Return the mean negative log-probability, in nats per token."""
        return -float(self.log_probs.double().mean())

    @property
    def perplexity(self) -> float:
        """Return `exp` of the loss."""
        return perplexity(self.loss)

    def as_data(self) -> dict[str, Any]:
        """Return the score as plain values; JSON has no infinity, so that is None."""
        return {
            "perplexity": self.perplexity if isfinite(self.perplexity) else None,
            "loss": self.loss,
            "tokens": len(self.log_probs),
            "unknown_words": self.unknown_words,
        }


class SegmentSizes(NamedTuple):
    """The tokens of a segment, and the tokens before it that a model remembers."""

    length: int
    memory: int


def perplexity(loss: float) -> float:
    """Return the perplexity of a loss in nats per token; infinity if it exceeds all floats."""
    return exp(loss) if loss < 700 else inf


def as_ids(x: TextLike, lexicon: Lexicon, tokens: int) -> tuple[Tensor, int]:
    """Return the token ids (N,) of a text, and how many of its words are unknown.

    Args:
        x: a text, the path of a text file, or token ids.
        lexicon: holds the tokenizer; token ids need none.
        tokens: size of the vocabulary.
    """
    source, unknown = "the text", 0
    if isinstance(x, os.PathLike):
        source = str(x)
        x = read_text(Path(x))
    if isinstance(x, str):
        tokenizer = lexicon.require()
        if isinstance(tokenizer, Words):
            unknown, x = tokenizer.count_unknown(x), tokenizer.with_unknown(x)
        ids = tokenizer.encode(x)
    else:
        ids = check_ids(x, tokens)
    if len(ids) < 2:
        raise DataError(
            f"{source} has {len(ids)} tokens: the first token is not predicted, so a perplexity "
            "needs at least 2"
        )
    return ids, unknown


def segment_sizes(facts: Mapping[str, Any], length: int | None, memory: int | None) -> SegmentSizes:
    """Return the sizes with which a model reads a text.

    Args:
        facts: `length` and `memory` of the training, if the model comes from a checkpoint.
        length: wins over that of `facts`, unless it is None.
        memory: wins over that of `facts`, unless it is None.
    """
    length = facts.get("length") if length is None else length
    memory = facts.get("memory") if memory is None else memory
    if length is None or memory is None:
        raise ZooError(
            "the model does not know the sizes of its segments and its memory: pass length= and "
            "memory=, or load it from a run or a checkpoint by deq_zoo.load"
        )
    check_at_least(1, length=length)
    check_at_least(0, memory=memory)
    return SegmentSizes(length, memory)


def check_ids(x: Any, tokens: int) -> Tensor:
    """Return token ids as a tensor (N,), or raise an error if they are none."""
    if not isinstance(x, (Sequence, Tensor)) or isinstance(x, (str, bytes)):
        raise TypeError(f"a text is a str, a path or token ids, got {type(x).__name__}")
    ids = torch.as_tensor(x).detach().cpu()
    whole = not (ids.is_floating_point() or ids.is_complex() or ids.dtype == torch.bool)
    if ids.dim() != 1 or not (whole or not len(ids)):
        raise ValueError(
            f"token ids are whole numbers of shape (tokens,), got {ids.dtype} {tuple(ids.shape)}"
        )
    ids = ids.long()
    if len(ids) and not (int(ids.min()) >= 0 and int(ids.max()) < tokens):
        raise ValueError(
            f"token ids must lie in [0, {tokens}), got {int(ids.min())} to {int(ids.max())}"
        )
    return ids
