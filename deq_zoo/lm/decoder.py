"""The base of decoders: a text that grows token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from deq_zoo.checks import check_integers
from deq_zoo.lm.language_model import LanguageModel
from deq_zoo.lm.prediction import check_ids
from torchdeq import SolverStat


class Decoder(ABC):
    """A text that grows, in segments, as evaluation reads it.

    A token looks back to the beginning of its segment and `span` tokens further.

    Args:
        model: in evaluation mode.
        span: how many tokens before a segment the decoder remembers.
        length: tokens of a segment; as many as `span` by default.

    Attributes:
        stats: statistics of the last solve.
    """

    def __init__(self, model: LanguageModel, span: int, length: int | None = None) -> None:
        if model.training:
            raise ValueError("decoding needs model.eval(): dropout would change every answer")
        length = span if length is None else length
        check_integers(0, span=span)
        check_integers(1, length=length)
        self.model, self.span, self.length = model, span, length
        self.stats: SolverStat | None = None
        self._filled = 0  # tokens of the current segment
        self._texts: int | None = None  # of the batch, once it has tokens

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.model.device

    def feed(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the text; return log-probabilities (B, V) of the token after."""
        with torch.no_grad():
            return self.model.log_prob(self.advance(ids)[:, -1:])[:, 0]

    @torch.no_grad()
    def advance(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the text; return their states (B, n, D)."""
        self._check_batch(ids)
        if ids.shape[1] > self.length - self._filled:
            check_ids(ids.flatten(), self.model.config.tokens)  # now: no piece can be taken back
        states = []
        rest = ids
        while rest.shape[1]:
            room = self.length - self._filled
            piece, rest = rest[:, :room], rest[:, room:]
            states.append(self._read(piece))
            self._fill(piece.shape[1])
        self._texts = len(ids)
        return torch.cat(states, dim=1)

    def _check_batch(self, ids: Tensor) -> None:
        """Raise `ValueError` unless tokens are the next ones of every text."""
        if ids.dim() != 2 or not ids.numel():
            raise ValueError(
                "a decoder reads ids of shape (texts, tokens), a token of each text at least, got "
                f"shape {tuple(ids.shape)}"
            )
        if self._texts not in (None, len(ids)):
            raise ValueError(
                f"this decoder holds {self._texts} texts, and the tokens are of {len(ids)}: feed "
                "the next tokens of each text, or make a new decoder"
            )

    def _fill(self, count: int) -> None:
        """Count new tokens of the current segment, and end a segment that is full."""
        self._filled += count
        if self._filled == self.length:
            self._filled = 0
            self._end_segment()

    @abstractmethod
    def _read(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the current segment, which has room; return their states."""

    @abstractmethod
    def _end_segment(self) -> None:
        """Forget all tokens but the last `span` ones."""

    def select(self, rows: Tensor) -> None:
        """Go on with some texts of the batch, in the order of `rows`; one may be there twice."""
        self._texts = len(rows)
        self._select(rows)

    @abstractmethod
    def _select(self, rows: Tensor) -> None:
        """Keep these rows of the cache."""


def last_tokens(x: Tensor, count: int, dim: int = 1) -> Tensor:
    """Return the part of a tensor for the last `count` tokens, or all if there are fewer."""
    count = min(count, x.shape[dim])
    return x.narrow(dim, x.shape[dim] - count, count)
