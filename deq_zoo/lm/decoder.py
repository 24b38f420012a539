"""The base of decoders: a text that grows token by token."""

from __future__ import annotations

from abc import ABC, abstractmethod

import torch
from torch import Tensor

from deq_zoo.checks import check_at_least
from deq_zoo.lm.language_model import LanguageModel
from torchdeq import SolverStat


class Decoder(ABC):
    """A text that grows.

    Args:
        model: in evaluation mode.
        span: how many earlier tokens the decoder remembers.

    Attributes:
        stats: statistics of the last solve.
    """

    def __init__(self, model: LanguageModel, span: int) -> None:
        if model.training:
            raise ValueError("decoding needs model.eval(): dropout would change every answer")
        check_at_least(1, span=span)
        self.model, self.span = model, span
        self.stats: SolverStat | None = None

    @property
    def device(self) -> torch.device:
        """Return the device of the model."""
        return self.model.device

    def feed(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the text; return log-probabilities (B, V) of the token after."""
        with torch.no_grad():
            return self.model.log_prob(self.advance(ids)[:, -1:])[:, 0]

    @abstractmethod
    def advance(self, ids: Tensor) -> Tensor:
        """Add tokens (B, n) to the text; return their states (B, n, D)."""

    @abstractmethod
    def select(self, rows: Tensor) -> None:
        """Go on with some texts of the batch, in the order of `rows`; one may be there twice."""
