"""The base of the language models: what evaluation, decoding and other programs call."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any

from torch import Tensor

from deq_zoo.lm.config import LMConfig
from deq_zoo.lm.lexicon import Lexicon
from deq_zoo.lm.memory import LMOutput, Memory
from deq_zoo.lm.prediction import TextLike, TextScore, as_ids, segment_sizes
from deq_zoo.lm.reading import score_text
from deq_zoo.model import Model
from deq_zoo.output import Output
from torchdeq.core import DEQBase


class LanguageModel(Model):
    """A model that predicts the next token from hidden states in equilibrium.

    Shapes: ids `(B, L)`, states `(B, L, D)`.

    Args:
        config: the shape.
    """

    deq: DEQBase

    def __init__(self, config: LMConfig) -> None:
        super().__init__()
        self.config = config
        self.lexicon = Lexicon()

    @abstractmethod
    def forward(
        self, ids: Tensor, z0: Tensor | None = None, *, memory: Memory | None = None, **call: Any
    ) -> LMOutput:
        """Return the hidden states of a segment, given the memory of the text before it.

        Args:
            ids: (B, L) tokens.
            z0: (B, L, D) states to start from; by default those of the design.
            memory: of the segments before; None at the beginning of a text.
            **call: options of this call of the DEQ, e.g. `f_max_iter=24`.
        """

    @abstractmethod
    def empty_memory(self, like: Tensor) -> Memory:
        """Return the memory at the beginning of a text, for a batch of the size of `like`."""

    @abstractmethod
    def nll(self, z: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood (B, L) of the tokens that follow, in nats."""

    @abstractmethod
    def log_prob(self, z: Tensor) -> Tensor:
        """Return the log-probability (B, L, V) of every token to follow."""

    @property
    def has_tolerance(self) -> bool:
        """Return whether a solve in evaluation stops at a tolerance, and can miss it."""
        return bool(self.deq.config.f_stop.goal)

    def predict(
        self,
        x: TextLike,
        z0: Tensor | None = None,
        *,
        length: int | None = None,
        memory: int | None = None,
        **call: Any,
    ) -> Output[TextScore, Tensor]:
        """Return how likely a text is: the log-probability of each token, and the perplexity.

        The model reads a long text in segments, with a memory of those before, as evaluation does.
        A word that the vocabulary lacks counts as `<unk>`. The statistics have one row for each
        segment; those of an attractor have one for each token.

        Args:
            x: a text (`str`), the path of a UTF-8 file (`pathlib.Path`), or token ids.
            z0: (1, N - 1, D) states to start from, e.g. `state` of an earlier output for the text.
            length: tokens of a segment; by default those of training.
            memory: tokens that the model remembers; by default those of its evaluation.
            **call: options of each call of the DEQ, e.g. `f_max_iter=24`.
        """
        return super().predict(x, z0, length=length, memory=memory, **call)

    def _predict(
        self,
        x: TextLike,
        z0: Tensor | None,
        *,
        length: int | None = None,
        memory: int | None = None,
        **call: Any,
    ) -> Output[TextScore, Tensor]:
        ids, unknown = as_ids(x, self.lexicon, self.config.tokens)
        sizes = segment_sizes(self.facts, length, memory)
        log_probs, state, stats = score_text(self, ids, sizes, z0, **call)
        return Output([TextScore(ids, log_probs, unknown)], state, stats)
