"""The vectors of all tokens, for input and output: one plain table, or clusters."""

from __future__ import annotations

from math import sqrt

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from deq_zoo.lm.adaptive import AdaptiveVocabulary, look_up
from deq_zoo.lm.config import LMConfig


class TiedVocabulary(nn.Module):
    r"""One table for input and output, without a bias: $e(x) = s\, E[x]$, logits $E h$.

    Args:
        tokens: V.
        width: D.
        scale: s.
    """

    def __init__(self, tokens: int, width: int, scale: float) -> None:
        super().__init__()
        self.tokens, self.scale = tokens, scale
        self.weight = nn.Parameter(torch.empty(tokens, width))

    def forward(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of ids (B, L), for hooks to see."""
        return self.embed(ids)

    def embed(self, ids: Tensor) -> Tensor:
        """Return the vectors (B, L, D) of ids (B, L)."""
        _check(ids)
        e = look_up(ids, self.weight)
        return e if self.scale == 1 else e * self.scale

    def nll(self, h: Tensor, target: Tensor) -> Tensor:
        """Return the negative log-likelihood (B, L) of every target."""
        _check(target)
        logits = self.logits(h).flatten(0, -2)
        # -100, the padding of other programs, must raise an error and not have the loss 0.
        loss = F.cross_entropy(logits, target.flatten(), reduction="none", ignore_index=-(2**62))
        return loss.view(target.shape)

    def log_prob(self, h: Tensor) -> Tensor:
        """Return the log-probability (B, L, V) of every token."""
        return self.logits(h).log_softmax(-1)

    def logits(self, h: Tensor) -> Tensor:
        """Return logits (B, L, V), in single precision at least."""
        logits = F.linear(h, self.weight)
        return logits.float() if logits.dtype in (torch.float16, torch.bfloat16) else logits


class ClusteredVocabulary(AdaptiveVocabulary):
    """Adaptive embedding and softmax whose vectors begin as large as those of one plain table.

    Args:
        config: the shape.
        size: root mean square of the vectors before training.
        scale: a constant factor of the looked-up vectors.
    """

    def __init__(self, config: LMConfig, size: float, scale: float) -> None:
        c = config
        super().__init__(c.tokens, c.width, c.embed or c.width, c.cutoffs, c.shrink)
        self.factor = scale / sqrt(c.width)  # the base multiplies by the root of the width
        for table in self.tables:
            nn.init.normal_(table, std=size)
        for projection in self.projections:
            nn.init.normal_(projection, std=projection.shape[1] ** -0.5)
        if self.head is not None:
            nn.init.normal_(self.head, std=c.width**-0.5)
        nn.init.normal_(self.cluster_weight, std=size)

    def embed(self, ids: Tensor) -> Tensor:
        return super().embed(ids) * self.factor


def _check(ids: Tensor) -> None:
    """Raise `ValueError` unless ids have the right type and shape."""
    if ids.dim() != 2 or ids.dtype != torch.long:
        raise ValueError(
            f"tokens are int64 ids of shape (streams, length), got {ids.dtype} {tuple(ids.shape)}"
        )
